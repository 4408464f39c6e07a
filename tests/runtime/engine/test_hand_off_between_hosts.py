"""Hand-offs by the network: which transport is used, and what a peer that goes away costs."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from hash_engine import Running, Setup, hash_engine, request
from kimi_runtime import clock
from kimi_runtime.spec.request import GenerateRequest, HandOff, KvPlan
from kimi_runtime.transfer.base import Transport
from kimi_runtime.transfer.network import NetworkSettings
from kimi_runtime.transfer.shm import ShmTransport
from kimi_runtime.transfer.tcp import TcpTransport

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
IDS = list(range(3, 26))
SOON_S = 10.0

PREFILL = """
import asyncio, sys
from hash_engine import Setup, hash_engine, request
from kimi_runtime.spec.request import KvPlan
from kimi_runtime.transfer.network import NetworkSettings
from kimi_runtime.transfer.tcp import TcpTransport

async def main():
    link = TcpTransport("p", NetworkSettings((b"k" * 32,)))
    ticket = ""
    async with hash_engine(Setup(name="p", transport=link)) as prefill:
        while line := await asyncio.to_thread(sys.stdin.readline):
            ids = [int(word) for word in line.split()]
            answer = await prefill.generate(request(ids, kv=KvPlan(offer=True)))
            await prefill.engine.release(ticket)
            ticket = answer.hand_off.ticket
            print(answer.hand_off.model_dump_json(), flush=True)

