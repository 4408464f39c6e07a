"""The router: a Deployment whose pods all start from one file, and follow another.

What the spec decides is frozen with the revision, and a change of it replaces the pods. Workers and
pools come and go; they are in a second file, which running routers read again when it changes.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from kimi_operator.api.router import Router
from kimi_operator.desired import pods, pool_tls, security, weights
from kimi_operator.desired.effective import Effective
from kimi_operator.desired.engines.kimistack import CALL_KEY_FILE
from kimi_operator.desired.fit import known_model
from kimi_operator.desired.labels import Owner, labels_of, metadata_of, selector_of
from kimi_operator.desired.names import config_name, digest_of, pool_host, router_name
from kimi_operator.desired.placement import place_router
from kimi_operator.desired.policy import explain_of, policy_of, session_admission_of
from kimi_operator.desired.revision import Frozen
from kimi_operator.desired.spec_files import spec_file
from kimi_operator.desired.umbp import pool_roles
from kimi_operator.observed import Manifest
from kimi_runtime.spec.router import (
    EXPLAIN_FILE,
    ExplainSpec,
    FleetSpec,
    PoolEndpoint,
    RouterSpec,
    WorkerEndpoint,
)

ROUTER_FILE = "router.json"
FLEET_FILE = "fleet.json"
API_KEYS_DIR = "/etc/kimistack-api-keys"
STATE_DIR = "/var/lib/kimistack"
EXPLAIN_DIR = f"{STATE_DIR}/explain"
"""A folder of the state folder, which is where `kimistack explain` in the pod looks."""
CONFIG_ANNOTATION = "kimistack.dev/config"
PRE_STOP_S, DRAIN_S, CLOSE_S = 5.0, 30.0, 10.0
"""Until endpoints have left every proxy; for running requests; to close."""
LINGER_S = 3.0
"""Of the second: for clients on connections that are open already to hear that they close."""
START_S = 120.0
_WITH_FILES = 'ulimit -n %d 2>/dev/null || ulimit -n "$(ulimit -Hn)"; exec "$@"'
"""A container's soft limit is often 1024 open files, some hundred streams."""


def frozen_router(effective: Effective, inputs: str) -> Frozen:
    """The router's pods and the part of its file that the spec decides."""
    owner, spec = Owner.of(effective.deployment), effective.deployment.spec
    model = weights.model_files(spec, vocabulary_only=True)
    file = _spec_file(effective, model.vocabulary)
    configs = {router_name(owner.name): {ROUTER_FILE: file}}
    if model.gate_files:
        configs[config_name(owner.name, "gate", model.gate_files)] = dict(model.gate_files)
    annotations = {CONFIG_ANNOTATION: digest_of(file)[:16]}
    template: Manifest = {
        "metadata": {"annotations": annotations},
        "spec": _pod(effective, owner, model, configs),
    }
    return Frozen(inputs=inputs, pod=template, configs=configs, ports={"http": spec.router.port})


def _spec_file(effective: Effective, vocabulary: str | None) -> str:
    deployment, spec = effective.deployment, effective.deployment.spec
    router = spec.router
    architecture = effective.preset.architecture if effective.preset else spec.model.id
    known = known_model(architecture)
    keys = f"{API_KEYS_DIR}/keys" if router.api_keys_secret_ref else None
    data = {
        "name": "router",
        "host": "0.0.0.0",
        "port": router.port,
        "model_name": spec.model.served_name or deployment.name,
        "family": "k3" if known and known.family in ("k3", "k31") else "k2",
        "thinking": router.thinking,
        "vocabulary": vocabulary,
        "workers": (),
        "fleet": f"{pods.CONFIG_DIR}/{FLEET_FILE}",
        "policy": policy_of(effective),
        "call_key": CALL_KEY_FILE,
        "api_keys": keys,
        "max_body": router.max_body,
        "max_in_flight": router.max_in_flight,
        "default_max_tokens": router.default_max_tokens,
        "request_deadline": router.request_timeout,
        "drain": DRAIN_S,
        "log_level": spec.observability.log_level,
    }
    if explain := _explain(router):
        data["explain"] = explain
    if router.session_admission is not None:  # images before 0.3 do not know it
        data["sessions"] = session_admission_of(router)
    if _pool_secret(effective) is not None:
        host = pool_host(deployment.name, Owner.of(deployment).namespace)
        data |= {"pools_ca": pool_tls.CA_FILE, "pools_name": host}
    return spec_file(RouterSpec.model_validate(data))


def _explain(router: Router) -> ExplainSpec | None:
    return explain_of(router, Path(EXPLAIN_DIR) / EXPLAIN_FILE)


def _pool_secret(effective: Effective) -> str | None:
    """The Secret with the authority of the pool's daemons, where there are any that encrypt."""
    return effective.deployment.spec.security.tls_secret_name if pool_roles(effective) else None


