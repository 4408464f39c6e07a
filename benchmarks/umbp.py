"""What the pool costs on this host: put and get against memcpy, and microseconds a local get.

    PYTHONPATH=runtime python benchmarks/umbp.py [--folder DIR] [--rounds 5]

The daemon runs in a process of its own, as it does in production; the arena should be on tmpfs.
Every figure is the best of the rounds, and every ratio is to a copy of the same bytes, in the same
pieces, from or to memory of the same kind (a mapped file of the arena's folder, every page of it
mapped: what the page table costs depends on it) that is as far from the processor's cache: a put
goes where nothing was lately, a get is from where it was the round before. "no tags" is the same
path without leaves: the cost of hashing them, and of hashing their digests, is not in it.
"""

import argparse
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from kimi_connect.client import ArenaClient
from kimi_connect.copying import copy_bytes
from kimi_connect.tags import Leaves
from kimi_connect.wire import Outcome
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.transfer.memory import shared_memory
from kimi_runtime.umbp import tags
from kimi_runtime.units import format_bytes

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
BATCHES = (1, 4, 16, 64)
CALLS = 1000
PIECE = 1 << 20
QUIET_S = 0.3
"""Rounds go on for at least this long: on a busy machine, more of them meet a quiet moment."""

SERVE = """
import asyncio, sys
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp.daemon import serve
asyncio.run(serve(UmbpSpec.model_validate_json(sys.argv[1])))
"""


def no_leaves(view: memoryview) -> bytes:
    """A leaf function that costs nothing and finds nothing."""
    return b""


def listens(path: Path) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return not probe.connect_ex(str(path))


