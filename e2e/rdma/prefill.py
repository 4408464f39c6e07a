"""Forks owners of KV for the hand-off tests, so that each starts in milliseconds.

    python prefill.py SOCKET BLOCK_BYTES BLOCKS

Every connection gets a process of its own, which writes its id and its region's reference, then
answers each line: `release` releases the region; every answer is the first byte of its memory.
"""

import asyncio
import os
import signal
import socket
import sys

from kimi_runtime.transfer.memory import private_memory
from kimi_runtime.transfer.network import NetworkSettings
from kimi_runtime.transfer.verbs import VerbsTransport


async def own(lines: socket.SocketIO, block: int, blocks: int) -> None:
    """One owner, until its connection ends. Block n is filled with n + 1."""
    transport = VerbsTransport("prefill", NetworkSettings((b"k" * 32,)))
    memory = private_memory(block * blocks)
    for n in range(blocks):
        memory.view[n * block : (n + 1) * block] = bytes([n + 1]) * block
    ref = transport.register(memory, writable=True)
    lines.write(f"{os.getpid()} {ref.model_dump_json()}\n".encode())
    while command := (await asyncio.to_thread(lines.readline)).strip():
        if command == b"release":
            transport.release(ref)
        lines.write(f"{memory.view[0]}\n".encode())
    await transport.aclose()


def main() -> None:
    """Fork for each connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            asyncio.run(own(connection.makefile("rwb", 0), int(sys.argv[2]), int(sys.argv[3])))
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    main()