def _pod(
    effective: Effective,
    owner: Owner,
    model: weights.ModelFiles,
    configs: dict[str, dict[str, str]],
) -> Manifest:
    spec = effective.deployment.spec
    pod_context, container_context = security.router_security()
    common = {
        "image": pods.runtime_image(spec),
        "imagePullPolicy": spec.image_pull_policy,
        "securityContext": container_context,
    }
    pod: Manifest = {
        "serviceAccountName": router_name(owner.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": round(PRE_STOP_S + DRAIN_S + CLOSE_S),
        "securityContext": pod_context,
        **place_router(spec, selector_of(owner, "router")),
    }
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.image_pull_secrets]
    volumes: list[Manifest] = [
        security.call_key_volume(owner.name),
        pods.config_volume("config", router_name(owner.name)),
        pods.scratch("tmp"),
        *model.volumes,
    ]
    if _explain(spec.router):
        volumes.append(pods.scratch("explain"))
    first: list[Manifest] = []
    if model.gate:
        gate = next(name for name, data in configs.items() if weights.GATE_FILE in data)
        volumes.append(pods.config_volume("gate", gate))
        mount = {"name": "gate", "mountPath": weights.GATE_DIR, "readOnly": True}
        first.append(
            {
                "name": "model",
                **common,
                "command": ["python3", f"{weights.GATE_DIR}/{weights.GATE_FILE}"],
                "args": list(model.gate),
                "volumeMounts": [mount, *model.gate_mounts],
            }
        )
    tls = _pool_secret(effective)
    if tls is not None:
        volumes.append(pool_tls.volume(tls, pool_tls.ROUTER_KEYS))
        first.append(pool_tls.gate(owner, tls, pool_tls.ROUTER_KEYS, common))
    if first:
        pod["initContainers"] = first
    if spec.router.api_keys_secret_ref is not None:
        ref = spec.router.api_keys_secret_ref
        items = [{"key": ref.key, "path": "keys"}]
        secret = {"secretName": ref.name, "items": items, "defaultMode": 0o440}
        volumes.append({"name": "api-keys", "secret": secret})
    container = {"name": "router", **common, **_container(effective, model)}
    return pod | {"containers": [container], "volumes": volumes}


def _container(effective: Effective, model: weights.ModelFiles) -> Manifest:
    spec = effective.deployment.spec
    mounts: list[Manifest] = [
        {"name": "call-key", "mountPath": security.CALL_KEY_DIR, "readOnly": True},
        {"name": "config", "mountPath": pods.CONFIG_DIR, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
        *model.mounts,
    ]
    if spec.router.api_keys_secret_ref is not None:
        mounts.append({"name": "api-keys", "mountPath": API_KEYS_DIR, "readOnly": True})
    if _pool_secret(effective) is not None:
        mounts.append(pool_tls.mount())
    generated = {
        "HOME": "/tmp",
        "KIMISTACK_HOST": "$(POD_IP)",
        "KIMISTACK_LINGER": f"{LINGER_S:g}s",
        "KIMISTACK_NAME": "$(POD_NAME)",
    }
    if _explain(spec.router):
        mounts.append({"name": "explain", "mountPath": EXPLAIN_DIR})
        generated["KIMISTACK_HOME"] = STATE_DIR
    script = _WITH_FILES % spec.router.nofile
    file = f"{pods.CONFIG_DIR}/{ROUTER_FILE}"
    wait = ["/bin/sh", "-c", f"sleep {PRE_STOP_S:g}"]
    return {
        "command": ["/bin/sh", "-c", script, "router", "kimistack", "router", "--spec", file],
        "env": pods.variables(pods.identity(), generated, (), "spec.router"),
        "ports": pods.container_ports({"http": spec.router.port}),
        "resources": pods.resources(spec.router.resources, {}),
        "startupProbe": pods.http_probe(
            "/healthz", period_s=2, timeout_s=5, failures=round(START_S / 2)
        ),
        "readinessProbe": pods.http_probe("/readyz", period_s=5, timeout_s=5, failures=2),
        "lifecycle": {"preStop": {"exec": {"command": wait}}},
        "volumeMounts": mounts,
    }


def router_files(
    owner: Owner,
    part: Frozen,
    workers: Sequence[WorkerEndpoint],
    pools: Sequence[PoolEndpoint],
    wake_s: float | None = None,
) -> dict[str, str]:
    """The router's files with the workers and pools there are.

    `wake_s`: how long a request may wait for workers to be started, where somebody starts them.

    Only what was given is written: an older router refuses fields that it does not know.
    """
    wake = {} if wake_s is None else {"wake": wake_s}
    fleet = FleetSpec(workers=tuple(workers), pools=tuple(pools), **wake)
    text = fleet.model_dump_json(indent=2, exclude_unset=True) + "\n"
    return {**part.configs[router_name(owner.name)], FLEET_FILE: text}


def router_deployment(owner: Owner, part: Frozen, replicas: int) -> Manifest:
    """The router's Deployment; a new pod serves before an old one goes."""
    template = json.loads(json.dumps(part.pod))
    metadata = template["metadata"]
    metadata["labels"] = {**metadata.get("labels", {}), **labels_of(owner, "router")}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata_of(owner, router_name(owner.name), "router"),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 1,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "selector": {"matchLabels": selector_of(owner, "router")},
            "template": template,
        },
    }
