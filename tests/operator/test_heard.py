"""What of the routers' words is believed for how long, and which of it wakes a deployment."""

import json

import pytest

from kimi_operator.api.load import validated
from kimi_operator.desired.render import rendered
from kimi_operator.heard import (
    DRAIN_LOADS_FOR_S,
    LOADS_FOR_S,
    Heard,
    News,
    news_of,
    outline,
    router_pods,
)
from kimi_operator.observed import K8S_CURRENT, ObjectKey
from kimi_operator.routers import QUIET_S, SCALED_S, URGENT_S, interval_s
from kimi_runtime.spec.router import FleetSpec
from operator_world import nano
from router_words import answer, router_pod, word, worker

NOW_S = 1_900_000_000.0


def pod(name, *, draining=False):
    labels = {"kimistack.dev/instance": "0", "kimistack.dev/deployment": "nano"}
    if draining:
        labels["kimistack.dev/draining"] = "true"
    metadata = {"name": name, "namespace": "llm", "uid": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}}


def thing(kind):
    labels = {"kimistack.dev/deployment": "nano"}
    metadata = {"name": "x", "namespace": "llm", "uid": kind, "labels": labels}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": {}}


def children(*objects):
    return {ObjectKey.of(one): one for one in objects}


def said(*workers, age_s=0.5, name="r-0", **more):
    return answer(router_pod(name), word(*workers, **more), age_s)


def test_loads_hold_for_two_polls_but_a_drains_only_for_seconds():
    there = children(pod("w"), pod("d", draining=True))
    words = (worker("w", in_flight=3), worker("d", in_flight=2))
    fresh = Heard((said(*words),)).loads(there)
    assert {name: report.in_flight for name, report in fresh.items()} == {"w": 3, "d": 2}
    older = Heard((said(*words, age_s=DRAIN_LOADS_FOR_S + 1),)).loads(there)
    assert set(older) == {"w"}
    assert Heard((said(*words, age_s=LOADS_FOR_S + 1),)).loads(there) == {}


def test_a_worker_that_no_router_has_a_report_of_is_not_idle():
    assert Heard((said(worker("w", in_flight=None)),)).loads(children(pod("w"))) == {}


def test_signals_are_as_old_as_the_oldest_word():
    heard = Heard((said(age_s=2.0), said(age_s=9.0, name="r-1")))
    assert heard.signals(NOW_S).at_s == NOW_S - 9.0
    assert Heard((said(age_s=LOADS_FOR_S + 1),)).signals(NOW_S).at_s is None
    assert Heard().signals(NOW_S).at_s is None


def test_silent_is_who_no_router_has_heard():
    one, two = said(worker("w", silent_s=60.0)), said(worker("w", silent_s=0.5), name="r-1")
    assert Heard((one,)).silent() == {"w"}
    assert Heard((one, two)).silent() == frozenset()


@pytest.mark.parametrize(
    ("heard", "there", "news"),
    [
        (Heard(), children(), News()),
        (Heard((said(),)), children(thing("StatefulSet")), News()),
        (
            Heard((said(),)),
            children(thing("StatefulSet"), thing("KimiWorkers")),
            News(speaking=True),
        ),
        (
            Heard((said(worker("d", in_flight=0)),)),
            children(pod("d", draining=True), thing("StatefulSet")),
            News(idle_drains=frozenset({"d"})),
        ),
        (
            Heard((said(parked_requests=1, oldest_parked_s=1.0),)),
            children(thing("KimiWorkers")),
            News(asked_at_zero=True, speaking=True),
        ),
        (
            Heard((said(worker("w", silent_s=60.0, in_flight=None)),)),
            children(pod("w"), thing("StatefulSet")),
            News(silent=frozenset({"w"})),
        ),
    ],
    ids=["nothing", "static", "scaled", "a drain is idle", "asked at zero", "a worker is silent"],
)
def test_news_is_what_a_pass_would_decide_by(heard, there, news):
    assert news_of(heard, there) == news


def test_what_is_over_wakes_nobody_but_a_planner_that_lost_its_signals():
    drained, silent = News(idle_drains=frozenset({"d"})), News(silent=frozenset({"w"}))
    assert drained.adds_to(News())
    assert not News().adds_to(drained)
    assert silent.adds_to(drained)
    assert not News().adds_to(silent)
    assert not News().adds_to(News(asked_at_zero=True))
    assert News().adds_to(News(speaking=True))


