"""`kimistack plan` and `kubectl kimi` as people run them, against a real API server."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster, Server
from kimi_operator.clock import now_s
from live_operator import SOON_S, operating, prepared
from operator_world import nano

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]
NAMESPACE = "kimi-cli"
OURS = f"/apis/kimistack.dev/v1alpha1/namespaces/{NAMESPACE}/kimideployments"
SETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets"


@pytest.fixture(scope="session")
def server(cluster: Cluster) -> Server:
    """With our CRDs and a namespace of these tests' own."""
    return prepared(cluster.main, NAMESPACE)


async def ran(server: Server, *words: object) -> tuple[int, str, str]:
    """Exit code and output of `kimistack` with these words."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kimi_operator.cli",
        *map(str, words),
        "--kubeconfig",
        str(server.kubeconfig),
        "-n",
        NAMESPACE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(SOON_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def kimi(server: Server, *words: object) -> tuple[int, str, str]:
    return await ran(server, "kimi", *words)


async def soon(holds: Callable[[], Awaitable[Any]], what: str) -> None:
    """Ask until it holds; a request between two looks is the pause."""
    deadline_s = now_s() + SOON_S
    while not await holds():
        assert now_s() < deadline_s, f"not within {SOON_S}s: {what}"


def file_of(folder: Path, **spec: Any) -> Path:
    document = nano(**spec)
    document["metadata"] = {"name": "cli", "namespace": NAMESPACE}
    path = folder / "cli.json"
    path.write_text(json.dumps(document))
    return path


async def sets(server: Server) -> dict[str, str]:
    _, answer = await asyncio.to_thread(server.call, "GET", SETS)
    return {
        item["metadata"]["name"]: item["metadata"]["uid"]
        for item in answer["items"]
        if "deletionTimestamp" not in item["metadata"]
    }


async def test_a_deployment_is_planned_seen_and_steered(server: Server, tmp_path: Path):
    file = file_of(tmp_path)
    code, out, err = await ran(server, "plan", "-f", file)
    assert (code, err) == (1, "")
    assert "cli in namespace kimi-cli: new" in out
    code, _, err = await kimi(server, "status", "cli")
    assert code == 2
    assert "there is no KimiDeployment cli in namespace kimi-cli" in err
    async with operating(server, NAMESPACE):
        document = json.loads(file.read_text())
        status, answer = await asyncio.to_thread(server.call, "POST", OURS, document)
        assert status == 201, answer

        async def nothing_to_do() -> bool:
            code, out, _ = await ran(server, "plan", "-f", file, "-o", "json")
            return code == 0 and json.loads(out)["empty"]

        await soon(nothing_to_do, "the operator did what was planned, and no more")
        planned = file_of(tmp_path, restartToken="again")
        code, out, _ = await ran(server, "plan", "-f", planned, "-o", "json")
        plan = json.loads(out)
        assert code == 1
        assert [change["path"] for change in plan["spec"]] == ["spec.restartToken"]
        assert {"create", "delete"} <= {change["action"] for change in plan["objects"]}
        refused = file_of(tmp_path, engine="vllm")
        code, out, _ = await ran(server, "plan", "-f", refused)
        assert code == 2
        assert "engine is immutable" in out

        code, out, _ = await kimi(server, "status", "cli", "-o", "json")
        report = json.loads(out)
        assert code == 1, "no node runs pods here, so it is not Ready"
        assert {one["role"] for one in report["instances"]} == {"prefill", "decode"}
        code, out, _ = await kimi(server, "top", "cli")
        assert code == 0
        assert "0 routers heard" in out

        await steered(server)
    await unblocked(server)


async def steered(server: Server) -> None:
    code, out, _ = await kimi(server, "pause", "cli")
    assert (code, out.strip()) == (0, "cli: the rollout pauses after the step under way")
    _, answer = await asyncio.to_thread(server.call, "GET", f"{OURS}/cli")
    assert answer["spec"]["rollout"]["paused"] is True
    managers = {entry["manager"] for entry in answer["metadata"]["managedFields"]}
    assert "kubectl-kimi" in managers
    assert (await kimi(server, "resume", "cli"))[0] == 0
    code, _, err = await kimi(server, "undo", "cli")
    assert code == 2
    assert "there is no revision to go back to" in err

    before = await sets(server)
    victim = sorted(before)[0]
    code, out, err = await kimi(server, "drain", "cli", victim)
    assert (code, err) == (0, "")

    async def replaced() -> bool:
        after = await sets(server)
        return victim in after and after[victim] != before[victim]

    await soon(replaced, "a new instance has taken its place")
    after = await sets(server)
    assert {name: uid for name, uid in after.items() if name != victim} == {
        name: uid for name, uid in before.items() if name != victim
    }


async def unblocked(server: Server) -> None:
    """The operator is gone, and the deletion waits for it until it is told not to."""
    code, _, err = await kimi(server, "unblock", "cli")
    assert code == 2
    assert "is not being deleted" in err
    await asyncio.to_thread(server.call, "DELETE", f"{OURS}/cli")
    status, answer = await asyncio.to_thread(server.call, "GET", f"{OURS}/cli")
    assert status == 200, "the finalizer keeps it"
    assert "deletionTimestamp" in answer["metadata"]
    code, out, err = await kimi(server, "unblock", "cli", "--operator-namespace", NAMESPACE)
    assert (code, err) == (0, "")
    assert "kimistack.dev/teardown is taken off" in out
    assert "2 StatefulSet" in out

    async def gone() -> bool:
        status, _ = await asyncio.to_thread(server.call, "GET", f"{OURS}/cli")
        return status == 404 and not await sets(server)

    await soon(gone, "it and its children are gone")


NODE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "kimi-cli-1"},
    # no kubelet runs, or ends, what would be put there; a DaemonSet's pods would be all the same
    "spec": {"unschedulable": True},
    "status": {
        "allocatable": {"cpu": "8", "memory": "64Gi", "pods": "110"},
        "capacity": {"cpu": "8", "memory": "64Gi", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}


async def test_a_preflight_job_is_taken_by_the_server_and_left_alone(server: Server):
    status, answer = await asyncio.to_thread(server.call, "POST", "/api/v1/nodes", NODE)
    assert status in (201, 409), answer
    merge = "application/merge-patch+json"
    patch = {"status": NODE["status"]}
    await asyncio.to_thread(server.call, "PATCH", "/api/v1/nodes/kimi-cli-1/status", patch, merge)
    document = nano(preflight="Require", kvPool={"enabled": False})
    document["metadata"] = {"name": "looked", "namespace": NAMESPACE}
    try:
        async with operating(server, NAMESPACE):
            await asyncio.to_thread(server.call, "POST", OURS, document)
            path = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"

            async def job() -> Any:
                _, answer = await asyncio.to_thread(server.call, "GET", path)
                return answer["items"]

            await soon(job, "a Job looks")

            async def held() -> bool:
                _, answer = await asyncio.to_thread(server.call, "GET", f"{OURS}/looked")
                conditions = (answer.get("status") or {}).get("conditions") or []
                return any(c["reason"] == "Looking" for c in conditions)

            await soon(held, "the condition says so")
            assert await sets(server) == {}, "no instance starts before it passed"
            await asyncio.to_thread(server.call, "DELETE", f"{OURS}/looked")

            async def gone() -> bool:
                status, _ = await asyncio.to_thread(server.call, "GET", f"{OURS}/looked")
                return status == 404 and not await job()

            await soon(gone, "the Job goes with its deployment")
    finally:
        await asyncio.to_thread(server.call, "DELETE", "/api/v1/nodes/kimi-cli-1")
