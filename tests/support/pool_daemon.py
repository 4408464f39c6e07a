"""A pool daemon for tests: in this process, or as a process of its own that can be killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kimi_runtime.spec.umbp import UmbpSpec

CALL_KEY = b"0123456789abcdef0123456789abcdef"
BLOCK = 10_000

_SERVE = """
import asyncio, sys
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp.daemon import running
async def main():
    async with running(UmbpSpec.model_validate_json(sys.argv[1])) as daemon:
        print(daemon.port, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def pool_spec(folder: Path, **changes) -> UmbpSpec:
    """A small pool in `folder`, with its call key."""
    call_key = folder / "call-key"
    if not call_key.exists():
        call_key.write_bytes(CALL_KEY)
        call_key.chmod(0o600)
    fields = {
        "name": "pool",
        "port": 0,
        "socket": folder / "umbp.sock",
        "arena": folder / "arena",
        "dram_bytes": "1MiB",
        "page_bytes": 4096,
        "call_key": call_key,
        "evict_above": 1.0,  # so that tests can count what is evicted
        "evict_to": 1.0,
    }
    return UmbpSpec(**(fields | changes))


def keys_of(count: int, start: int = 0) -> list[bytes]:
    """Different keys."""
    return [n.to_bytes(16, "big") for n in range(start + 1, start + count + 1)]


def blocks_of(keys: list[bytes], size: int = BLOCK) -> list[memoryview]:
    """The bytes each key stands for: what a pool returns for a key is this, or it is wrong."""
    return [memoryview((key * (size // len(key) + 1))[:size]) for key in keys]


def targets(count: int, size: int = BLOCK) -> list[memoryview]:
    """Zeroed memory to load into."""
    return [memoryview(bytearray(size)) for _ in range(count)]


async def metrics(http: aiohttp.ClientSession) -> dict[tuple[str, ...], float]:
    """What a daemon's exporter says, by name and label values."""
    async with http.get("/metrics") as response:
        text = await response.text()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def start_python(code: str, *args: str) -> subprocess.Popen:
    """A process that runs `code` with this one's import path, pipes attached."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


class DaemonProcess:
    """A daemon in its own process; `port` once it is ready."""

    def __init__(self, spec: UmbpSpec) -> None:
        self._process = start_python(_SERVE, json.dumps(spec.model_dump(mode="json")))
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def freeze(self) -> None:
        """It stays, and does nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()
