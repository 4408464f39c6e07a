"""The end of a deployment."""

import pytest

from kimi_operator.kinds import CHILDREN
from kimi_operator.observed import ObjectKey
from nano import DEPLOYMENT, NAME, NAMESPACE, OWNED, children
from nodes import Manifest, Nodes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
GONE_S = 240


def test_nothing_is_left_of_a_deleted_deployment(nodes: Nodes, deployment: Manifest):
    with nodes.timed("kubectl delete to nothing left"):
        nodes.kubectl("delete", "kimideployment", NAME, "-n", NAMESPACE, within_s=GONE_S)
        nodes.until(DEPLOYMENT, lambda now: now is None, 1, "gone")
        for kind in (*(kind.id for kind in CHILDREN), "v1/Pod"):
            for obj in nodes.list(kind, NAMESPACE, OWNED):
                nodes.until(ObjectKey.of(obj), lambda now: now is None, GONE_S, "gone")
    assert children(nodes) == {}
