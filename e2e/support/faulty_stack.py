"""A stack whose processes are killed, frozen and given other files, and what they still hold."""

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from kimi_operator.local.stack import ProcessState, StackState
from kimi_runtime import clock
from kimi_runtime.auth import read_call_keys
from kimi_runtime.router.client import PeerClient
from local_stack import START_S, Stack
from samples import Samples

READY_S = 90.0
LOOK_S = 0.05


class FaultyStack:
    """`kimistack up` with a deployment's file of its own, until `down`."""

    def __init__(self, home: Path, port: int, name: str, manifest: str, *options: str) -> None:
        self.stack, self.name = Stack(home, port), name
        self._folder = home / name
        file = home / f"{name}.yaml"
        file.write_text(manifest)
        up = ("up", "--detach", "-f", str(file), "--port", str(port), *options)
        done = self.stack.command(*up, within_s=4 * START_S)
        assert done.returncode == 0, done.stderr

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.stack.port}/v1"

    def down(self) -> None:
        self.stack.command("down", within_s=2 * START_S)

    def processes(self) -> dict[str, ProcessState]:
        """As the supervisor wrote them down last."""
        state = StackState.model_validate_json((self._folder / "state.json").read_bytes())
        return {process.name: process for process in state.processes}

    @property
    def workers(self) -> list[str]:
        return [name for name, process in self.processes().items() if process.kind == "worker"]

    @property
    def pools(self) -> list[str]:
        return [name for name, process in self.processes().items() if process.kind == "umbp"]

    def signal(self, name: str, number: signal.Signals) -> None:
        pid = self.processes()[name].pid
        assert pid is not None, f"{name} does not run"
        os.kill(pid, number)

    async def restarted(self, name: str, restarts: int) -> None:
        """Wait until the process is ready after more than so many restarts."""
        end_s = clock.now_s() + READY_S
        while True:
            process = self.processes()[name]
            if process.restarts > restarts and process.phase == "ready":
                return
            assert clock.now_s() < end_s, f"{name} is {process.phase}: {process.note}"
            await asyncio.sleep(LOOK_S)

    async def kill(self, *names: str) -> None:
        """Kill processes and wait until all are ready again."""
        before = {name: self.processes()[name].restarts for name in names}
        for name in names:
            self.signal(name, signal.SIGKILL)
        for name in names:
            await self.restarted(name, before[name])

    def rewrite(self, name: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the file that the process starts from the next time."""
        path = self._folder / "specs" / f"{name}.json"
        spec = json.loads(path.read_text())
        change(spec)
        path.write_text(json.dumps(spec))

    def metrics(self, name: str) -> Samples:
        """What the process's /metrics say now."""
        port = self.processes()[name].port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return Samples(text)

    async def held(self) -> dict[str, float]:
        """What processes hold that is neither cache nor free; nothing once all requests are over.

        Blocks in use (`GET /load`), requests, tickets and blocks in quarantine of each worker;
        pins, reservations but stocks, unanswered look-ups, loans and fetches of each pool; requests
        of the router.
        """
        found: dict[str, float] = {}
        for name in self.workers:
            load, samples = await self._load(name), self.metrics(name)
            found[f"{name}: blocks"] = load.total_blocks - load.free_blocks
            found[f"{name}: requests"] = load.running + load.waiting
            for gauge in ("open_hand_offs", "quarantined_blocks"):
                found[f"{name}: {gauge}"] = samples.total(f"kimistack_worker_{gauge}")
        for name in self.pools:
            samples = self.metrics(name)
            for gauge in ("pins", "open_blocks", "peer_loans", "peer_fetching_blocks"):
                found[f"{name}: {gauge}"] = samples.total(f"kimistack_umbp_{gauge}")
            reserved = samples.by("kimistack_umbp_reservations", "state")
            reserved.pop("stock", None)  # free pages that whoever needs them takes back
            found[f"{name}: reservations"] = reserved.total()
        in_flight = self.metrics("router-0").total("kimistack_router_in_flight")
        found["router-0: requests"] = in_flight
        return {what: count for what, count in found.items() if count}

    async def quiet(self, within_s: float) -> dict[str, float]:
        """What is still held when the time is over; nothing as soon as that is so."""
        end_s = clock.now_s() + within_s
        while held := await self.held():
            if clock.now_s() > end_s:
                break
            await asyncio.sleep(0.25)
        return held

    async def _load(self, name: str) -> Any:
        key = read_call_keys(self._folder / "call-key")[0]
        port = self.processes()[name].port
        async with aiohttp.ClientSession() as http:
            client = PeerClient(http, name, f"http://127.0.0.1:{port}", key)
            return await client.load(within_s=10.0)
