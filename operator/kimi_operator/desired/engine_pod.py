"""The pod template of a role's engine, frozen: the same for all instances of a revision."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.roles import Role, RoleName
from kimi_operator.desired import pods, security, weights
from kimi_operator.desired.effective import Effective
from kimi_operator.desired.engines import launch_of
from kimi_operator.desired.engines.base import Launch, Seat, port_variables
from kimi_operator.desired.labels import COMPONENT_LABEL, Owner
from kimi_operator.desired.names import config_name, engine_name
from kimi_operator.desired.overlay import ENGINE, with_template
from kimi_operator.desired.placement import HOST, place, together
from kimi_operator.desired.rdma import Wiring, wiring
from kimi_operator.desired.revision import Frozen
from kimi_operator.observed import LEASE, Manifest
from kimi_runtime.errors import ConfigError

RUN_DIR = "/run/kimistack"
STARTUP_PERIOD_S = 10.0
RESTART_ANNOTATION = "kimistack.dev/restart-token"
_MEET = """\
import os, socket, sys, time
name = os.environ["POD_NAME"].rpartition("-")[0]
host = f"{name}-0.{name}.{os.environ['POD_NAMESPACE']}.svc"
end = time.monotonic() + 600
while time.monotonic() < end:
    try:
        sys.exit(socket.getaddrinfo(host, None) and 0)
    except OSError:
        time.sleep(1)
sys.exit(f"the first pod of this instance, {host}, has no address after 600 s")
"""
_FIRST_POD_ANSWERS = """\
[ "${POD_NAME##*-}" != 0 ] || python3 -c "import urllib.request as u; \
u.urlopen('http://$POD_IP:$KIMISTACK_PORT%s', timeout=%d)"
"""
"""Other ranks serve no HTTP: they are as ready as their process is alive."""


def uses_pool(effective: Effective, role: RoleName) -> bool:
    """Whether the role's engines connect to the pool; other engines have no connector for it."""
    spec = effective.deployment.spec
    return spec.engine == "kimistack" and spec.kv_pool.enabled and role in spec.kv_pool.roles


def shares_memory(effective: Effective) -> bool:
    """Whether prefill hands KV to decode through the memory of one host."""
    spec = effective.deployment.spec
    return spec.prefill is not None and spec.transfer.backend == "shm"


def has_kv_on_host(effective: Effective) -> bool:
    """Whether engines' KV lies in files of the node, for others on it to read."""
    spec = effective.deployment.spec
    beside = spec.engine == "kimistack" and spec.prefill is not None and spec.transfer.host_memory
    return beside or shares_memory(effective)


def frozen_role(effective: Effective, role: RoleName, inputs: str) -> Frozen:
    """The pods of a role. Raises ConfigError for what the engine or a rule of ours refuses."""
    return EnginePod(effective, role).frozen(inputs)


