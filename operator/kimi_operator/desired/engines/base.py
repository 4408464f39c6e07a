"""What starting an engine takes, in the same terms for every engine.

A port reaches the command by its variable (`$(KIMISTACK_PORT)`): on the host's network each
instance has ports of its own, and only the variables differ between instances.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.model import LoraAdapter
from kimi_operator.api.roles import Role, RoleName
from kimi_operator.desired.engines.flags import check_flags, flag_of
from kimi_runtime.errors import ConfigError

HTTP_PORT = 8000
DIST_PORT = 5000
PORT_VARIABLES: Mapping[str, str] = {
    "http": "KIMISTACK_PORT",
    "bootstrap": "KIMISTACK_BOOTSTRAP_PORT",
    "handshake": "KIMISTACK_HANDSHAKE_PORT",
    "notify": "KIMISTACK_NOTIFY_PORT",
    "dist": "KIMISTACK_DIST_PORT",
    "transfer": "KIMISTACK_TRANSFER_PORT",
}
"""In the order in which an instance on the host's network takes the ports of its block."""
ADAPTERS_DIR = "/adapters"


@dataclass(frozen=True)
class Seat:
    """The place an engine starts in: one role of a deployment, its model's files at `model`."""

    deployment: str
    spec: DeploymentSpec
    role_name: RoleName
    role: Role
    model: str
    vocabulary: str | None
    run_dir: str
    uses_pool: bool

    @property
    def disaggregated(self) -> bool:
        """Whether prefill and decode are apart."""
        return self.spec.prefill is not None

    @property
    def served_name(self) -> str:
        """The name clients ask for."""
        return self.spec.model.served_name or self.deployment


@dataclass(frozen=True)
class Launch:
    """A container's command and what it needs. `files` go to /etc/kimistack.

    `ready` and `alive` are HTTP paths at port `http`, which the first pod of an instance serves.
    """

    argv: tuple[str, ...]
    ready: str
    alive: str
    ports: Mapping[str, int]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    lease_s: float | None = None
    """After how long without a router it ends its work by itself; None: never."""


def var(port: str) -> str:
    """What Kubernetes replaces by the number of a port."""
    return f"$({PORT_VARIABLES[port]})"


def port_variables(ports: Mapping[str, int]) -> dict[str, str]:
    """The environment that carries ports."""
    return {PORT_VARIABLES[name]: str(number) for name, number in ports.items()}


def command_line(
    seat: Seat,
    generated: Sequence[str],
    *,
    reserved: frozenset[str],
    yielding: Sequence[Sequence[str]] = (),
) -> tuple[str, ...]:
    """Generated flags, those of `yielding` that the user does not set, then the user's.

    Raises ConfigError for a user's flag that fights a generated one or is in `reserved`.
    """
    user = seat.role.engine_args
    where = f"spec.{seat.role_name}.engineArgs"
    check_flags(user, generated, reserved, where)
    theirs = {flag_of(argument) for argument in user}
    ours = [part for group in yielding if flag_of(group[0]) not in theirs for part in group]
    return (*generated, *ours, *user)


def one_node(seat: Seat) -> None:
    """Raise ConfigError if the instance has several nodes."""
    if seat.role.parallelism.nodes > 1:
        raise ConfigError(
            f"spec.{seat.role_name}.parallelism.nodes: {seat.spec.engine} is started on one node "
            f"an instance, not {seat.role.parallelism.nodes}; split within a node, or use sglang"
        )


def adapter_paths(adapters: Sequence[LoraAdapter]) -> list[str]:
    """`name=path` of each LoRA adapter, as engines take them."""
    return [f"{a.name}={a.path if a.source == 'hf' else adapter_dir(a)}" for a in adapters]


def adapter_dir(adapter: LoraAdapter) -> str:
    """Where an adapter that is mounted lies in the container."""
    folder = f"{ADAPTERS_DIR}/{adapter.name}"
    return f"{folder}/{adapter.path.strip('/')}" if adapter.source == "pvc" else folder
