"""What is read from the environment, in one place."""

import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kimi_runtime.errors import ConfigError


def state_home() -> Path:
    """Folder of what `kimistack up` keeps, one sub-folder per deployment.

    KIMISTACK_HOME, else $XDG_STATE_HOME/kimistack, else ~/.local/state/kimistack: it does not
    depend on the working directory, so that `kimistack status` finds a stack from anywhere.
    """
    own = os.environ.get("KIMISTACK_HOME")
    if own:
        return Path(own).absolute()
    xdg = os.environ.get("XDG_STATE_HOME")
    base = Path(xdg) if xdg and Path(xdg).is_absolute() else Path.home() / ".local" / "state"
    return base / "kimistack"


def shared_memory() -> Path:
    """Where files live in memory: KIMISTACK_SHM, else /dev/shm, else the temporary folder.

    A container's /dev/shm is often 64 MiB; the variable names a larger one.
    """
    own = os.environ.get("KIMISTACK_SHM")
    if own:
        return Path(own).absolute()
    shm = Path("/dev/shm")
    return (
        shm if shm.is_dir() and os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    )


@dataclass(frozen=True)
class OperatorSettings:
    """How the operator runs. `namespaces` empty: the whole cluster."""

    namespaces: tuple[str, ...]
    own_namespace: str
    identity: str
    kubeconfig: str | None
    leader_election: bool
    http_port: int
    write_rate: float
    write_burst: float
    log_level: str
    lease_duration_s: float = 15.0


def operator_settings(environ: Mapping[str, str] | None = None) -> OperatorSettings:
    """The operator's settings from the environment. Raises ConfigError naming the variable.

    KIMISTACK_NAMESPACES (comma-separated, `*` for the whole cluster; default: its own namespace),
    POD_NAMESPACE, POD_NAME, KUBECONFIG, KIMISTACK_LEADER_ELECTION (true, false),
    KIMISTACK_HTTP_PORT (probes and metrics), KIMISTACK_WRITE_RATE and KIMISTACK_WRITE_BURST (writes
    a second, and at once), KIMISTACK_LOG_LEVEL, KIMISTACK_LEASE_SECONDS (how long a dead leader
    keeps others from working; one that cannot renew stops after two thirds of that).
    """
    env = os.environ if environ is None else environ
    own = env.get("POD_NAMESPACE") or "default"
    wanted = env.get("KIMISTACK_NAMESPACES") or own
    everywhere = wanted.strip() == "*"
    names = tuple(name.strip() for name in wanted.split(",") if name.strip())
    return OperatorSettings(
        namespaces=() if everywhere else names,
        own_namespace=own,
        identity=env.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        kubeconfig=env.get("KUBECONFIG") or None,
        leader_election=_choice(env, "KIMISTACK_LEADER_ELECTION", ("true", "false")) == "true",
        http_port=int(_number(env, "KIMISTACK_HTTP_PORT", 8080, 65535)),
        write_rate=_number(env, "KIMISTACK_WRITE_RATE", 20, 1000),
        write_burst=_number(env, "KIMISTACK_WRITE_BURST", 40, 1000),
        log_level=_choice(env, "KIMISTACK_LOG_LEVEL", ("info", "debug", "warning", "error")),
        lease_duration_s=_number(env, "KIMISTACK_LEASE_SECONDS", 15, 300),
    )


def _choice(env: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = env.get(name) or allowed[0]
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; it is one of {', '.join(allowed)}")
    return value


def _number(env: Mapping[str, str], name: str, default: float, most: float) -> float:
    text = env.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= most:
        raise ConfigError(f"{name} is {text!r}; it is a number above 0, up to {most:g}")
    return value