@dataclass(frozen=True)
class EnginePod:
    """The template of one role, in parts."""

    effective: Effective
    name: RoleName

    def frozen(self, inputs: str) -> Frozen:
        """Template, files and ports."""
        where = f"spec.{self.name}.podTemplate"
        for container in self._overlay_containers():
            for variable in container.get("env") or []:
                pods.refuse_reserved(variable.get("name", ""), where)
        pod = with_template(
            self._template(), self.role.pod_template, where, managed=self.role.managed_command
        )
        spread = {"none": None, "host": HOST, "rail": self.role.placement.topology_key}
        if shares_memory(self.effective) and self.role.placement.spread != "none":
            raise ConfigError(
                f"spec.{self.name}.placement.spread: {self.role.placement.spread} keeps instances "
                "apart, but transfer.backend shm hands KV over within one host; use one of the two"
            )
        return Frozen(
            inputs=inputs,
            pod=pod,
            configs=self._configs,
            ports=dict(self._launch.ports),
            nodes=self.role.parallelism.nodes,
            host_network=bool(pod["spec"].get("hostNetwork")),
            spread=spread[self.role.placement.spread],
        )

    @cached_property
    def role(self) -> Role:
        """The role's part of the spec."""
        return dict(self._spec.roles())[self.name]

    @property
    def _spec(self) -> DeploymentSpec:
        return self.effective.deployment.spec

    @cached_property
    def _owner(self) -> Owner:
        return Owner.of(self.effective.deployment)

    @property
    def _own_image(self) -> bool:
        return bool(self._spec.engine == "kimistack")

    @property
    def _image(self) -> str:
        return str(self.role.image or self._spec.image or pods.RUNTIME_IMAGE)

    @property
    def _on_host(self) -> bool:
        """Whether it uses the folder that the node's pods share."""
        return uses_pool(self.effective, self.name) or has_kv_on_host(self.effective)

    @cached_property
    def _wiring(self) -> Wiring:
        return wiring(self._spec, self.role)

    @cached_property
    def _model(self) -> weights.ModelFiles:
        return weights.model_files(self._spec)

    @cached_property
    def _launch(self) -> Launch:
        return launch_of(
            Seat(
                deployment=self.effective.deployment.name,
                spec=self._spec,
                role_name=self.name,
                role=self.role,
                model=self._model.model,
                vocabulary=self._model.vocabulary,
                run_dir=RUN_DIR,
                uses_pool=uses_pool(self.effective, self.name),
            )
        )

    @cached_property
    def _configs(self) -> dict[str, dict[str, str]]:
        """ConfigMaps by name."""
        found = {}
        for component, files in (("gate", self._model.gate_files), (self.name, self._launch.files)):
            if files:
                found[config_name(self._owner.name, component, files)] = dict(files)
        return found

    def _config(self, file: str) -> str:
        return next(name for name, files in self._configs.items() if file in files)

    def _overlay_containers(self) -> list[Any]:
        spec = (self.role.pod_template or {}).get("spec") or {}
        return [c for c in spec.get("containers") or [] if c.get("name") == ENGINE]

    def _template(self) -> Manifest:
        annotations = dict(self._wiring.annotations)
        if self._spec.restart_token is not None:
            annotations[RESTART_ANNOTATION] = self._spec.restart_token
        if self._launch.lease_s is not None:
            annotations[LEASE] = f"{self._launch.lease_s:g}"
        metadata: Manifest = {}
        if self.role.pod_labels:
            metadata["labels"] = dict(self.role.pod_labels)
        if annotations:
            metadata["annotations"] = annotations
        return {"metadata": metadata, "spec": self._pod_spec()}

    def _pod_spec(self) -> Manifest:
        spec, drain = self._spec, self.role.drain
        account = spec.security.service_account_name or engine_name(self._owner.name)
        pod: Manifest = {
            "serviceAccountName": account,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": round(drain.grace_s),
            "securityContext": security.pod_security(
                spec, own_image=self._own_image, gpus=self.role.gpus > 0
            ),
        }
        if spec.image_pull_secrets:
            pod["imagePullSecrets"] = [{"name": name} for name in spec.image_pull_secrets]
        if self._wiring.host_network:
            pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
        if self._shares_gpu:
            pod["hostIPC"] = True
        pod |= place(spec, self.role)
        if shares_memory(self.effective):
            together(pod, self._owner.name, {COMPONENT_LABEL: "engine"})
        if self.role.gpu.dra is not None and self.role.gpus_per_pod:
            template = {"resourceClaimTemplateName": f"{self._owner.name}-{self.name}-gpus"}
            pod["resourceClaims"] = [{"name": "gpus", **template}]
        before = self._init_containers()
        if before:
            pod["initContainers"] = before
        return pod | {"containers": [self._engine()], "volumes": self._volumes()}

    @property
    def _shares_gpu(self) -> bool:
        return bool(
            uses_pool(self.effective, self.name) and self._spec.kv_pool.gpu_access == "HipIpc"
        )

    def _init_containers(self) -> list[Manifest]:
        before: list[Manifest] = []
        if self._on_host and security.pod_uid(self._spec):
            before.append(own_folder(self._image, self._spec.image_pull_policy))
        if self._model.gate:
            program = f"{weights.GATE_DIR}/{weights.GATE_FILE}"
            within = ("--within-s", f"{self.role.probes.startup_timeout:g}")
            mounts = [{"name": "gate", "mountPath": weights.GATE_DIR, "readOnly": True}]
            before.append(
                {
                    **self._container("model"),
                    "command": ["python3", program],
                    "args": [*self._model.gate, *within],
                    "volumeMounts": [*mounts, *self._model.gate_mounts],
                }
            )
        if self.role.parallelism.nodes > 1:
            meet = {"command": ["python3", "-c", _MEET], "env": pods.identity()}
            before.append({**self._container("meet"), **meet})
        return before

    def _container(self, name: str) -> Manifest:
        return {
            "name": name,
            "image": self._image,
            "imagePullPolicy": self._spec.image_pull_policy,
            "securityContext": security.container_security(
                self._spec, own_image=self._own_image, devices=False
            ),
        }

    def _engine(self) -> Manifest:
        launch, role = self._launch, self.role
        container = {
            **self._container(ENGINE),
            "command": list(launch.argv),
            "env": self._env(),
            "ports": pods.container_ports(launch.ports),
            "resources": pods.resources(role.resources, self._devices()),
            "securityContext": security.container_security(
                self._spec,
                own_image=self._own_image,
                devices=self._wiring.devices or self._shares_gpu,
            ),
            "volumeMounts": self._mounts(),
            "lifecycle": pods.pause_before_stop(role.drain, told=self._own_image),
            **self._probes(),
        }
        if role.gpu.dra is not None and role.gpus_per_pod:
            container["resources"]["claims"] = [{"name": "gpus"}]
        return container

    def _devices(self) -> dict[str, str]:
        gpu, count = self.role.gpu, self.role.gpus_per_pod
        gpus = {gpu.resource: str(count)} if gpu.resource and count else {}
        return gpus | dict(self._wiring.resources)

    def _env(self) -> list[Manifest]:
        cache = pods.CACHE_DIR
        caches = {"AITER_JIT_DIR": f"{cache}/aiter", "TRITON_CACHE_DIR": f"{cache}/triton"}
        home = {"HOME": "/tmp"} if self._own_image else {}
        generated = {**self._wiring.env, **self._launch.env, **caches, **home}
        ports = [{"name": k, "value": v} for k, v in port_variables(self._launch.ports).items()]
        identity = pods.identity()
        if self._own_image:
            identity.append(pods.revision_variable())
            drain_file = f"{pods.DRAIN_DIR}/{pods.DRAIN_FILE}"
            identity.append({"name": "KIMISTACK_DRAIN_FILE", "value": drain_file})
        user = [v.model_dump(mode="json", exclude_none=True) for v in self.role.env]
        where = f"spec.{self.name}.env"
        return pods.variables([*identity, *ports], generated, user, where)

    def _probes(self) -> Manifest:
        launch, probes = self._launch, self.role.probes
        ready = probes.readiness
        failures = max(1, round(probes.startup_timeout / STARTUP_PERIOD_S))
        timeout_s = ready.timeout
        first = pods.http_probe(
            launch.ready, period_s=STARTUP_PERIOD_S, timeout_s=timeout_s, failures=failures
        )
        then = pods.http_probe(
            launch.ready,
            period_s=ready.period,
            timeout_s=timeout_s,
            failures=ready.failure_threshold,
        )
        alive = pods.http_probe(launch.alive, period_s=30, timeout_s=timeout_s, failures=6)
        if self.role.parallelism.nodes > 1:
            script = _FIRST_POD_ANSWERS % (launch.ready, max(1, round(timeout_s) - 1))
            for probe in (first, then, alive):
                del probe["httpGet"]
                probe["exec"] = {"command": ["/bin/sh", "-c", script]}
        found = {"startupProbe": first, "readinessProbe": then}
        return found | ({"livenessProbe": alive} if probes.liveness == "Enabled" else {})

    def _volumes(self) -> list[Manifest]:
        volumes = [pods.shared_memory(self.role.resources.shm), pods.scratch("cache")]
        if self._own_image:
            volumes += [pods.scratch("tmp"), security.call_key_volume(self._owner.name)]
            volumes.append(pods.drain_volume())
            if self._on_host:
                path = pods.host_folder(self._owner, self._spec)
                folder = {"path": path, "type": "DirectoryOrCreate"}
                volumes.append({"name": "run", "hostPath": folder})
            else:
                volumes.append({"name": "run", "emptyDir": {"medium": "Memory"}})
        if self._launch.files:
            volumes.append(
                pods.config_volume("config", self._config(next(iter(self._launch.files))))
            )
        if self._model.gate:
            volumes.append(pods.config_volume("gate", self._config(weights.GATE_FILE)))
        adapters, _ = weights.adapter_volumes(self._spec)
        return [*volumes, *self._model.volumes, *adapters, *self._wiring.volumes]

    def _mounts(self) -> list[Manifest]:
        mounts: list[Manifest] = [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": pods.CACHE_DIR},
        ]
        if self._own_image:
            mounts += [
                {"name": "tmp", "mountPath": "/tmp"},
                {"name": "call-key", "mountPath": security.CALL_KEY_DIR, "readOnly": True},
                {"name": "drain", "mountPath": pods.DRAIN_DIR, "readOnly": True},
                {"name": "run", "mountPath": RUN_DIR},
            ]
        if self._launch.files:
            mounts.append({"name": "config", "mountPath": pods.CONFIG_DIR, "readOnly": True})
        _, adapters = weights.adapter_volumes(self._spec)
        return [*mounts, *self._model.mounts, *adapters, *self._wiring.mounts]


def own_folder(image: str, policy: str) -> Manifest:
    """An init container that gives the node's folder, which the kubelet makes, to our user."""
    script = f"chmod 0700 {RUN_DIR} && chown {security.UID}:{security.UID} {RUN_DIR}"
    return {
        "name": "own-folder",
        "image": image,
        "imagePullPolicy": policy,
        "command": ["/bin/sh", "-c", script],
        "securityContext": {
            "runAsUser": 0,
            "runAsNonRoot": False,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]},
        },
        "volumeMounts": [{"name": "run", "mountPath": RUN_DIR}],
    }
