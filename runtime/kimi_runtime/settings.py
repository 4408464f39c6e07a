"""What a process takes from its environment: only what differs between replicas of one file.

In Kubernetes every pod of a set starts from the same spec file; its own name, address, port and
revision come from here.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from kimi_runtime.spec.base import SpecModel
from kimi_runtime.spec.router import EXPLAIN_FILE

NAME_VARIABLE = "KIMISTACK_NAME"
LOG_LEVEL_VARIABLE = "KIMISTACK_LOG_LEVEL"
HOST_VARIABLE = "KIMISTACK_HOST"
PORT_VARIABLE = "KIMISTACK_PORT"
REVISION_VARIABLE = "KIMISTACK_REVISION"
DRAIN_FILE_VARIABLE = "KIMISTACK_DRAIN_FILE"
NODE_VARIABLE = "KIMISTACK_NODE"
LINGER_VARIABLE = "KIMISTACK_LINGER"
TRANSFER_ADDRESS_VARIABLE = "KIMISTACK_TRANSFER_ADDRESS"
TRANSFER_PORT_VARIABLE = "KIMISTACK_TRANSFER_PORT"
GRPC_PORT_VARIABLE = "KIMISTACK_GRPC_PORT"

S = TypeVar("S", bound=BaseModel)


class Settings(SpecModel):
    """Overrides of a spec file's fields of the same names; None leaves them as they are.

    `transfer_address` and `transfer_port` are `advertised` and `port` of the `network` of a worker
    or a pool daemon.
    """

    name: str | None = None
    log_level: str | None = None
    host: str | None = None
    port: str | None = None
    revision: str | None = None
    drain_file: str | None = None
    linger: str | None = None
    node: str | None = None
    transfer_address: str | None = None
    transfer_port: str | None = None
    grpc_port: str | None = None

    def onto(self, spec: S) -> S:
        """The spec with the overrides, validated again (ValueError)."""
        overrides = self.model_dump(exclude_none=True)
        if not overrides:
            return spec
        fields = spec.model_dump()
        network = {
            field: overrides.pop(name)
            for name, field in (("transfer_address", "advertised"), ("transfer_port", "port"))
            if name in overrides
        }
        if network:
            overrides["network"] = fields.get("network", {}) | network
        return type(spec).model_validate(fields | overrides)


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """The settings in `environment`; the process' own by default."""
    variables = os.environ if environment is None else environment
    return Settings(
        name=variables.get(NAME_VARIABLE) or None,
        log_level=variables.get(LOG_LEVEL_VARIABLE) or None,
        host=variables.get(HOST_VARIABLE) or None,
        port=variables.get(PORT_VARIABLE) or None,
        revision=variables.get(REVISION_VARIABLE) or None,
        drain_file=variables.get(DRAIN_FILE_VARIABLE) or None,
        linger=variables.get(LINGER_VARIABLE) or None,
        node=variables.get(NODE_VARIABLE) or None,
        transfer_address=variables.get(TRANSFER_ADDRESS_VARIABLE) or None,
        transfer_port=variables.get(TRANSFER_PORT_VARIABLE) or None,
        grpc_port=variables.get(GRPC_PORT_VARIABLE) or None,
    )


def explain_logs(environment: Mapping[str, str] | None = None) -> list[Path]:
    """Explain logs of deployments that run, or ran, as processes of this machine; newest first.

    In a router's pod in a cluster it is that router's.
    """
    return _newest(environment, EXPLAIN_FILE)


def pool_specs(environment: Mapping[str, str] | None = None) -> list[Path]:
    """Files of pool daemons of such deployments; newest first."""
    return _newest(environment, "specs/umbp-*.json")


def quiet_grpc() -> None:
    """Have gRPC print nothing, unless the environment says what: its errors say it, too.

    It looks when it is loaded.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _newest(environment: Mapping[str, str] | None, pattern: str) -> list[Path]:
    """Files of deployments' state folders, newest first.

    The folders lie in KIMISTACK_HOME, else $XDG_STATE_HOME/kimistack, else
    ~/.local/state/kimistack.
    """
    variables = os.environ if environment is None else environment
    own, state = variables.get("KIMISTACK_HOME"), variables.get("XDG_STATE_HOME")
    home = Path(own) if own else (Path(state) if state else Path.home() / ".local/state")
    found = (home if own else home / "kimistack").glob(f"*/{pattern}")
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
