"""What only shared memory has: files, and owners that die."""

import asyncio
import os
import signal
import stat
import subprocess
import sys

import pytest

from kimi_runtime.errors import CapacityError, ConfigError, PeerGone, RegionGone
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer.base import Span
from kimi_runtime.transfer.memory import private_memory, shared_memory
from kimi_runtime.transfer.shm import SLOTS, ShmTransport

OWNER = """
import asyncio, sys
from pathlib import Path
from kimi_runtime.transfer.memory import shared_memory
from kimi_runtime.transfer.shm import ShmTransport
memory = shared_memory(Path(sys.argv[1]), 8192)
memory.view[:] = b"x" * 8192
print(ShmTransport("owner").register(memory).model_dump_json(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path):
    """Another process with a region, and its reference."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "kv")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    yield process, RegionRef.model_validate_json(process.stdout.readline())
    process.kill()
    process.communicate()


async def read_some(session):
    into = memoryview(bytearray(4096))
    await session.read([Span(4096, 0, 4096)], into, deadline_s=5.0)
    return bytes(into)


async def test_another_process_s_memory_is_read_while_it_lives_and_not_after(owner):
    process, ref = owner
    reader = ShmTransport("reader")
    session = await reader.open(ref, deadline_s=5.0)
    assert await read_some(session) == b"x" * 4096
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(PeerGone, match="ended"):
        await read_some(session)
    with pytest.raises(PeerGone):
        await reader.open(ref, deadline_s=5.0)
    await reader.aclose()


async def test_a_file_made_anew_under_the_same_name_is_another_region(tmp_path):
    path = tmp_path / "kv"
    first, reader = ShmTransport("owner"), ShmTransport("reader")
    memory = shared_memory(path, 8192)
    ref = first.register(memory)
    session = await reader.open(ref, deadline_s=5.0)
    again = shared_memory(path, 8192)
    again.view[:] = b"y" * 8192
    second = ShmTransport("owner")
    second.register(again)
    with pytest.raises(RegionGone):
        await read_some(session)
    with pytest.raises(RegionGone):
        await reader.open(ref, deadline_s=5.0)
    memory.view[0] = 1  # the old mapping is whole: nothing was truncated under it
    for transport in (reader, first, second):
        await transport.aclose()


async def test_a_removed_file_is_gone(tmp_path):
    owner, reader = ShmTransport("owner"), ShmTransport("reader")
    ref = owner.register(shared_memory(tmp_path / "kv", 8192))
    session = await reader.open(ref, deadline_s=5.0)
    (tmp_path / "kv").unlink()
    with pytest.raises(RegionGone, match="removed"):
        await read_some(session)
    await reader.aclose()
    await owner.aclose()


async def test_a_region_released_while_it_is_read_is_never_returned_as_read(tmp_path):
    size = 64 << 20
    owner, reader = ShmTransport("owner"), ShmTransport("reader", streams=1)
    ref = owner.register(shared_memory(tmp_path / "kv", size))
    session = await reader.open(ref, deadline_s=5.0)
    into = memoryview(bytearray(size))
    reading = asyncio.gather(
        session.read([Span(0, 0, size)], into, deadline_s=20.0), return_exceptions=True
    )
    await asyncio.sleep(0)
    owner.release(ref)
    assert isinstance((await reading)[0], RegionGone)
    await reader.aclose()
    await owner.aclose()


def test_shared_files_are_private_to_the_user(tmp_path):
    shared_memory(tmp_path / "kv", 10)
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o600


def test_memory_without_a_file_is_refused():
    with pytest.raises(ConfigError, match="shared_memory"):
        ShmTransport("owner").register(private_memory(10))


async def test_a_file_has_a_limited_number_of_regions_which_releasing_frees(tmp_path):
    owner = ShmTransport("owner")
    memory = shared_memory(tmp_path / "kv", 10)
    refs = [owner.register(memory) for _ in range(SLOTS)]
    with pytest.raises(CapacityError, match="release regions"):
        owner.register(memory)
    owner.release(refs[3])
    owner.register(memory)
    await owner.aclose()


def test_memory_that_does_not_fit_says_so_and_leaves_no_file(tmp_path):
    with pytest.raises(CapacityError, match="free space"):
        shared_memory(tmp_path / "kv", 1 << 50)
    assert not (tmp_path / "kv").exists()
