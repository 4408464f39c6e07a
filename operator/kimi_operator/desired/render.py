"""Everything a KimiDeployment becomes, in the order it is applied. Pure: equal in, equal out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from kimi_operator.api.deployment import ROLES, DeploymentSpec, KimiDeployment
from kimi_operator.desired import monitoring, network, scaling, security
from kimi_operator.desired.effective import Effective, GetPreset, resolve
from kimi_operator.desired.engine_pod import frozen_role
from kimi_operator.desired.labels import Component, Owner
from kimi_operator.desired.left_out import LeftOut, Obstacle, obstacles
from kimi_operator.desired.names import peers_name, router_name
from kimi_operator.desired.pods import config_map
from kimi_operator.desired.pool_files import peers_file
from kimi_operator.desired.revision import (
    Frozen,
    Revision,
    fingerprint,
    former_fingerprint,
    named,
    to_controller_revision,
)
from kimi_operator.desired.router import (
    frozen_router,
    router_deployment,
    router_files,
)
from kimi_operator.desired.umbp import (
    encrypts,
    frozen_pool,
    marked_as_before,
    pool_objects,
    pool_roles,
)
from kimi_operator.desired.workers import endpoint, instance_objects, ports_of
from kimi_operator.observed import Capabilities, InstanceId, Manifest
from kimi_operator.presets.preset import load_preset
from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.router import PoolEndpoint

CLAIM_TEMPLATE = "resource.k8s.io/v1/ResourceClaimTemplate"
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Rendered:
    """Objects in apply order, what was left out of them, and what keeps engines from serving."""

    manifests: tuple[Manifest, ...]
    left_out: tuple[LeftOut, ...]
    obstacles: tuple[Obstacle, ...]


def revision_of(
    effective: Effective, previous: Revision | None = None, *, kept: Sequence[Revision] = ()
) -> Revision:
    """The revision a spec asks for.

    `previous` is the newest there is, `kept` are all there are, oldest first: a component whose
    fields say what they said when one of these was rendered is taken from it, so that only a
    changed spec changes pods, and going back to an older spec goes back to its pods. The roles
    are taken together or not at all: they hand KV to each other, and a newer operator may render
    the one so that it does not fit the other. Raises ConfigError for what cannot be rendered.
    """
    spec = effective.deployment.spec
    roles = [name for name, _ in spec.roles()]
    components = [*roles, "router"]
    if pool_roles(effective):
        components.append("umbp")
    before = [*([previous] if previous else []), *reversed(kept)]
    inputs = {name: fingerprint(effective.written, name, roles) for name in components}
    alike = {name: {of_now} for name, of_now in inputs.items()}
    for role in roles:
        alike[role].add(former_fingerprint(effective.written, role, roles))
    templates: dict[str, Frozen] = {}
    groups: list[list[str]] = [[*roles], *([name] for name in components if name not in roles)]
    for group in groups:
        kept_parts = ({name: one.templates.get(name) for name in group} for one in before)
        same = next(
            (
                parts
                for parts in kept_parts
                if all(part and part.inputs in alike[name] for name, part in parts.items())
            ),
            {},
        )
        for name in group:
            part = same.get(name) or _frozen(effective, name, inputs[name])
            current = part.inputs == inputs[name]
            templates[name] = part if current else replace(part, inputs=inputs[name])
    if "umbp" in templates and before:
        newest = before[0].templates.get("umbp")
        templates["umbp"] = marked_as_before(templates["umbp"], newest)
    return named(templates, spec.image or "")


def _frozen(effective: Effective, component: str, inputs: str) -> Frozen:
    if component == "router":
        return frozen_router(effective, inputs)
    if component == "umbp":
        return frozen_pool(effective, inputs)
    return frozen_role(effective, "prefill" if component == "prefill" else "decode", inputs)


def instances_of(spec: DeploymentSpec, revision: str) -> tuple[InstanceId, ...]:
    """The instances of a deployment at rest, by the counts of its spec."""
    return tuple(
        InstanceId(name, revision, index)
        for name, role in spec.roles()
        for index in range(role.least_replicas)
    )


def render(
    effective: Effective,
    *,
    revisions: Mapping[str, Revision],
    instances: Sequence[InstanceId],
    capabilities: Capabilities,
    update: str | None = None,
    history: Sequence[Revision] = (),
    pools: Mapping[str, str] = NOTHING,
    peers: Mapping[str, str] | None = None,
    draining: frozenset[InstanceId] = frozenset(),
) -> Rendered:
    """All objects of a deployment.

    `revisions` by name are those of `instances` and the one named `update` (None: the only one, or
    what the spec alone asks for), whose router and pool are rendered. `history` are the revisions
    to keep, oldest first; none: `revisions`. `pools` are urls of the pool's daemons by node,
    `peers` of those that other daemons know, None: the same;
    `draining` are instances no router plans onto any more. Raises ConfigError for an instance whose
    revision is not among them.
    """
    return _Rendering(
        *(effective, revisions, tuple(sorted(instances)), capabilities, update),
        pools=pools,
        peers=pools if peers is None else peers,
        draining=draining,
    ).all(history)


class _Rendering:
    """One call of `render`: what its parts share."""

    def __init__(
        self,
        effective: Effective,
        revisions: Mapping[str, Revision],
        instances: tuple[InstanceId, ...],
        capabilities: Capabilities,
        update: str | None,
        *,
        pools: Mapping[str, str],
        peers: Mapping[str, str],
        draining: frozenset[InstanceId],
    ) -> None:
        self.deployment, self.spec = effective.deployment, effective.deployment.spec
        self.owner = Owner.of(effective.deployment)
        self.revisions, self.instances, self.capabilities = revisions, instances, capabilities
        self.pools, self.peers, self.draining = pools, peers, draining
        if update is None:
            update = next(iter(revisions)) if len(revisions) == 1 else revision_of(effective).name
        self.update = self._revision(update, "the update")
        self.obstacles = obstacles(effective, capabilities)
        self.left_out: list[LeftOut] = []
        self.tls: str | None = None
        """The Secret by which the pool's daemons encrypt."""

    def all(self, history: Sequence[Revision]) -> Rendered:
        """Objects in the order in which each finds what it refers to."""
        spec, owner = self.spec, self.owner
        has_pool = "umbp" in self.update.templates
        if spec.kv_pool.enabled and not has_pool and spec.engine != "kimistack":
            self._leave(f"kvPool of {owner.name}", f"{spec.engine} has no connector for it")
        self.tls = spec.security.tls_secret_name
        if self.tls is not None and not encrypts(self.update.templates.get("umbp")):
            self.tls = None
            self._leave("security.tlsSecretName", self._why_no_tls(has_pool))
        manifests = [
            *security.service_accounts(owner, spec, pool=has_pool),
            security.call_key_secret(owner),
            *self._configs(),
            *self._history(history),
            *self._policies(has_pool),
            network.router_service(owner, spec),
            *self._workers(),
            *self._claims(),
            *(pool_objects(owner, self.update.templates["umbp"]) if has_pool else []),
            *self._instances(),
            router_deployment(owner, self.update.templates["router"], spec.router.replicas),
            *self._budgets(),
            *self._autoscalers(),
            *self._routes(),
            *self._monitors(),
        ]
        return Rendered(tuple(manifests), tuple(self.left_out), self.obstacles)

    def _why_no_tls(self, has_pool: bool) -> str:
        what = "calls between pods are signed, not encrypted"
        if has_pool:
            return f"the pool of revision {self.update.name} was made without it; {what}"
        return f"it is for the daemons of a KV pool, and there is none; {what}"

    def _leave(self, what: str, reason: str) -> None:
        self.left_out.append(LeftOut(what, reason))

    def _revision(self, name: str, whose: str) -> Revision:
        if name not in self.revisions:
            known = ", ".join(sorted(self.revisions)) or "none"
            raise ConfigError(f"revision {name} of {whose} is not kept; there are: {known}")
        return self.revisions[name]

    def _configs(self) -> list[Manifest]:
        """The files of every revision that has an instance, of the pool and of the router."""
        owner = self.owner
        used: dict[str, tuple[Component, Mapping[str, str]]] = {}
        for instance in self.instances:
            part = self._revision(instance.revision, f"{instance.role} {instance.index}")
            for name, data in part.role(instance.role).configs.items():
                used[name] = ("engine", data)
        for component in ("umbp", "router"):
            kept = self.update.templates.get(component)
            for name, data in (kept.configs if kept else {}).items():
                used.setdefault(name, ("umbp" if component == "umbp" else "router", data))
        kept = self.update.templates.get("umbp")
        if kept and "grpc" in kept.ports:
            used[peers_name(owner.name)] = ("umbp", peers_file(self._endpoints(self.peers)))
        router = router_name(owner.name)
        used[router] = ("router", self._router_files())
        return [
            config_map(owner, name, component, data)
            for name, (component, data) in sorted(used.items())
        ]

    def _router_files(self) -> Mapping[str, str]:
        owner = self.owner
        workers = [
            endpoint(
                owner,
                self.revisions[instance.revision],
                instance,
                aggregated="prefill" not in self.revisions[instance.revision].templates,
            )
            for instance in self.instances
            if instance not in self.draining
        ]
        pools = self._endpoints(self.pools)
        scaled = [role.scaling for _, role in self.spec.roles() if role.scaling.mode != "Static"]
        sleeps = self.spec.suspend != "Scale" and any(scaling.min == 0 for scaling in scaled)
        wake_s = self.spec.router.request_timeout if sleeps else None
        return router_files(owner, self.update.templates["router"], workers, pools, wake_s)

    def _endpoints(self, urls: Mapping[str, str]) -> list[PoolEndpoint]:
        return [PoolEndpoint(name=node, url=url) for node, url in sorted(urls.items())]

    def _history(self, history: Sequence[Revision]) -> list[Manifest]:
        kept = history or tuple(self.revisions.values())
        return [to_controller_revision(one, n, self.owner) for n, one in enumerate(kept, 1)]

    def _policies(self, has_pool: bool) -> list[Manifest]:
        parts = [(i, self.revisions[i.revision].role(i.role)) for i in self.instances]
        on_host = any(part.host_network for _, part in parts) or any(
            self.update.templates[role].host_network
            for role in ROLES
            if role in self.update.templates
        )
        open_ports = [ports_of(self.owner, part, i) for i, part in parts]
        open_ports += [
            dict(self.update.templates[role].ports)
            for role in ROLES
            if role in self.update.templates and not on_host
        ]
        wanted = network.policies(
            self.owner,
            self.spec,
            pool=self.update.templates["umbp"].ports if has_pool else None,
            ports={ports["http"] for ports in open_ports},
            transfer={ports["transfer"] for ports in open_ports if "transfer" in ports},
            on_host=on_host,
        )
        if wanted and on_host:
            self._leave(
                f"NetworkPolicy of {self.owner.name}'s engines",
                "they are on the host's network, which no policy covers",
            )
        return wanted

    def _workers(self) -> list[Manifest]:
        return [
            scaling.workers(self.owner, name)
            for name, role in self.spec.roles()
            if role.scaling.mode != "Static"
        ]

    def _claims(self) -> list[Manifest]:
        found = []
        for name, role in self.spec.roles():
            if role.gpu.dra is None or not role.gpus_per_pod:
                continue
            if not self.capabilities.serves(CLAIM_TEMPLATE):
                self._leave(
                    f"ResourceClaimTemplate {self.owner.name}-{name}-gpus", "the server serves none"
                )
                continue
            found.append(scaling.claim_template(self.owner, name, role, CLAIM_TEMPLATE))
        return found

    def _instances(self) -> list[Manifest]:
        return [
            manifest
            for instance in self.instances
            for manifest in instance_objects(
                self.owner, self.revisions[instance.revision], instance
            )
        ]

    def _budgets(self) -> list[Manifest]:
        budgets = scaling.disruption_budgets(self.owner, self.spec, self.capabilities)
        return self._kept(budgets)

    def _autoscalers(self) -> list[Manifest]:
        prometheus = self.deployment.metadata.annotations.get(scaling.PROMETHEUS_ANNOTATION)
        return [
            manifest
            for name, role in self.spec.roles()
            for manifest in self._kept(
                scaling.autoscaler(self.owner, self.spec, name, role, self.capabilities, prometheus)
            )
        ]

    def _routes(self) -> list[Manifest]:
        route = network.http_route(self.owner, self.spec)
        if route is not None and not self.capabilities.serves(network.HTTP_ROUTE):
            return self._kept(LeftOut(f"HTTPRoute {self.owner.name}", "there is no Gateway API"))
        return self._kept(route)

    def _monitors(self) -> list[Manifest]:
        found, missing = monitoring.monitors(self.owner, self.spec, self.capabilities, self.tls)
        self.left_out += missing
        return found

    def _kept(self, rendered: list[Manifest] | Manifest | LeftOut | None) -> list[Manifest]:
        if isinstance(rendered, LeftOut):
            self.left_out.append(rendered)
            return []
        if rendered is None:
            return []
        return rendered if isinstance(rendered, list) else [rendered]


def rendered(
    deployment: KimiDeployment,
    capabilities: Capabilities,
    get_preset: GetPreset = load_preset,
    origin: str = "",
) -> Rendered:
    """A deployment at rest, without a cluster: one revision, the instances of its spec."""
    return at_rest(resolve(deployment, get_preset, origin or deployment.name), capabilities)


def at_rest(effective: Effective, capabilities: Capabilities) -> Rendered:
    """Like `rendered`, of a deployment that is resolved already."""
    revision = revision_of(effective)
    return render(
        effective,
        revisions={revision.name: revision},
        instances=instances_of(effective.deployment.spec, revision.name),
        capabilities=capabilities,
    )


def render_all(deployment: KimiDeployment, capabilities: Capabilities) -> list[Manifest]:
    """All objects of a deployment at rest, in apply order. Raises ConfigError, CapacityError."""
    return list(rendered(deployment, capabilities).manifests)
