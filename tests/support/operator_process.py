"""Operators as processes of their own, restarted as a kubelet would do it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kimi_operator.local.machine import free_ports

ENDS_WITHIN_S = 60.0


@dataclass
class OperatorProcess:
    """`python -m kimi_operator.main` with a kubeconfig; its log is a file."""

    kubeconfig: Path
    namespace: str
    identity: str
    log: Path
    lease_s: float = 6.0
    environment: dict[str, str] = field(default_factory=dict)
    starts: int = 0
    port: int = 0
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Begin, or begin anew."""
        self.port = free_ports("127.0.0.1", 1)[0]
        env = {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "KIMISTACK_NAMESPACES": self.namespace,
            "POD_NAMESPACE": self.namespace,
            "POD_NAME": self.identity,
            "KIMISTACK_HTTP_PORT": str(self.port),
            "KIMISTACK_LEASE_SECONDS": str(self.lease_s),
            "KIMISTACK_LOG_LEVEL": "debug",
            **self.environment,
        }
        self.starts += 1
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kimi_operator.main", env=env, stdout=log, stderr=log
            )

    async def keep_running(self) -> None:
        """Start, and start again whenever it ends."""
        while True:
            await self.start()
            await self.ended()

    async def ended(self) -> int:
        """Its exit code, once it has ended."""
        assert self.process is not None
        return await self.process.wait()

    def signalled(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def aclose(self) -> None:
        """End it, whatever state it is in."""
        self.signalled(signal.SIGKILL)
        if self.process is not None:
            async with asyncio.timeout(ENDS_WITHIN_S):
                await self.process.wait()


@asynccontextmanager
async def kept_running(operator: OperatorProcess) -> AsyncIterator[OperatorProcess]:
    """The operator, restarted whenever it ends, until the block does."""
    async with asyncio.TaskGroup() as tasks:
        keeper = tasks.create_task(operator.keep_running())
        try:
            yield operator
        finally:
            keeper.cancel()
            await operator.aclose()
