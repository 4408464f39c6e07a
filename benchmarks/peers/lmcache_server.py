"""LMCache's server for host memory, by the messages of its own package over one TCP connection.

Run by benchmarks/umbp_stores.py in an environment with `lmcache`, a CPU build of torch, and numpy.
"""

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.protocol import (
    ClientCommand,
    ClientMetaMessage,
    ServerMetaMessage,
    ServerReturnCode,
    init_remote_metadata_info,
)
from measure import buffers, run

PORT = 50471


class LmCache:
    """Blocks one after another; a put has ended when the server has the last of them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def put(self, keys: Sequence[str], blocks: Sequence[np.ndarray]) -> None:
        """See `measure.Store`."""
        for key, block in zip(keys, blocks, strict=True):
            self._ask(ClientCommand.PUT, key, block.nbytes)
            self._connection.sendall(memoryview(block))
        self._ask(ClientCommand.EXIST, keys[-1])
        self._answer()

    def get(self, keys: Sequence[str], into: Sequence[np.ndarray]) -> None:
        """See `measure.Store`."""
        for key, target in zip(keys, into, strict=True):
            self._ask(ClientCommand.GET, key)
            self._answer()
            self._fill(memoryview(target))

    def _ask(self, command: ClientCommand, key: str, length: int = 0) -> None:
        named = CacheEngineKey("model", 1, 0, int.from_bytes(key.encode(), "big"), torch.uint8)
        shape = torch.Size([length, 1, 1, 1])
        message = ClientMetaMessage(
            command, named, length, MemoryFormat.KV_2LTD, torch.uint8, shape
        )
        self._connection.sendall(message.serialize())

    def _answer(self) -> None:
        answer = bytearray(ServerMetaMessage.packlength())
        self._fill(memoryview(answer))
        if ServerMetaMessage.deserialize(bytes(answer)).code != ServerReturnCode.SUCCESS:
            sys.exit("LMCache's server does not have a block")

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < view.nbytes:
            done += self._connection.recv_into(view[done:])


def main() -> None:
    """Start the server, measure, stop it."""
    logging.disable()
    init_remote_metadata_info(1)
    command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(PORT), "cpu"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as server:
        try:
            for _ in range(60):
                time.sleep(0.5)
                with socket.socket() as connection:
                    if connection.connect_ex(("127.0.0.1", PORT)) == 0:
                        run(LmCache(connection), *buffers())
                        return
            sys.exit("LMCache's server does not listen")
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
