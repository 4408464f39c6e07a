"""A stack of stand-in processes, and waiting for what becomes of them."""

import os
import select
import sys
from pathlib import Path

import stand_in
from kimi_operator.local.folders import Folders
from kimi_operator.local.machine import free_ports
from kimi_operator.local.stack import Command, Stack

HOST = "127.0.0.1"


def stack_of(folders: Folders, tmp_path: Path, **what: str) -> Stack:
    """A stack with a stand-in per keyword: `pool="", prefill_0="crash", router=""`."""
    ports = free_ports(HOST, len(what))
    commands = tuple(
        _command(name, port, tmp_path, words)
        for (name, words), port in zip(what.items(), ports, strict=True)
    )
    url = f"http://{HOST}:{ports[-1]}"
    return Stack(
        name=folders.state.name,
        model="stand-in",
        url=url,
        state_dir=folders.state,
        run_dir=folders.run,
        commands=commands,
    )


def _command(name: str, port: int, tmp_path: Path, words: str) -> Command:
    role = name.split("_")[0]
    start_s = 0.5 if "unready" in words else 20.0
    return Command(
        name=name.replace("_", "-"),
        kind={"pool": "umbp", "router": "router"}.get(role, "worker"),
        role=role,
        argv=(sys.executable, "-S", stand_in.__file__, str(port), str(tmp_path), *words.split()),
        port=port,
        ready_url=f"http://{HOST}:{port}/readyz",
        start_s=start_s,
        stop_s=0.5 if "stubborn" in words else 10.0,
    )


def starts_of(stack: Stack, tmp_path: Path, process: str) -> int:
    """How often a stand-in was started."""
    (port,) = (command.port for command in stack.commands if command.name == process)
    return len((tmp_path / str(port)).read_text().splitlines())


def handle_of(pid: int) -> int:
    """A descriptor that becomes readable when that process ends."""
    return os.pidfd_open(pid)


def ended(handle: int, within_s: float = 10.0) -> bool:
    """Whether the process of a handle ends within the time."""
    readable, _, _ = select.select([handle], [], [], within_s)
    os.close(handle)
    return bool(readable)
