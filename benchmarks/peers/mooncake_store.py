"""Mooncake's store by its Python client, over TCP: a master and a storing process of their own.

Run by benchmarks/umbp_stores.py in an environment with `mooncake-transfer-engine-non-cuda` and
numpy; `serve` is the storing process.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import mooncake
import numpy as np
from measure import buffers, run
from mooncake.store import MooncakeDistributedStore

MASTER, METRICS, STORING, ASKING = (f"{port}" for port in (50451, 50452, 50461, 50462))
HELD_BYTES = 2 << 30


def opened(port: str, held: int) -> MooncakeDistributedStore:
    """A client that offers `held` bytes to others."""
    store = MooncakeDistributedStore()
    where = ("P2PHANDSHAKE", held, 256 << 20, "tcp", "", f"127.0.0.1:{MASTER}")
    if store.setup(f"127.0.0.1:{port}", *where) != 0:
        sys.exit("Mooncake's client does not start")
    return store


class Mooncake:
    """Registered memory on both sides, batches by one call."""

    def __init__(self, store: MooncakeDistributedStore, arrays: Sequence[np.ndarray]) -> None:
        self._store = store
        for array in arrays:
            if store.register_buffer(array.ctypes.data, array.nbytes) != 0:
                sys.exit("Mooncake does not register memory")

    def wait(self, block: np.ndarray) -> None:
        """Until the storing process takes a block."""
        for _ in range(60):
            if self._store.put_from("ready", block.ctypes.data, block.nbytes) == 0:
                return
            time.sleep(0.5)
        sys.exit("Mooncake's storing process offers no memory")

    def put(self, keys: Sequence[str], blocks: Sequence[np.ndarray]) -> None:
        """See `measure.Store`."""
        places, sizes = [b.ctypes.data for b in blocks], [b.nbytes for b in blocks]
        codes = self._store.batch_put_from(list(keys), places, sizes)
        if any(codes):
            sys.exit(f"Mooncake did not take {keys[0]}: {codes}")

    def get(self, keys: Sequence[str], into: Sequence[np.ndarray]) -> None:
        """See `measure.Store`."""
        places, sizes = [b.ctypes.data for b in into], [b.nbytes for b in into]
        if self._store.batch_get_into(list(keys), places, sizes) != sizes:
            sys.exit("Mooncake did not give a block")


def main() -> None:
    """Start the two processes, measure, stop them."""
    if sys.argv[1:] == ["serve"]:
        storing = opened(STORING, HELD_BYTES)
        sys.stdin.read()
        storing.close()
        return
    master = Path(mooncake.__file__).with_name("mooncake_master")
    command = [master, "--port", MASTER, "--metrics_port", METRICS]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as first:  # type: ignore[call-overload]
        time.sleep(2)
        serving = [sys.executable, __file__, "serve"]
        with subprocess.Popen(serving, stdin=subprocess.PIPE, **quiet) as second:  # type: ignore[call-overload]
            try:
                arrays = buffers()
                store = Mooncake(opened(ASKING, 0), arrays)
                store.wait(arrays[0][:4096])
                run(store, *arrays)
            finally:
                second.terminate()
                first.terminate()


if __name__ == "__main__":
    main()