@contextlib.contextmanager
def daemon(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """A daemon process that listens: its socket and call key."""
    call_key = secrets.token_hex(32).encode()
    (folder / "key").write_bytes(call_key)
    (folder / "key").chmod(0o600)
    spec = UmbpSpec(
        name="bench",
        port=0,
        socket=folder / "umbp.sock",
        arena=folder / "arena",
        dram_bytes=8 * max(SIZES) * max(BATCHES),
        page_bytes=4096,
        call_key=folder / "key",
        evict_above=0.9,  # as much room in this small arena as the defaults make in one of 11 GiB
        evict_to=0.73,
    )
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, spec.model_dump_json()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        ends_s = time.monotonic() + 60
        while not listens(spec.socket):
            if time.monotonic() > ends_s or process.poll() is not None:
                raise SystemExit("the daemon did not start")
            time.sleep(0.01)
        yield spec.socket, call_key
    finally:
        process.terminate()
        process.wait()


def best_s(
    works: Sequence[Callable[[], object]],
    rounds: int,
    prepare: Callable[[], object] = lambda: None,
) -> list[float]:
    """Seconds of each work's best round; they take turns, so that all meet the same machine.

    `prepare` comes before each, and does not count.
    """
    best = [float("inf")] * len(works)
    ends_s = time.perf_counter() + QUIET_S
    while rounds > 0 or time.perf_counter() < ends_s:
        rounds -= 1
        for number, work in enumerate(works):
            prepare()
            start_s = time.perf_counter()
            work()
            best[number] = min(best[number], time.perf_counter() - start_s)
    return best


def copied(into: Sequence[memoryview], blocks: Sequence[memoryview]) -> None:
    """memcpy of the blocks, in the pieces a client copies."""
    for target, source in zip(into, blocks, strict=True):
        for at in range(0, source.nbytes, PIECE):
            copy_bytes(target[at : at + PIECE], source[at : at + PIECE])


@contextlib.contextmanager
def clients_of(folder: Path, leaves: Sequence[Leaves]) -> Iterator[list[ArenaClient]]:
    """A daemon's clients, one per leaf function."""
    with daemon(folder) as (path, call_key), contextlib.ExitStack() as owned:
        clients = [
            ArenaClient(path, call_key, leaves=function, connect_s=30) for function in leaves
        ]
        for client in clients:
            client.prefault()  # an engine that has run for a while has every page mapped
            owned.callback(client.close)
        yield clients


def transfers(folder: Path, rounds: int) -> list[tuple[str, ...]]:
    """Rows of put and get by size and batch; each size has a pool of its own, as a model has."""
    rows = []
    far = shared_memory(folder / "far", 2 * max(SIZES) * max(BATCHES)).view
    for at in range(0, far.nbytes, PIECE):
        far[at : at + PIECE] = os.urandom(PIECE)
    for size in SIZES:
        source = [memoryview(os.urandom(size)) for _ in range(max(BATCHES))]
        target = [memoryview(bytearray(size)) for _ in range(max(BATCHES))]
        with clients_of(folder, (no_leaves, tags.leaves)) as clients:
            for batch in BATCHES:
                row = [format_bytes(size), str(batch)]
                moved = transfer(clients, source[:batch], target[:batch], far, rounds)
                for memcpy_s, *own_s in moved:
                    row.append(f"{batch * size / memcpy_s / 1e9:.1f}")
                    row += [f"{memcpy_s / seconds:.2f}" for seconds in own_s]
                rows.append(tuple(row))
    return rows


def transfer(
    clients: Sequence[ArenaClient],
    blocks: Sequence[memoryview],
    into: Sequence[memoryview],
    far: memoryview,
    rounds: int,
) -> tuple[list[float], list[float]]:
    """Seconds of memcpy and of each client's put, and of memcpy and of each client's get."""
    keys = [[secrets.token_bytes(16) for _ in blocks] for _ in clients]

    fresh: list[bytes] = []

    def new_keys() -> None:
        fresh[:] = [secrets.token_bytes(16) for _ in blocks]

    def put(client: ArenaClient) -> None:
        assert client.store(fresh, blocks, deadline_s=60) == len(blocks)

    def get(client: ArenaClient, own: list[bytes]) -> None:
        got = client.load(own, into, deadline_s=60)
        assert got == (len(into), Outcome.HIT), got

    size = blocks[0].nbytes
    total, at = size * len(blocks), 0

    def there(start: int) -> list[memoryview]:
        return [far[start + n * size : start + (n + 1) * size] for n in range(len(blocks))]

    def copy_away() -> None:
        nonlocal at
        at = 0 if at + 2 * total > far.nbytes else at + total
        copied(there(at), blocks)

    puts = [partial(put, client) for client in clients]
    put_s = best_s([copy_away, *puts], rounds, prepare=new_keys)
    for client, own in zip(clients, keys, strict=True):
        assert client.store(own, blocks, deadline_s=60) == len(blocks)
    gets = [partial(get, client, own) for client, own in zip(clients, keys, strict=True)]
    copied(there(0), blocks)
    get_s = best_s([partial(copied, into, there(0)), *gets], rounds)
    assert list(into) == list(blocks)
    return put_s, get_s


def latencies(
    tagged: ArenaClient, asking: ArenaClient, bare: ArenaClient, rounds: int
) -> list[tuple[str, float]]:
    """Rows of one local get of 64 KiB, in microseconds."""
    key, size = [secrets.token_bytes(16)], 64 << 10
    block, into = [memoryview(os.urandom(size))], [memoryview(bytearray(size))]
    free = [secrets.token_bytes(16)]
    tagged.store(key, block, deadline_s=60)
    bare.store(free, block, deadline_s=60)
    asking.held(key)
    asking._daemon.arena = None  # so that it asks its daemon for every get

    def many(work: Callable[[], object]) -> Callable[[], object]:
        return lambda: [work() for _ in range(CALLS)]

    works = {
        "memcpy": lambda: copied(into, block),
        "memcpy and tag": lambda: (copied(into, block), tags.tag(key[0], 0, into[0])),
        "get through the daemon (pin, copy, check, unpin)": lambda: asking.load(
            key, into, deadline_s=60
        ),
        "get by the arena's directory": lambda: tagged.load(key, into, deadline_s=60),
        "get by the arena's directory, no tags": lambda: bare.load(free, into, deadline_s=60),
        "a call to the daemon (held, one key)": lambda: tagged.held(key),
    }
    times = best_s([many(work) for work in works.values()], rounds)
    return [(name, s / CALLS * 1e6) for name, s in zip(works, times, strict=True)]


def main() -> None:
    """Measure and print two tables and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = transfers(Path(folder), options.rounds)
        with clients_of(Path(folder), (tags.leaves, tags.leaves, no_leaves)) as clients:
            times = latencies(*clients, rounds=options.rounds)
    print(f"{'':>15}{'memcpy':>10}{'put, of memcpy':>20}{'memcpy':>14}{'get, of memcpy':>20}")
    print(f"{'block':>8}{'batch':>7}", end="")
    print(2 * f"{'GB/s':>10}{'no tags':>12}{'tags':>8}    ")
    for size, batch, *cells in rows:
        print(f"{size:>8}{batch:>7}{cells[0]:>10}{cells[1]:>12}{cells[2]:>8}", end="")
        print(f"{cells[3]:>14}{cells[4]:>12}{cells[5]:>8}")
    print()
    for name, us in times:
        print(f"{name:<52}{us:>8.0f} µs")
    large = [row for row in rows if row[0] in ("1MiB", "4MiB") and int(row[1]) >= 4]
    worst = [min(float(row[column]) for row in large) for column in (3, 4, 6, 7)]
    print(
        f"from 1 MiB and batch 4 on, at least: put {worst[0]:.2f} ({worst[1]:.2f} with tags), "
        f"get {worst[2]:.2f} ({worst[3]:.2f} with tags) of memcpy; a local get of 64 KiB "
        f"{times[3][1]:.0f} µs, through the daemon {times[2][1]:.0f} µs"
    )


if __name__ == "__main__":
    main()
