"""The whole engine on the nano model: equal greedy ids however it is served."""

import asyncio
import random
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from hash_engine import Answer, request

pytest.importorskip("torch")

from kimi_runtime.engine.adapters import open_adapter
from kimi_runtime.engine.adapters.base import Adapter
from kimi_runtime.errors import CapacityError, ConfigError
from kimi_runtime.spec.request import FinishReason, GenerateRequest, KvPlan
from kimi_runtime.spec.transfer import TransferChaos, TransferNetwork
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.spec.worker import EngineLimits, RandomWeights, Role, WorkerSpec
from kimi_runtime.transfer.chaos import Fault
from kimi_runtime.umbp.daemon import serve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    key = tmp_path / "call-key"
    key.write_text("0" * 64)
    key.chmod(0o600)
    return tmp_path


def worker(folder: Path, name: str, **fields: object) -> WorkerSpec:
    limits = {"block_tokens": 16, "kv_bytes": "8MiB", "step_tokens": 96}
    limits.update(fields.pop("limits", {}))  # type: ignore[call-overload]
    return WorkerSpec(
        name=name,
        role=Role.BOTH,
        port=1,
        weights=RandomWeights(seed=3),
        limits=EngineLimits(**limits),
        run_dir=folder,
        call_key=folder / "call-key",
        **fields,
    )


async def generate(adapter: Adapter, asked: GenerateRequest) -> Answer:
    return Answer([chunk async for chunk in adapter.generate(asked)])


def prompt(seed: int, size: int) -> list[int]:
    return random.Random(seed).choices(range(2000), k=size)


async def test_corruptions_that_a_worker_s_file_asks_for_are_counted_and_all_of_them_found(folder):
    prompts = [prompt(seed, 60) for seed in range(8)]
    spec = worker(folder, "decode", chaos=TransferChaos(seed=1, corrupt=0.5))
    async with AsyncExitStack() as owned:
        source = await owned.enter_async_context(open_adapter(worker(folder, "source")))
        decode = await owned.enter_async_context(open_adapter(spec))
        for ids in prompts:
            wanted = (await generate(source, request(ids, 4))).ids
            offered = await generate(source, request(ids, kv=KvPlan(offer=True)))
            assert source.counters().open_hand_offs == 1
            taken = await generate(decode, request(ids, 4, kv=KvPlan(take=offered.hand_off)))
            assert taken.ids == wanted
            await source.release(offered.hand_off.ticket)
        counters = decode.counters()
        injected = counters.transfer_faults["corrupt"]
        assert 0 < injected < len(prompts)
        assert counters.hand_off_failures["corrupt"] == injected
        assert counters.hand_offs_taken == len(prompts) - injected
        assert set(counters.transfer_faults) == set(Fault)
        assert not source.counters().transfer_faults
        assert source.counters().open_hand_offs == 0


async def test_greedy_ids_are_equal_aggregated_cached_chunked_together_pooled_and_handed_off(
    folder,
):
    prompts = [prompt(1, 70), [*prompt(1, 40), *prompt(2, 41)], prompt(3, 33)]
    async with AsyncExitStack() as owned:
        plain = await owned.enter_async_context(open_adapter(worker(folder, "plain")))
        wanted = [(await generate(plain, request(ids, 12))).ids for ids in prompts]
        assert len({tuple(ids) for ids in wanted}) == 3

        again = [await generate(plain, request(ids, 12)) for ids in prompts]
        assert [answer.ids for answer in again] == wanted
        assert again[0].usage.hbm_tokens == 64

        tight = worker(folder, "tight", limits={"step_tokens": 7, "kv_bytes": "960KiB"})
        chunked = await owned.enter_async_context(open_adapter(tight))
        together = await asyncio.gather(*(generate(chunked, request(ids, 12)) for ids in prompts))
        assert [answer.ids for answer in together] == wanted

        decode = await owned.enter_async_context(open_adapter(worker(folder, "decode")))
        for ids, expected in zip(prompts, wanted, strict=True):
            offered = await generate(chunked, request(ids, kv=KvPlan(offer=True)))
            assert offered.finish is FinishReason.HANDED_OFF
            taken = await generate(decode, request(ids, 12, kv=KvPlan(take=offered.hand_off)))
            assert taken.ids == expected
            assert taken.usage.computed_tokens == 1
            assert await chunked.release(offered.hand_off.ticket)
        assert decode.counters().hand_off_failures == {}


async def test_workers_of_different_hosts_hand_over_by_tcp(folder):
    folders = [folder / "one", folder / "other"]
    for each in folders:
        each.mkdir()
    ids = prompt(5, 70)
    async with AsyncExitStack() as owned:
        prefill, decode = [
            await owned.enter_async_context(
                open_adapter(
                    worker(folder, name, transfer="tcp").model_copy(update={"run_dir": each})
                )
            )
            for name, each in zip(("prefill", "decode"), folders, strict=True)
        ]
        offered = await generate(prefill, request(ids, kv=KvPlan(offer=True)))
        taken = await generate(decode, request(ids, 12, kv=KvPlan(take=offered.hand_off)))
        assert taken.ids == (await generate(prefill, request(ids, 12))).ids
        assert (taken.usage.hand_off_tokens, taken.usage.computed_tokens) == (69, 1)
        assert decode.counters().hand_off_transports == {"tcp": 1}
        assert decode.info.capabilities.transports == ("tcp",)
        assert [list(each.iterdir()) for each in folders] == [[], []]


async def test_a_port_for_hand_offs_that_is_taken_is_told_at_the_start(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        network = TransferNetwork(port=taken.getsockname()[1])
        with pytest.raises(
            ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+ for KV transfers"
        ):
            async with open_adapter(worker(folder, "w", transfer="tcp", network=network)):
                pass


async def test_the_next_turn_on_another_worker_finds_its_blocks_in_the_pool(folder):
    pool = UmbpSpec(
        name="pool",
        port=0,
        socket=folder / "umbp.sock",
        arena=folder / "arena",
        dram_bytes=8 << 20,
        call_key=folder / "call-key",
    )
    async with asyncio.TaskGroup() as tasks:
        daemon = tasks.create_task(serve(pool))
        while not pool.socket.exists():
            await asyncio.sleep(0.01)
        ids = prompt(4, 70)
        async with open_adapter(worker(folder, "a", umbp_socket=pool.socket)) as first:
            wanted = await generate(first, request(ids, 8))
        async with open_adapter(worker(folder, "b", umbp_socket=pool.socket)) as second:
            found = await generate(second, request(ids, 8))
            assert found.ids == wanted.ids
            assert (found.usage.pool_tokens, found.usage.computed_tokens) == (64, 6)
        daemon.cancel()


async def test_what_the_file_names_must_be_there(folder):
    with pytest.raises(ConfigError, match="call key"):
        async with open_adapter(worker(folder, "w").model_copy(update={"call_key": folder / "no"})):
            pass
    with pytest.raises(CapacityError, match="one KV block of 16 tokens"):
        async with open_adapter(worker(folder, "w", limits={"kv_bytes": 1000})):
            pass
