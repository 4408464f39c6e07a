"""Who reaches whom: the router's Service and route, and a policy per component.

Only the router is reached from outside the deployment. Each component may open connections to what
it needs and nothing else; kubelets' probes are always let through.
"""

from collections.abc import Mapping
from typing import Any

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.desired.labels import COMPONENT_LABEL, Component, Owner, metadata_of, selector_of
from kimi_operator.desired.names import engine_name, pool_name, router_name
from kimi_operator.desired.pool_files import POOL_PORT
from kimi_operator.observed import DEPLOYMENT_LABEL, Manifest

HTTP_ROUTE = "gateway.networking.k8s.io/v1/HTTPRoute"
PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}
Rule = dict[str, Any]


def router_service(owner: Owner, spec: DeploymentSpec) -> Manifest:
    """The front door. Only ready routers are behind it."""
    service = spec.router.service
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata_of(
            owner, router_name(owner.name), "router", annotations=service.annotations
        ),
        "spec": {
            "type": service.type,
            "selector": selector_of(owner, "router"),
            "ports": [
                {"name": "http", "port": service.port, "targetPort": "http", "protocol": "TCP"}
            ],
        },
    }


def http_route(owner: Owner, spec: DeploymentSpec) -> Manifest | None:
    """The route from a Gateway to the router, where the spec names one."""
    gateway = spec.router.gateway
    if gateway is None:
        return None
    parent = {"name": gateway.name}
    if gateway.namespace is not None:
        parent["namespace"] = gateway.namespace
    rule: Rule = {
        "backendRefs": [{"name": router_name(owner.name), "port": spec.router.service.port}]
    }
    if gateway.timeout is not None:
        rule["timeouts"] = {"request": f"{round(gateway.timeout * 1000)}ms"}
    body: Manifest = {"parentRefs": [parent], "rules": [rule]}
    if gateway.hostnames:
        body["hostnames"] = list(gateway.hostnames)
    return {
        "apiVersion": HTTP_ROUTE.rpartition("/")[0],
        "kind": "HTTPRoute",
        "metadata": metadata_of(owner, router_name(owner.name), "router"),
        "spec": body,
    }


def policies(
    owner: Owner,
    spec: DeploymentSpec,
    *,
    pool: Mapping[str, int] | None,
    ports: set[int],
    transfer: set[int],
    on_host: bool,
) -> list[Manifest]:
    """A NetworkPolicy per component whose pods have a network of their own.

    `pool` are the daemons' ports by name; None: there are no daemons. `ports` are the engines' HTTP
    ports, `transfer` those where they hand KV over. `on_host`: engines are on the host's network,
    which no policy covers and from which pods cannot be told apart.
    """
    if spec.security.network_policy == "Disabled":
        return []
    engines = _peer(owner, "engine")
    found = [_router(owner, spec, engines, pool=bool(pool), ports=ports, on_host=on_host)]
    if not on_host:
        found.append(_engines(owner, spec, engines, ports=ports, transfer=transfer))
    if pool:
        # engines talk to their node's daemon through its socket, not through the network
        callers = [_peer(owner, "router"), _peer(owner, "umbp"), _scraper()]
        rules: list[Rule] = [{"from": callers, "ports": [_tcp(POOL_PORT)]}]
        between = [_tcp(port) for _, port in sorted(pool.items()) if port != POOL_PORT]
        if between:  # peers ask and are read from; others have no business there
            rules.append({"from": [_peer(owner, "umbp")], "ports": between})
        out = [_dns(), {"to": [_peer(owner, "umbp")]}]
        found.append(_policy(owner, pool_name(owner.name), "umbp", rules, out))
    return found


def _router(
    owner: Owner,
    spec: DeploymentSpec,
    engines: Rule,
    *,
    pool: bool,
    ports: set[int],
    on_host: bool,
) -> Manifest:
    to_engines: Rule = {"ports": [_tcp(port) for port in sorted(ports)]}
    if not on_host:
        to_engines["to"] = [engines]
    out = [_dns(), *([to_engines] if ports else [])]
    if pool:
        out.append({"to": [_peer(owner, "umbp")], "ports": [_tcp(POOL_PORT)]})
    if spec.model.source == "hf":
        out.append(_hub())
    # the front door is open: API keys say who may use it
    ingress = [{"ports": [_tcp(spec.router.port)]}]
    return _policy(owner, router_name(owner.name), "router", ingress, out)


def _engines(
    owner: Owner, spec: DeploymentSpec, engines: Rule, *, ports: set[int], transfer: set[int]
) -> Manifest:
    http = [_tcp(port) for port in sorted(ports)]
    callers = [_peer(owner, "router")]
    # hand-off and collectives of other engines use ports of their own choice
    between: Rule = {}
    if spec.engine == "kimistack":
        # its port asks for the call key, but for health and metrics; other engines' ask for none
        callers.append(_scraper())
        # KV is read at one port, and the ticket given back at the other
        between = {"ports": [_tcp(port) for port in sorted(ports | transfer)]}
    ingress: list[Rule] = [{"from": [engines], **between}]
    if http:
        ingress.append({"from": callers, "ports": http})
    out = [_dns(), {"to": [engines], **between}]
    if spec.model.source == "hf" or any(a.source == "hf" for a in spec.adapters):
        out.append(_hub())
    return _policy(owner, engine_name(owner.name), "engine", ingress, out)


def _policy(
    owner: Owner, name: str, component: Component, ingress: list[Rule], egress: list[Rule]
) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata_of(owner, name, component),
        "spec": {
            "podSelector": {"matchLabels": selector_of(owner, component)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }


def _peer(owner: Owner, component: Component) -> Rule:
    labels = {DEPLOYMENT_LABEL: owner.name, COMPONENT_LABEL: component}
    return {"podSelector": {"matchLabels": labels}}


def _scraper() -> Rule:
    """Prometheus, in whatever namespace; the port serves it states and counts."""
    return {"namespaceSelector": {}, "podSelector": {"matchLabels": dict(PROMETHEUS)}}


def _tcp(port: int) -> Rule:
    return {"protocol": "TCP", "port": port}


def _dns() -> Rule:
    return {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


def _hub() -> Rule:
    """Downloads come from many addresses, all by HTTPS."""
    return {"ports": [_tcp(443)]}
