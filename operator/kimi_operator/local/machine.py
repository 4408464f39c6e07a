"""What this machine has: memory, ports, processes by pid."""

import errno
import os
import random
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

from kimi_operator.desired.processes import Machine
from kimi_runtime.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")
_PORTS = range(10_240, 20_000)


def measure(shm: Path) -> Machine:
    """Memory that is available now, within the container's limit where there is one."""
    file_system = os.statvfs(shm)
    return Machine(
        memory_bytes=min(_available(), _cgroup_room()),
        shm_bytes=file_system.f_bavail * file_system.f_frsize,
        shm_path=str(shm),
    )


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo has no MemAvailable: Linux 3.14 or later is needed")


def _cgroup_room() -> int:
    """Bytes left to this cgroup (version 2), page cache that can be dropped counted as free."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 2**63
    if limit == "max":
        return 2**63
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))


def require_free(host: str, port: int, how_to_change: str) -> None:
    """ConfigError naming the port if something listens there, or the host is not this one's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} of {host} is in use; stop what listens there, or {how_to_change}"
                ) from exc
            raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc


def free_ports(host: str, count: int) -> list[int]:
    """Ports nobody listens on, distinct from each other. ConfigError if there are not so many.

    They are below those that Linux gives to connections: none of these takes one before the process
    it is meant for listens on it.
    """
    ports: list[int] = []
    reason = "the others are taken"
    with ExitStack() as held:
        for port in random.sample(_PORTS, len(_PORTS)):
            if len(ports) == count:
                return ports
            try:
                probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                probe.bind((host, port))
            except OSError as exc:
                if exc.errno == errno.EADDRINUSE:
                    continue
                reason = exc.strerror or str(exc)
                break
            ports.append(port)
    raise ConfigError(
        f"{count} processes need a port each, but only {len(ports)} could be had ({reason}); lower "
        "the replicas"
    )


def started_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none (or a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rsplit(")", 1)[1].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def send(pid: int, ticks: int | None, number: signal.Signals) -> bool:
    """Signal that very process; False if it is gone, whatever has its pid now."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if started_ticks(pid) != ticks:
            return False
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def resident_bytes(pid: int) -> int | None:
    """Memory of the process that is its own or shared with others; None if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def uptime_s(ticks: int) -> float:
    """Seconds since a process that started at `ticks` since boot."""
    up = float(Path("/proc/uptime").read_text().split()[0])
    return max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