def test_loads_that_move_are_no_news():
    there = children(pod("w"), thing("StatefulSet"))
    one = Heard((said(worker("w", in_flight=1, waiting=0)),))
    other = Heard((said(worker("w", in_flight=90, waiting=80, queued_tokens=10_000)),))
    assert news_of(one, there) == news_of(other, there)


@pytest.mark.parametrize(
    ("there", "heard", "seconds"),
    [
        (children(thing("StatefulSet")), Heard(), QUIET_S),
        (children(thing("StatefulSet"), thing("KimiWorkers")), Heard(), SCALED_S),
        (children(thing("KimiWorkers")), Heard(), URGENT_S),
        (children(thing("StatefulSet"), pod("d", draining=True)), Heard(), URGENT_S),
        (
            children(thing("StatefulSet")),
            Heard((said(worker("w", silent_s=7.0)),)),
            URGENT_S,
        ),
    ],
    ids=["static", "scaled", "at zero", "draining", "silent"],
)
def test_routers_are_asked_as_often_as_somebody_waits_for_the_answer(there, heard, seconds):
    assert interval_s(there, heard) == seconds


def test_only_routers_with_an_address_are_asked():
    starting = router_pod("r-1")
    del starting["status"]["podIP"]
    ended = router_pod("r-2")
    ended["status"]["phase"] = "Failed"
    six = router_pod("r-3", address="fd00::1")
    found = router_pods(children(router_pod(), starting, ended, six, pod("w")))
    assert {one.name: one.url for one in found} == {
        "r-0": "http://10.0.0.9:8000",
        "r-3": "http://[fd00::1]:8000",
    }


def test_the_outline_of_children_says_what_the_children_say():
    six, ended = router_pod("r-3", address="fd00::1"), router_pod("r-2")
    ended["status"]["phase"] = "Failed"
    workers = pod("w"), pod("d", draining=True)
    kinds = thing("StatefulSet"), thing("KimiWorkers"), thing("ConfigMap")
    there = children(router_pod(), ended, six, *workers, *kinds)
    words = worker("d", in_flight=0), worker("w", silent_s=60.0)
    for asleep in (False, True):
        seen = {key: one for key, one in there.items() if not asleep or key.kind != "StatefulSet"}
        heard = Heard((said(*words, parked_requests=1, oldest_parked_s=1.0),))
        assert router_pods(outline(seen)) == router_pods(seen)
        assert len(router_pods(seen)) == 2
        assert heard.loads(outline(seen)) == heard.loads(seen)
        assert news_of(heard, outline(seen)) == news_of(heard, seen)
        assert interval_s(outline(seen), heard) == interval_s(seen, heard)


def objects_of(**spec):
    document = nano()
    document["spec"] |= spec
    return rendered(validated(document, "nano"), K8S_CURRENT).manifests


@pytest.mark.parametrize(
    ("spec", "waits"),
    [
        ({}, None),
        ({"prefill": {"scaling": {"mode": "External", "min": 0}}}, 600.0),
        ({"decode": {"scaling": {"mode": "External", "min": 1}}}, None),
        (
            {
                "decode": {"scaling": {"mode": "Managed", "min": 0, "max": 2}},
                "router": {"requestTimeout": "90s"},
            },
            90.0,
        ),
        (
            {"decode": {"scaling": {"mode": "Managed", "min": 0, "max": 2}}, "suspend": "Scale"},
            None,
        ),
    ],
)
def test_routers_hold_requests_where_somebody_starts_workers_for_them(spec, waits):
    files = next(
        one["data"]
        for one in objects_of(**spec)
        if one["kind"] == "ConfigMap" and "fleet.json" in one["data"]
    )
    assert FleetSpec.model_validate_json(files["fleet.json"]).wake == waits
    assert ("wake" in json.loads(files["fleet.json"])) == (waits is not None)


def test_the_operator_reaches_routers_and_pods_say_how_long_their_lease_is():
    objects = objects_of()
    policies = {o["metadata"]["name"]: o for o in objects if o["kind"] == "NetworkPolicy"}
    assert policies["nano-router"]["spec"]["ingress"] == [
        {"ports": [{"protocol": "TCP", "port": 8000}]}
    ]
    sets = [one["spec"]["template"]["metadata"] for one in objects if one["kind"] == "StatefulSet"]
    assert {pod["annotations"]["kimistack.dev/lease"] for pod in sets} == {"30"}
