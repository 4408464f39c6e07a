"""The model's files in a pod: volume, path, and the gate that no engine starts before.

The gate is a program of Python's standard library, so that it runs in the image of every engine.
It downloads what is missing (source hf), then checks that every file the index names is there and
that the index has the checksum of the spec.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.desired.engines.base import ADAPTERS_DIR
from kimi_operator.observed import Manifest
from kimi_runtime.errors import ConfigError

MODELS_DIR = "/models"
VOCABULARY = "tiktoken.model"
GATE_DIR = "/etc/kimistack-gate"
GATE_FILE = "model_gate.py"
TOKEN_DIR = "/etc/kimistack-hub"


@dataclass(frozen=True)
class ModelFiles:
    """What a pod needs to see the model. `model` is what the engine is told; a folder or an id."""

    model: str
    vocabulary: str | None
    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()
    gate: tuple[str, ...] = ()
    """Arguments of the gate; empty: there is nothing to wait for."""
    gate_mounts: tuple[Manifest, ...] = ()
    gate_files: Mapping[str, str] = field(default_factory=dict)


@lru_cache
def gate_source() -> str:
    """The gate's program."""
    return (files("kimi_operator.desired") / "files" / GATE_FILE).read_text("utf-8")


def model_files(spec: DeploymentSpec, *, vocabulary_only: bool = False) -> ModelFiles:
    """The model's files for an engine, or its vocabulary alone for the router.

    Raises ConfigError for source local, which names a folder of one machine.
    """
    model = spec.model
    if model.source in ("packaged", "random"):
        return ModelFiles(model.id or model.source, model.vocabulary)
    if model.source == "local" or model.source is None:
        raise ConfigError(
            "spec.model.source: local is a folder of the machine that `kimistack up` runs on; in a "
            "cluster use hostPath, pvc, hf or oci"
        )
    volume, folder, writes = _volume(spec, vocabulary_only)
    mount = {"name": "model", "mountPath": MODELS_DIR}
    gate = ["--folder", folder]
    volumes = [volume]
    gate_mounts: list[Manifest] = []
    if model.source == "hf":
        gate += ["--id", model.id or "", "--revision", model.revision or "main"]
        if model.token_secret_ref is not None:
            ref = model.token_secret_ref
            items = [{"key": ref.key, "path": "token"}]
            secret = {"secretName": ref.name, "items": items, "defaultMode": 0o440}
            volumes.append({"name": "hub-token", "secret": secret})
            gate_mounts.append({"name": "hub-token", "mountPath": TOKEN_DIR, "readOnly": True})
            gate += ["--token-file", f"{TOKEN_DIR}/token"]
    if vocabulary_only:
        gate += ["--only", VOCABULARY]
    elif model.checksum is not None:
        gate += ["--checksum", model.checksum]
    read_only = {**mount, "readOnly": True}
    vocabulary = model.vocabulary or f"{folder}/{VOCABULARY}"
    if vocabulary_only and model.vocabulary is not None:
        gate = []
    return ModelFiles(
        model=folder,
        vocabulary=vocabulary,
        volumes=tuple(volumes),
        mounts=(read_only,),
        gate=tuple(gate),
        gate_mounts=(mount if writes else read_only, *gate_mounts),
        gate_files={GATE_FILE: gate_source()} if gate else {},
    )


def _volume(spec: DeploymentSpec, vocabulary_only: bool) -> tuple[Manifest, str, bool]:
    """Volume, the model's folder in the container, and whether the gate writes to it."""
    model = spec.model
    match model.source:
        case "pvc":
            claim = {"claimName": model.claim, "readOnly": True}
            folder = f"{MODELS_DIR}/{(model.path or '').strip('/')}".rstrip("/")
            return {"name": "model", "persistentVolumeClaim": claim}, folder, False
        case "hostPath":
            path = {"path": model.path, "type": "Directory"}
            return {"name": "model", "hostPath": path}, MODELS_DIR, False
        case "oci":
            image = {"reference": model.image, "pullPolicy": spec.image_pull_policy}
            return {"name": "model", "image": image}, MODELS_DIR, False
        case _:
            folder = "/".join(
                (MODELS_DIR, (model.id or "").replace("/", "--"), model.revision or "main")
            )
            return {"name": "model", **_cache(spec, vocabulary_only)}, folder, True


def _cache(spec: DeploymentSpec, vocabulary_only: bool) -> Manifest:
    cache = spec.model.cache
    if cache is None or vocabulary_only:
        # the router needs two megabytes: no reason to tie it to a node or a claim
        return {"emptyDir": {}}
    if cache.pvc is not None:
        return {"persistentVolumeClaim": {"claimName": cache.pvc}}
    return {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}


def adapter_volumes(spec: DeploymentSpec) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes and mounts of the LoRA adapters that are no Hugging Face ids."""
    volumes: list[Manifest] = []
    mounts: list[Manifest] = []
    for index, adapter in enumerate(a for a in spec.adapters if a.source != "hf"):
        name = f"adapter-{index}"
        at = f"{ADAPTERS_DIR}/{adapter.name}"
        if adapter.source == "pvc":
            claim = {"claimName": adapter.claim, "readOnly": True}
            volumes.append({"name": name, "persistentVolumeClaim": claim})
        else:
            path = {"path": adapter.path, "type": "Directory"}
            volumes.append({"name": name, "hostPath": path})
        mounts.append({"name": name, "mountPath": at, "readOnly": True})
    return volumes, mounts