asyncio.run(main())
"""


class Prefill:
    """An engine in a process of its own; an offer ends the one before."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREFILL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )

    def offer(self, ids: list[int]) -> HandOff:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, ids)) + "\n")
        self.process.stdin.flush()
        return HandOff.model_validate_json(self.process.stdout.readline())

    def stop(self) -> None:
        """As a node that answers nothing any more; returns when it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    """One, killed in the end."""
    made = Prefill()
    yield made
    made.process.kill()
    made.process.communicate()


def tcp(name: str, key: bytes = KEY) -> TcpTransport:
    return TcpTransport(name, NetworkSettings((key,)))


def shm(name: str) -> ShmTransport:
    return ShmTransport(name)


def taking(hand_off: HandOff, ids: list[int] = IDS) -> GenerateRequest:
    return request(ids, 6, kv=KvPlan(take=hand_off))


async def alone(ids: list[int] = IDS) -> list[int]:
    async with hash_engine(Setup(step_tokens=128)) as engine:
        return (await engine.generate(request(ids, 6))).ids


@asynccontextmanager
async def engine(
    name: str, folder: Path, *transports: Transport, deadline_s: float = SOON_S
) -> AsyncIterator[Running]:
    async with AsyncExitStack() as owned:
        for transport in transports:
            owned.push_async_callback(transport.aclose)
        setup = Setup(name=name, also=transports, file=folder / f"{name}.kv", deadline_s=deadline_s)
        yield await owned.enter_async_context(hash_engine(setup))


def transports_used(running: Running) -> dict[str, int]:
    return {k: v for k, v in running.engine.counters().hand_off_transports.items() if v}


async def test_memory_of_one_host_is_read_as_memory(tmp_path: Path):
    async with (
        engine("p", tmp_path, shm("p"), tcp("p")) as prefill,
        engine("d", tmp_path, shm("d"), tcp("d")) as decode,
    ):
        offered = await prefill.generate(request(IDS, kv=KvPlan(offer=True)))
        assert [one.transport for one in offered.hand_off.regions] == ["shm", "tcp"]
        answer = await decode.generate(taking(offered.hand_off))
        assert answer.ids == await alone()
        assert (answer.usage.computed_tokens, answer.usage.hand_off_failure) == (1, None)
        assert transports_used(decode) == {"shm": 1}


@pytest.mark.parametrize("why", ["another folder", "no shm here"])
async def test_what_is_not_of_this_host_comes_through_the_network(tmp_path: Path, why: str):
    own = (tcp("d"),) if why == "no shm here" else (shm("d"), tcp("d"))
    async with (
        engine("p", tmp_path, shm("p"), tcp("p")) as prefill,
        engine("d", tmp_path, *own) as decode,
    ):
        hand_off = (await prefill.generate(request(IDS, kv=KvPlan(offer=True)))).hand_off
        if why == "another folder":  # of the same name, on a host that does not have the file
            elsewhere = hand_off.region.model_copy(update={"address": str(tmp_path / "no" / "p")})
            hand_off = hand_off.model_copy(update={"region": elsewhere})
        answer = await decode.generate(taking(hand_off))
        assert answer.ids == await alone()
        assert (answer.usage.computed_tokens, answer.usage.hand_off_failure) == (1, None)
        assert transports_used(decode) == {"tcp": 1}


async def test_without_a_transport_in_common_the_prompt_is_computed_and_the_usage_says_so(
    tmp_path: Path,
):
    async with (
        engine("p", tmp_path, tcp("p")) as prefill,
        engine("d", tmp_path, shm("d")) as decode,
    ):
        hand_off = (await prefill.generate(request(IDS, kv=KvPlan(offer=True)))).hand_off
        answer = await decode.generate(taking(hand_off))
        assert answer.ids == await alone()
        assert answer.usage.computed_tokens == len(IDS)
        assert answer.usage.hand_off_failure == "transport"
        assert decode.engine.counters().hand_off_failures == {"transport": 1}


async def test_kv_is_not_read_from_whoever_does_not_hold_the_call_key(tmp_path: Path):
    async with (
        engine("p", tmp_path, tcp("p", OTHER_KEY)) as prefill,
        engine("d", tmp_path, tcp("d")) as decode,
    ):
        hand_off = (await prefill.generate(request(IDS, kv=KvPlan(offer=True)))).hand_off
        answer = await decode.generate(taking(hand_off))
        assert answer.ids == await alone()
        assert answer.usage.hand_off_failure == "peer_gone"
        assert answer.usage.hand_off_tokens == 0


async def test_between_processes_only_what_is_lacking_is_moved(prefill: Prefill, tmp_path: Path):
    async with engine("d", tmp_path, tcp("d")) as decode:
        first = await decode.generate(taking(prefill.offer(IDS)))
        assert (first.usage.hand_off_tokens, first.usage.computed_tokens) == (len(IDS) - 1, 1)
        turn = [*IDS, *first.ids, 40, 41, 42]
        second = await decode.generate(taking(prefill.offer(turn), turn))
        assert second.ids == await alone(turn)
        assert second.usage.hbm_tokens == 28
        assert second.usage.hand_off_tokens + second.usage.computed_tokens == len(turn) - 28


async def test_a_prefill_process_killed_in_the_middle_costs_only_time(
    prefill: Prefill, tmp_path: Path
):
    async with engine("d", tmp_path, tcp("d")) as decode:
        await decode.generate(taking(prefill.offer(IDS)))
        other = [*IDS[::-1], 50]
        hand_off = prefill.offer(other)
        prefill.stop()
        async with asyncio.TaskGroup() as tasks:
            pulling = tasks.create_task(decode.generate(taking(hand_off, other)))
            while not decode.engine.load().waiting:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.1)  # its request for bytes is out, and nobody answers
            prefill.process.kill()
        answer = pulling.result()
        assert answer.ids == await alone(other)
        assert answer.usage.hand_off_failure == "peer_gone"
        assert answer.usage.computed_tokens == len(other)
        assert decode.engine.counters().hand_off_failures == {"peer_gone": 1}
        decode.assert_all_free()


@pytest.mark.parametrize(("known", "reason"), [(True, "late"), (False, "peer_gone")])
async def test_a_node_that_answers_nothing_is_given_up_at_the_deadline(
    prefill: Prefill, tmp_path: Path, known: bool, reason: str
):
    async with engine("d", tmp_path, tcp("d"), deadline_s=0.5) as decode:
        if known:
            await decode.generate(taking(prefill.offer(IDS)))
        other = [*IDS[::-1], 50]
        hand_off = prefill.offer(other)
        prefill.stop()
        began_s = clock.now_s()
        answer = await decode.generate(taking(hand_off, other))
        assert clock.now_s() - began_s < SOON_S
        assert answer.ids == await alone(other)
        assert answer.usage.hand_off_failure == reason
        assert decode.engine.counters().quarantined_blocks == 0
        decode.assert_all_free()


async def test_who_does_not_answer_is_left_alone_for_a_while_and_then_used_again(
    prefill: Prefill, tmp_path: Path
):
    prompts = [[*IDS[::-1], end] for end in (50, 51)]
    offers = [prefill.offer(ids) for ids in prompts]
    async with engine("d", tmp_path, tcp("d"), deadline_s=0.3) as decode, asyncio.timeout(SOON_S):
        prefill.stop()
        told = []
        for ids, hand_off in zip(prompts, offers, strict=True):
            answer = await decode.generate(taking(hand_off, ids))
            told.append(answer.usage.hand_off_failure)
        assert told == ["peer_gone", "unreachable"]
        prefill.process.send_signal(signal.SIGCONT)
        while told[-1] is not None:  # each asks again; the pause is a second
            ids = random.Random(len(told)).choices(range(500), k=9)
            answer = await decode.generate(request(ids, 1, kv=KvPlan(take=prefill.offer(ids))))
            told.append(answer.usage.hand_off_failure)
        assert set(told[2:-1]) <= {"unreachable"}
