"""Workers on lost nodes: their pods are given up after their lease has ended, and never before."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_operator.heard import Heard
from kimi_operator.lost import ANSWER_FOR_S, MARGIN_S, lost_pods
from kimi_operator.observed import NodeView, ObjectKey
from kimi_runtime.server.lease import Lease
from kimi_runtime.spec.signals import RouterSignals
from router_words import answer, router_pod, word, worker

LEASE_S = 30.0
BOUND_S = LEASE_S + MARGIN_S
NOW_S = 1_900_000_000.0


def node(name="a", unready_since_s=None) -> NodeView:
    ready = unready_since_s is None
    return NodeView(name, {}, (), {}, ready, unready_since_s=unready_since_s)


def worker_pod(name="w-0", on="a", lease="30") -> dict:
    labels = {
        "kimistack.dev/role": "decode",
        "kimistack.dev/revision": "abc123",
        "kimistack.dev/instance": "0",
    }
    metadata = {"name": name, "namespace": "llm", "uid": f"uid-{name}", "labels": labels}
    if lease is not None:
        metadata["annotations"] = {"kimistack.dev/lease": lease}
    spec = {"nodeName": on, "containers": []}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def children_of(*pods) -> dict:
    return {ObjectKey.of(pod): pod for pod in pods}


def says(silent_s, *, known_for_s=1e4) -> RouterSignals:
    one = worker("w-0", ready=False, silent_s=silent_s, in_flight=None)
    return word(one, known_for_s=known_for_s)


def heard(*answers, watched_s=1e6, gone=None) -> Heard:
    return Heard(tuple(answers), gone or {}, watched_s)


def lost(*, pods=None, nodes=None, said=None):
    everything = [worker_pod(), router_pod()] if pods is None else pods
    listed = [node("a", NOW_S - 100), node("b")] if nodes is None else nodes
    told = heard(answer(router_pod(), says(60.0))) if said is None else said
    return lost_pods(children_of(*everything), listed, told, NOW_S)


def test_a_pod_is_given_up_when_its_node_is_lost_and_every_router_has_heard_nothing_for_the_lease():
    (found,) = lost()
    assert (found.pod, found.node, found.expired, found.waits_for) == ("w-0", "a", True, "")


def test_pods_on_nodes_that_are_ready_are_not_lost():
    assert lost(nodes=[node("a"), node("b")]) == ()


def test_without_the_right_to_list_nodes_nothing_is_known():
    assert lost_pods(children_of(worker_pod()), None, heard(), NOW_S) == ()


ROUTER = router_pod()


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"nodes": [node("a", NOW_S - BOUND_S + 1), node("b")]}, "lease ends by 2030-"),
        ({"said": heard(answer(ROUTER, says(60.0)), watched_s=BOUND_S - 1)}, "just started"),
        ({"said": heard(answer(ROUTER, says(BOUND_S - 1)))}, "has heard of the worker"),
        ({"said": heard(answer(ROUTER, says(60.0), ANSWER_FOR_S + 1))}, "does not answer"),
        ({"said": heard()}, "does not answer the operator"),
        ({"said": heard(answer(ROUTER, says(None, known_for_s=9.0)))}, "has heard of the worker"),
        (
            {"said": heard(answer(ROUTER, says(60.0)), gone={"c": 3.0})},
            "was there until lately",
        ),
        ({"pods": [worker_pod()]}, "no router runs on another node"),
        ({"pods": [worker_pod(), router_pod(on="a")], "said": heard()}, "no router runs"),
        ({"pods": [worker_pod(lease=None), ROUTER]}, "kubectl delete pod w-0 --force"),
        ({"nodes": [node("b")]}, "Kubernetes removes the pods"),
        (
            {
                "pods": [worker_pod(), ROUTER, router_pod("r-1", "c")],
                "nodes": [node("a", NOW_S - 100), node("b"), node("c")],
            },
            "router r-1 does not answer",
        ),
    ],
)
def test_anything_less_makes_it_wait_and_says_for_what(case, why):
    (found,) = lost(**case)
    assert not found.expired
    assert why in found.waits_for


def test_a_router_on_the_same_or_another_lost_node_is_not_waited_for():
    pods = [worker_pod(), ROUTER, router_pod("r-1", "a"), router_pod("r-2", "c")]
    nodes = [node("a", NOW_S - 100), node("b"), node("c", NOW_S - 100)]
    gone = {"a": 1.0, "c": 1.0}
    (found,) = lost(pods=pods, nodes=nodes, said=heard(answer(ROUTER, says(60.0)), gone=gone))
    assert found.expired


@dataclass
class Play:
    """A worker, two routers and an operator, of which anything may be slow, cut off or restarted.

    The worker's lease is the real one. Time is one clock that everybody reads, but the node's
    condition is written by a control plane that may be early or late.
    """

    now_s: float = NOW_S
    lease: Lease = field(default_factory=lambda: Lease(LEASE_S, epoch=1, now_s=NOW_S))
    seq: int = 0
    operator_since_s: float = NOW_S
    told: dict[str, tuple[RouterSignals, float]] = field(default_factory=dict)
    gone: dict[str, float] = field(default_factory=dict)
    unready_since_s: float | None = None

    def __post_init__(self) -> None:
        self.routers = {"r-0": (NOW_S, None, None), "r-1": (NOW_S, None, None)}

    def poll(self, router: str, arrives: bool) -> None:
        """One poll of the worker that reaches it; its answer may be lost."""
        if router not in self.routers:
            return
        since_s, newest, _ = self.routers[router]
        if newest is not None:
            self.lease.heard(1, newest, now_s=self.now_s)
        self.seq += 1
        self.lease.reported(self.seq, now_s=self.now_s)
        if arrives:
            self.routers[router] = (since_s, self.seq, self.now_s)

    def restart_router(self, router: str) -> None:
        self.gone[router] = self.now_s
        self.told.pop(router, None)
        self.routers[router] = (self.now_s, None, None)

    def ask(self, router: str) -> None:
        since_s, _, answered_s = self.routers[router]
        silent_s = None if answered_s is None else self.now_s - answered_s
        self.told[router] = (says(silent_s, known_for_s=self.now_s - since_s), self.now_s)

    def restart_operator(self) -> None:
        self.operator_since_s = self.now_s
        self.told, self.gone = {}, {}

    def silence(self, seconds: float, asks: bool) -> None:
        """Nothing is heard for a while; then the operator may ask whoever is there."""
        self.flap(True)
        self.now_s += seconds
        for router in self.routers if asks else ():
            self.ask(router)

    def flap(self, lost: bool) -> None:
        if not lost:
            self.unready_since_s = None
        elif self.unready_since_s is None:
            self.unready_since_s = self.now_s

    def given_up(self) -> bool:
        pods = [router_pod(name, "b") for name in self.routers]
        answers = [
            answer(router_pod(name, "b"), told, self.now_s - at_s)
            for name, (told, at_s) in self.told.items()
        ]
        ago_s = [self.now_s - at_s for at_s in self.gone.values()]
        said = Heard(
            tuple(answers),
            {"b": min(ago_s)} if ago_s else {},
            self.now_s - self.operator_since_s,
        )
        nodes = [node("a", self.unready_since_s), node("b")]
        found = lost_pods(children_of(worker_pod(), *pods), nodes, said, self.now_s)
        return any(one.expired for one in found)


ROUTERS = st.sampled_from(["r-0", "r-1"])
EVENTS = st.one_of(
    st.tuples(st.just("wait"), st.floats(0.1, 50.0)),
    st.tuples(st.just("silence"), st.floats(20.0, 60.0), st.booleans()),
    st.tuples(st.just("silence"), st.floats(20.0, 60.0), st.just(True)),
    st.tuples(st.just("poll"), ROUTERS, st.booleans()),
    st.tuples(st.just("ask"), ROUTERS),
    st.tuples(st.just("restart_router"), ROUTERS),
    st.tuples(st.just("restart_operator")),
    st.tuples(st.just("flap"), st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(events=st.lists(EVENTS, max_size=60), lag_s=st.floats(0.0, ANSWER_FOR_S))
def test_no_pod_is_given_up_while_its_worker_may_work(events, lag_s):
    """Whatever is cut off, flaps or restarts in whatever order.

    `lag_s` after the decision, when the deletion takes effect, the worker still does not work,
    though routers reach it again right after they were asked.
    """
    play = Play()
    for name, *arguments in events:
        if name == "wait":
            play.now_s += arguments[0]
        else:
            getattr(play, name)(*arguments)
        if play.given_up():
            assert play.lease.fenced(play.now_s)
            again = replace(play, now_s=play.now_s + lag_s, lease=play.lease)
            for router in ("r-0", "r-1"):
                again.routers = dict(play.routers)
                again.poll(router, True)
                again.poll(router, True)
            assert play.lease.fenced(again.now_s)
            return


def test_a_node_that_stays_away_is_given_up_in_the_end():
    play = Play()
    for router in ("r-0", "r-1"):
        play.poll(router, True)
    play.flap(True)
    waited_s = 0.0
    while not play.given_up():
        play.now_s += 1.0
        waited_s += 1.0
        for router in ("r-0", "r-1"):
            play.ask(router)
        assert waited_s < BOUND_S + 5.0
    assert waited_s >= BOUND_S
