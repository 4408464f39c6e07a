"""The real cluster of tests marked `cluster`: one for the whole session."""

from collections.abc import Iterator

import pytest

from cluster import Cluster, start_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane; see `cluster.py`."""
    yield from start_cluster(tmp_path_factory.mktemp("cluster"))
