"""The operator of this process at work on a real API server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster import Server
from kimi_operator.clock import now_s
from kimi_operator.kube import ApiKube, TokenBucket, open_kube
from kimi_operator.main import Operator
from kimi_operator.settings import OperatorSettings

SOON_S = 120.0


def prepared(server: Server, namespace: str) -> Server:
    """The server, with our CRDs and a namespace of the tests' own."""
    server.install_crds()
    status, answer = server.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    assert status in (201, 409), answer
    return server


@asynccontextmanager
async def opened(server: Server) -> AsyncIterator[ApiKube]:
    """The API as the operator uses it."""
    writes = TokenBucket(100, 200, now_s, asyncio.sleep)
    async with open_kube(writes, kubeconfig=str(server.kubeconfig)) as kube:
        yield kube


@asynccontextmanager
async def operating(
    server: Server, namespace: str, identity: str = "one"
) -> AsyncIterator[tuple[ApiKube, Operator]]:
    """An operator that leads in the namespace, until the block ends."""
    settings = OperatorSettings(
        namespaces=(namespace,),
        own_namespace=namespace,
        identity=identity,
        kubeconfig=str(server.kubeconfig),
        leader_election=True,
        http_port=0,
        write_rate=100,
        write_burst=200,
        log_level="warning",
    )
    async with opened(server) as kube:
        operator = Operator(settings, kube, kube.credentials)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(operator.run())
            try:
                async with asyncio.timeout(SOON_S):
                    await operator.ready.wait()
                yield kube, operator
            finally:
                operator.stop.set()
                async with asyncio.timeout(SOON_S):
                    await asyncio.wait({task})
