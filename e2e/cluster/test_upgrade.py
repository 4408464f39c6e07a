"""The operator of the version before this one is replaced by this one."""

from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from built import images_of
from charts import CHART
from kimi_operator.observed import ObjectKey
from nano import DEPLOYMENT, NAME, NAMESPACE, OWNED, READY_S, ask, ready, restarts, router_url
from nodes import Manifest, Nodes, example

ROUTER = ObjectKey("apps/v1", "Deployment", NAMESPACE, f"{NAME}-router")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_an_upgrade_of_the_operator_restarts_no_pod(
    nodes: Nodes,
    install: Callable[[Path, str], Manifest],
    previous: Path,
    image_names: dict[str, str],
):
    """Both engines, the pool and the routers were started by the previous operator."""
    before_image = images_of(previous, "operator")["operator"]
    nodes.load(before_image["image"], before_image["archive"])
    install(previous / "charts" / "kimistack", str(before_image["image"]))
    runs = {"image": image_names["runtime"], "imagePullPolicy": "Never"}
    nodes.apply(example("kimi-nano-cluster.yaml", previous, **runs))
    nodes.until(DEPLOYMENT, ready, READY_S, "Ready under the previous operator")
    before = pods(nodes)
    with nodes.timed("helm upgrade from the previous version"):
        install(CHART, image_names["operator"])
    # what only the new operator can bring about shows that it has looked at the deployment
    nodes.merge(DEPLOYMENT, {"spec": {"router": {"replicas": 3}}})
    nodes.until(ROUTER, lambda now: (now or {})["spec"]["replicas"] == 3, READY_S, "3 replicas")
    nodes.until(DEPLOYMENT, ready, READY_S, "Ready under this operator")
    after = pods(nodes)
    assert before.keys() <= after.keys()
    assert restarts({uid: after[uid] for uid in before}) == restarts(before)
    with openai.OpenAI(base_url=router_url(nodes), api_key="none", max_retries=0) as client:
        assert ask(client).usage.completion_tokens > 0
    nodes.kubectl("delete", "kimideployment", NAME, "-n", NAMESPACE, within_s=240)


def pods(nodes: Nodes) -> dict[str, Manifest]:
    """Every pod of the deployment by uid."""
    return {pod["metadata"]["uid"]: pod for pod in nodes.list("v1/Pod", NAMESPACE, OWNED)}
