"""The pool against stores that also serve other processes: Mooncake's and LMCache's server.

    python benchmarks/umbp_stores.py [--mooncake PYTHON] [--lmcache PYTHON]

PYTHON is the interpreter of an environment of that store's own: `mooncake-transfer-engine-non-cuda`
and numpy; `lmcache` with a CPU build of torch, and numpy. Without one its columns stay empty. Every
figure is a share of memcpy of the same bytes, measured beside it in the same process: best rounds
that take turns. All run over this host alone, with their own defaults; the pool checks every byte
it gives, the others check none.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import numpy as np
from measure import buffers, run
from umbp import daemon

from kimi_connect.client import ArenaClient
from kimi_connect.wire import Outcome
from kimi_runtime.umbp import tags
from kimi_runtime.units import format_bytes

Key = tuple[int, int]
Figures = dict[Key, dict[str, float]]
PEERS = {"mooncake": "mooncake_store.py", "lmcache": "lmcache_server.py"}


class Pool:
    """The pool's client as a `measure.Store`."""

    def __init__(self, client: ArenaClient) -> None:
        self._client = client

    def put(self, keys: Sequence[str], blocks: Sequence[np.ndarray]) -> None:
        """See `measure.Store`."""
        views = [memoryview(block) for block in blocks]
        if self._client.store(_ids(keys), views, deadline_s=60) != len(keys):
            sys.exit("the pool did not take a block")

    def get(self, keys: Sequence[str], into: Sequence[np.ndarray]) -> None:
        """See `measure.Store`."""
        views = [memoryview(target) for target in into]
        if self._client.load(_ids(keys), views, deadline_s=60) != (len(keys), Outcome.HIT):
            sys.exit("the pool did not give a block")


def _ids(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.blake2b(key.encode(), digest_size=16).digest() for key in keys]


def ours() -> None:
    """Measure the pool in this process, its daemon in another; lines of JSON."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        daemon(Path(folder)) as (path, call_key),
    ):
        client = ArenaClient(path, call_key, leaves=tags.leaves, connect_s=30)
        client.prefault()
        run(Pool(client), *buffers())
        client.close()


def measured(command: Sequence[str]) -> Figures:
    """What a script prints."""
    env = os.environ | {"LMCACHE_TRACK_USAGE": "false"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    return {(line["size"], line["batch"]): line for line in lines}


def main() -> None:
    """Measure all and print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mooncake", metavar="PYTHON")
    parser.add_argument("--lmcache", metavar="PYTHON")
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        ours()
        return
    found = {"pool": measured([sys.executable, __file__, "--ours"])}
    for name, script in PEERS.items():
        if python := getattr(options, name):
            found[name] = measured([python, str(Path(__file__).parent / "peers" / script)])
    print(f"| block | batch | {' | '.join(f'{name} put | get' for name in found)} |")
    print("|" + " --- |" * (2 + 2 * len(found)))
    for key in found["pool"]:
        size, batch = key
        cells = [
            f"{figures[key]['memcpy'] / figures[key][what]:.3f}"
            for figures in found.values()
            for what in ("put", "get")
        ]
        print(f"| {format_bytes(size)} | {batch} | {' | '.join(cells)} |")
    for name in [name for name in found if name != "pool"]:
        times = [
            min(found[name][key][what] / found["pool"][key][what] for key in found["pool"])
            for what in ("put", "get")
        ]
        print(
            f"the pool against {name}: at least {times[0]:.1f} times as fast to put, "
            f"{times[1]:.1f} to get"
        )


if __name__ == "__main__":
    main()
