"""The process around the reconciler: probes, failures of a pass, relisting."""

import socket
from typing import Any

import aiohttp
import pytest

from fakekube import Call, FakeKube, busy
from kimi_operator.handlers import Daemons, Sessions, Wakes
from kimi_operator.kube import Credentials
from kimi_operator.main import Operator
from kimi_operator.metrics import Metrics
from kimi_operator.settings import OperatorSettings
from kimi_runtime.errors import ConfigError
from operator_world import KEY, World, nano


async def login() -> Credentials:
    return Credentials("https://127.0.0.1:1", None, None, True, None, None)


@pytest.fixture
def operator() -> Operator:
    settings = OperatorSettings(("llm",), "llm", "me", None, True, 0, 20, 40, "info")
    return Operator(settings, FakeKube(), login)


async def answer(port: int, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}") as found,
    ):
        return found.status, await found.text()


async def test_a_candidate_is_ready_to_take_over_and_a_leader_once_it_watches(operator: Operator):
    async with operator.probes("127.0.0.1") as port:
        assert (await answer(port, "/readyz"))[0] == 200
        await operator.leadership.attempt()
        assert (await answer(port, "/readyz"))[0] == 503
        operator.ready.set()
        assert (await answer(port, "/readyz"))[0] == 200


async def test_a_deployment_nobody_serves_makes_the_process_unhealthy(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
):
    async with operator.probes("127.0.0.1") as port:
        assert await answer(port, "/healthz") == (200, "ok")
        with operator.wakes.of(KEY):
            monkeypatch.setattr("kimi_operator.main.STUCK_S", -1.0)
            status, text = await answer(port, "/healthz")
    assert status == 500
    assert "waited for its pass" in text


async def test_a_taken_probe_port_ends_the_process_with_an_error_that_names_it():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        settings = OperatorSettings(("llm",), "llm", "me", None, True, port, 20, 40, "info")
        with pytest.raises(BaseExceptionGroup) as raised:
            await Operator(settings, FakeKube(), login).run()
    known, rest = raised.value.split(ConfigError)
    assert rest is None
    assert known is not None
    assert f"port {port} " in str(known.exceptions[0])


async def test_metrics_are_served_and_name_no_object(operator: Operator):
    operator.metrics.applies.labels("Service", "create").inc()
    async with operator.probes("127.0.0.1") as port:
        status, text = await answer(port, "/metrics")
    assert status == 200
    assert 'kimi_operator_applies_total{kind="Service",reason="create"} 1.0' in text


class Stopped:
    """A flag that is set after so many looks."""

    def __init__(self, after: int) -> None:
        self.looks, self.after, self.reason = 0, after, None

    def __bool__(self) -> bool:
        self.looks += 1
        return self.looks > self.after

    async def wait(self, _: float | None) -> None:
        return


async def test_a_pass_that_fails_in_any_way_ends_neither_the_daemon_nor_the_operator():
    world = World()
    world.create(nano())
    failures: list[Any] = [busy(), RuntimeError("a defect"), ValueError("another")]

    def failing(_: Call) -> None:
        if failures:
            raise failures.pop()

    world.kube.before = failing
    metrics = Metrics()
    daemons = Daemons(world.reconciler, Wakes(metrics), metrics)
    await daemons.keep(KEY, Stopped(after=5))
    text = metrics.text().decode()
    assert 'kimi_operator_pass_seconds_count{outcome="failed"} 2.0' in text
    assert 'kimi_operator_pass_seconds_count{outcome="busy"} 1.0' in text
    assert 'kimi_operator_pass_seconds_count{outcome="ok"}' in text


async def test_every_session_of_kopf_is_closed_at_the_end_also_one_that_was_replaced_or_unused():
    sessions = Sessions(login, {})
    opened = [(await sessions.log_in()).aiohttp_session for _ in range(2)]
    assert not any(session.closed for session in opened)
    await sessions.close()
    assert all(session.closed for session in opened)


async def test_many_events_become_one_pass():
    metrics = Metrics()
    wakes = Wakes(metrics)
    with wakes.of(KEY) as event:
        wakes.begun(KEY)
        for _ in range(100):
            wakes.wake(KEY)
        assert event.is_set()
        wakes.begun(KEY)
        assert not event.is_set()
    wakes.wake(KEY)
    assert wakes.oldest_s() == 0
