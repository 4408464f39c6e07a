"""The files of the KV pool's daemons."""

from collections.abc import Sequence
from pathlib import Path

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.kvpool import KvPool, TenantShare
from kimi_operator.desired import pool_tls
from kimi_operator.desired.engine_pod import RUN_DIR
from kimi_operator.desired.engines.kimistack import CALL_KEY_FILE, POOL_ARENA, POOL_SOCKET
from kimi_operator.desired.labels import Owner
from kimi_operator.desired.spec_files import spec_file
from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.router import FleetSpec, PoolEndpoint
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.spec.umbp import TenantTerms, UmbpSpec

POOL_PORT, POOL_TRANSFER_PORT, POOL_GRPC_PORT = 8100, 8101, 8102
"""Feed, health and metrics; what peers copy from; what peers and operators ask for."""
POOL_FILE = "umbp.json"
PEERS_DIR, PEERS_FILE = "/etc/kimistack-peers", "peers.json"
SSD_DIR = "/var/lib/kimistack/ssd"


def has_peers(spec: DeploymentSpec) -> bool:
    """Whether the pool's daemons fetch from each other."""
    return spec.kv_pool.peers == "Enabled"


def ssd_log(spec: DeploymentSpec, folder: str) -> SsdSpec | None:
    """The SSD tier in `folder`, as its daemon sees it. Raises ConfigError if it is too small."""
    ssd = spec.kv_pool.ssd
    if ssd is None:
        return None
    try:
        return SsdSpec.sized(Path(folder), ssd.capacity)
    except ConfigError as exc:
        raise ConfigError(f"spec.kvPool.ssd.capacity: {exc}") from exc


def daemon_file(owner: Owner, spec: DeploymentSpec) -> str:
    """What a daemon starts from. Raises ConfigError as `ssd_log`."""
    pool = spec.kv_pool
    ssd = pool.ssd
    data: dict[str, object] = {
        "name": "umbp",
        "host": "0.0.0.0",
        "port": POOL_PORT,
        "socket": f"{RUN_DIR}/{POOL_SOCKET}",
        "arena": f"{RUN_DIR}/{POOL_ARENA}",
        "dram_bytes": spec.kv_pool.dram,
        "page_bytes": spec.kv_pool.page,
        "ssd": ssd_log(spec, SSD_DIR),
        "ssd_write_rate": None if ssd is None else ssd.write_rate,
        "call_key": CALL_KEY_FILE,
        "log_level": spec.observability.log_level,
    }
    if has_peers(spec):
        data["peers_file"] = f"{PEERS_DIR}/{PEERS_FILE}"
        data["network"] = {"port": POOL_TRANSFER_PORT}
    if spec.security.tls_secret_name is not None:
        data["tls"] = pool_tls.tls_files(owner)
    data |= granted(pool)
    return spec_file(UmbpSpec.model_validate(data))


def granted(pool: KvPool) -> dict[str, object]:
    """What a user may say of a daemon's memory, as fields of its file; nothing that was not."""
    found: dict[str, object] = {}
    if pool.keep_arena:
        found["keep_arena"] = True
    if pool.numa_nodes:
        found["numa_nodes"] = pool.numa_nodes
    if pool.tenants:
        found["tenants"] = {name: _terms(share) for name, share in pool.tenants.items()}
    if pool.tenant_default is not None:
        found["tenant_default"] = _terms(pool.tenant_default)
    return found


def _terms(share: TenantShare) -> TenantTerms:
    return TenantTerms(weight=share.weight, quota=share.quota)


def peers_file(pools: Sequence[PoolEndpoint]) -> dict[str, str]:
    """What tells the daemons of each other. They read it again when it changes."""
    fleet = FleetSpec(workers=(), pools=tuple(pools))
    return {PEERS_FILE: fleet.model_dump_json(indent=2, exclude_unset=True) + "\n"}
