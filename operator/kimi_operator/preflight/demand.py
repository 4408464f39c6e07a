"""What a spec takes of a node, for preflight. Pure."""

from collections.abc import Collection

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.roles import Role, RoleName
from kimi_operator.desired.effective import Effective
from kimi_operator.desired.engine_pod import uses_pool
from kimi_operator.desired.fit import known_model
from kimi_operator.desired.labels import Owner
from kimi_operator.desired.pods import host_folder
from kimi_operator.desired.umbp import HUGE_BYTES, pool_resources
from kimi_operator.nodes import quantity
from kimi_operator.preflight.checks import DiskWanted, RdmaWanted, Wanted
from kimi_runtime.spec.sizes import weight_bytes


def wanted_of(effective: Effective, roles: Collection[RoleName] | None = None) -> Wanted:
    """What one pod of any of these roles takes (None: of all), and the pool's daemon beside it."""
    deployment, spec = effective.deployment, effective.deployment.spec
    owner = Owner.of(deployment)
    chosen = {name: role for name, role in spec.roles() if roles is None or name in roles}
    pool = any(uses_pool(effective, name) for name in chosen)
    dram = (spec.kv_pool.dram or 0) if pool else 0
    page = HUGE_BYTES.get(spec.kv_pool.hugepages, 0) if pool else 0
    memory = max((_memory(role) for role in chosen.values()), default=0)
    if pool:
        memory += int(pool_resources(spec)["limits"]["memory"])
    return Wanted(
        deployment=f"{owner.namespace}/{owner.name}",
        gpus=max((role.gpus_per_pod for role in chosen.values()), default=0),
        amd=all(_is_amd(role) for role in chosen.values()),
        rdma=_rdma(spec, chosen.values()),
        memory_bytes=memory,
        hugepage_bytes=page,
        hugepages_bytes=dram if page else 0,
        disks=tuple(_disks(effective, pool=pool)),
        socket_dir=spec.kv_pool.socket_dir,
        own_folder=host_folder(owner, spec).rpartition("/")[2],
    )


def _memory(role: Role) -> int:
    return int(quantity(role.resources.memory)) if role.resources.memory else 0


def _is_amd(role: Role) -> bool:
    return role.gpu.dra is not None or (role.gpu.resource or "amd.com/gpu").startswith("amd.com/")


def _rdma(spec: DeploymentSpec, roles: Collection[Role]) -> RdmaWanted | None:
    rdma = spec.rdma
    if rdma.mode == "none":
        return None
    cards = rdma.per_pod or max([1, *(role.gpus_per_pod for role in roles)])
    return RdmaWanted(cards=cards, devices=rdma.devices, gid_index=rdma.gid_index)


def _disks(effective: Effective, *, pool: bool) -> list[DiskWanted]:
    spec = effective.deployment.spec
    model, ssd = spec.model, spec.kv_pool.ssd
    found = []
    if pool and ssd is not None:
        found.append(DiskWanted(path=ssd.path, free_bytes=ssd.capacity, why="kvPool.ssd.capacity"))
    if model.source == "hostPath" and model.path is not None:
        found.append(DiskWanted(path=model.path, read=True, why="model.path"))
    if model.cache is not None and model.cache.host_path is not None:
        need, why = model.cache.size, "model.cache.size"
        if need is None:
            known = known_model(effective.preset.architecture if effective.preset else model.id)
            need, why = (weight_bytes(known) if known else 0), "the model's weights"
        found.append(DiskWanted(path=model.cache.host_path, free_bytes=need, why=why))
    return found
