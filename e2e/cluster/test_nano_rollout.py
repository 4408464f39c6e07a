"""Another image for engines and routers: planned, paused, undone and rolled out under load; and
another operator.
"""

import json
from pathlib import Path

import openai
import pytest
import yaml

from kimi_operator.observed import ObjectKey
from load import Load
from nano import (
    DEPLOYMENT,
    NAME,
    NAMESPACE,
    READY_S,
    ask,
    condition,
    engines,
    kimi,
    ready,
    restarts,
    router_url,
    serving,
)
from nodes import Manifest, Nodes, TookTooLong

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
LEASE = ObjectKey("coordination.k8s.io/v1", "Lease", NAMESPACE, "kimi-operator")
ROLLED_OUT_S = 3 * READY_S
PAUSED_S = 10.0


@pytest.fixture(scope="module")
def new(
    nodes: Nodes,
    deployment: Manifest,
    image_names: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A file with what the deployment's spec is now, but for the image."""
    image = f"{image_names['runtime']}-next"
    nodes.tag(image_names["runtime"], image)
    now = nodes.get(DEPLOYMENT)
    assert now is not None
    file = tmp_path_factory.mktemp("new") / "kimi-nano.yaml"
    kept = {"name": NAME, "namespace": NAMESPACE}
    same = {"apiVersion": now["apiVersion"], "kind": now["kind"], "metadata": kept}
    file.write_text(yaml.safe_dump({**same, "spec": {**now["spec"], "image": image}}))
    return file


def image_of(file: Path) -> str:
    return str(yaml.safe_load(file.read_text())["spec"]["image"])


def test_a_plan_names_every_step_before_anything_is_applied(nodes: Nodes, new: Path):
    before = nodes.get(DEPLOYMENT)
    assert before is not None
    command = ("kimistack", "plan", "-f", str(new))
    printed = nodes.ran(*command, code=1)
    assert f"spec.image: {before['spec']['image']} -> {image_of(new)}" in printed
    assert all(step in printed for step in ("1/2", "2/2", "drain decode-", "create decode-"))
    rollout = json.loads(nodes.ran(*command, "-o", "json", code=1))["rollout"]
    assert rollout["from"] == before["status"]["currentRevision"]
    assert rollout["outage"] is None
    assert rollout["passes"][-1]["serving"] == {"prefill": 2, "decode": 2}
    after = nodes.get(DEPLOYMENT)
    assert after is not None
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


def test_a_rollout_pauses_and_is_undone_without_a_failed_request(nodes: Nodes, new: Path):
    """It stops with one pair of each revision; undoing replaces the pair that was new."""
    before = nodes.get(DEPLOYMENT)
    assert before is not None
    old, pods = before["status"]["currentRevision"], engines(nodes)
    with Load(router_url(nodes), NAME) as load:
        nodes.merge(DEPLOYMENT, {"spec": {"image": image_of(new)}})
        nodes.until(
            DEPLOYMENT,
            lambda now: (now or {})["status"]["updateRevision"] != old and any(updates(now)),
            READY_S,
            "starting an instance of the new revision",
        )
        assert "pauses" in kimi(nodes, "pause")
        nodes.until(
            DEPLOYMENT,
            lambda now: (
                condition(now, "Progressing").get("reason") == "Paused"
                and updates(now) == [1, 1]
                and serving(now, prefill=2, decode=2)
            ),
            READY_S,
            "paused with a pair of each revision",
        )
        with pytest.raises(TookTooLong):
            nodes.until(DEPLOYMENT, lambda now: updates(now) != [1, 1], PAUSED_S, "going on")
        assert f"goes back to revision {old}" in kimi(nodes, "undo")
        kimi(nodes, "resume")
        nodes.until(
            DEPLOYMENT,
            lambda now: settled(now, updated=0) and revision_of(now) == old,
            ROLLED_OUT_S,
            "undone",
        )
    nodes.measured("requests served while it paused half-way and was undone", load.served, "")
    nodes.measured("requests that failed then", len(load.failures), "")
    assert load.failures == []
    assert len(engines(nodes).keys() & pods.keys()) == 2, "the pair that was old was left alone"


def test_a_new_image_rolls_out_without_a_failed_request(nodes: Nodes, new: Path):
    """Prefill and decode are replaced pair by pair, and all routers."""
    before = nodes.get(DEPLOYMENT)
    assert before is not None
    old = engines(nodes)
    with Load(router_url(nodes), NAME) as load, nodes.timed("2+2 paired rollout under load"):
        kimi(nodes, "undo", "--forward")
        nodes.until(
            DEPLOYMENT,
            lambda now: settled(now, updated=2) and revision_of(now) != revision_of(before),
            ROLLED_OUT_S,
            "rolled out",
        )
    nodes.measured("the same: requests served", load.served, "")
    nodes.measured("the same: requests failed", len(load.failures), "")
    assert load.failures == []
    assert load.served > 0
    after = engines(nodes)
    assert not after.keys() & old.keys()
    images = {c["image"] for pod in after.values() for c in pod["spec"]["containers"]}
    assert images == {image_of(new)}
    printed = nodes.ran("kimistack", "plan", "-f", str(new), code=0)
    assert "+ " not in printed


def updates(now: Manifest | None) -> list[int]:
    """Instances of the update revision, of prefill and of decode."""
    pools = (now or {}).get("status", {}).get("pools", {})
    return [pools.get(role, {}).get("updated", 0) for role in ("prefill", "decode")]


def revision_of(now: Manifest | None) -> str:
    return str((now or {})["status"]["currentRevision"])


def settled(now: Manifest | None, updated: int) -> bool:
    """Whether 2+2 serve and no rollout is under way; `updated` of each are of the newest spec."""
    complete = condition(now, "Progressing").get("reason") == "Complete"
    return complete and serving(now, prefill=2, decode=2) and updates(now) == [updated, updated]


def test_a_restarted_operator_restarts_no_pod(nodes: Nodes, client: openai.OpenAI):
    before = engines(nodes)
    (old,) = nodes.list("v1/Pod", NAMESPACE, "app.kubernetes.io/name%3Dkimistack-operator")
    with nodes.timed("operator killed to its successor at work"):
        nodes.kubectl(
            *("delete", "pod", old["metadata"]["name"], "-n", NAMESPACE),
            *("--grace-period=0", "--force"),
        )
        nodes.until(
            LEASE,
            lambda now: (
                (now or {}).get("spec", {}).get("holderIdentity")
                not in ("", None, old["metadata"]["name"])
            ),
            120,
            "held by another operator",
        )
    nodes.until(DEPLOYMENT, ready, READY_S, "Ready")
    after = engines(nodes)
    assert after.keys() == before.keys()
    assert restarts(after) == restarts(before)
    assert ask(client).usage.completion_tokens > 0
