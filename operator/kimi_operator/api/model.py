"""Which model is served and where its files come from."""

from typing import Annotated, ClassVar, Literal

from annotated_types import Gt
from pydantic import Field
from pydantic.alias_generators import to_camel

from kimi_operator.api.base import ApiModel, Folder, Name, Rule, implies, presettable
from kimi_runtime.units import Bytes

Source = Literal["hf", "pvc", "hostPath", "oci", "local", "packaged", "random"]

NEEDED: dict[str, tuple[str, ...]] = {
    "hf": ("id",),
    "pvc": ("claim",),
    "hostPath": ("path",),
    "oci": ("image",),
    "local": ("path",),
    "packaged": (),
    "random": (),
}
ONLY_WITH: dict[str, tuple[str, ...]] = {
    "revision": ("hf",),
    "claim": ("pvc",),
    "path": ("pvc", "hostPath", "local"),
    "image": ("oci",),
    "seed": ("random",),
    "config": ("random",),
    "token_secret_ref": ("hf",),
    "cache": ("hf", "oci"),
    "checksum": ("hf", "pvc", "hostPath", "oci", "local"),
}
"""Fields (Python names) that mean something for these sources only."""


class SecretKeyRef(ApiModel):
    """One key of a Secret in the deployment's namespace."""

    name: Name = Field(description="Name of the Secret.")
    key: Name = Field(description="Key within the Secret.")


class ModelCache(ApiModel):
    """Where downloaded weights are kept, so that a restart does not download them again."""

    pvc: Name | None = Field(None, description="A PersistentVolumeClaim, shared by all pods.")
    host_path: Folder | None = Field(None, description="A folder on each node, e.g. on NVMe.")
    size: Annotated[Bytes, Gt(0)] | None = Field(
        None, description="Space the weights need; a node or claim with less is refused."
    )

    rules: ClassVar = (
        Rule(
            "write exactly one of pvc and hostPath",
            lambda m: (m.pvc is None) != (m.host_path is None),
            "has(self.pvc) != has(self.hostPath)",
        ),
    )


def _needs(source: str, field: str) -> Rule:
    return Rule(
        f"source {source} needs {field}",
        lambda m: m.source != source or getattr(m, field) is not None,
        implies(f"has(self.source) && self.source == '{source}'", f"has(self.{field})"),
        field=field,
    )


def _goes_with(field: str, sources: tuple[str, ...]) -> Rule:
    camel = to_camel(field)
    listed = ", ".join(f"'{source}'" for source in sources)
    return Rule(
        f"{camel} goes with source {' or '.join(sources)} only",
        lambda m: m.source is None or getattr(m, field) is None or m.source in sources,
        implies(f"has(self.source) && has(self.{camel})", f"self.source in [{listed}]"),
        field=camel,
    )


class ModelSource(ApiModel):
    """The served model. With a preset, only what differs from it is written."""

    id: Name | None = presettable(
        None,
        "The model: a name this project knows (kimi-k2.6, kimi-k3, ...) or its Hugging Face id, "
        "e.g. amd/Kimi-K2.6-MXFP4.",
    )
    source: Source | None = presettable(
        None,
        "Where the files come from: hf (download), pvc (a claim), hostPath (a folder on every "
        "node), oci (an image volume), local (a folder here; `kimistack up` only), "
        "packaged (the trained kimi-nano that comes with the runtime) or random (weights drawn "
        "from a seed: the architecture without its skill).",
    )
    revision: Name | None = presettable(None, "Commit or tag at Hugging Face; pin it.")
    path: Folder | None = Field(
        None, description="Folder of config.json and safetensors; within the claim for pvc."
    )
    claim: Name | None = Field(None, description="Name of the PersistentVolumeClaim.")
    image: Name | None = Field(None, description="Reference of the OCI image with the weights.")
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = presettable(
        None, "Seed of random weights; 0 where it is not written."
    )
    config: Folder | None = Field(
        None, description="A Hugging Face config.json for random weights; none: kimi-nano's."
    )
    vocabulary: Folder | None = Field(
        None,
        description="The tiktoken rank file; none: tiktoken.model beside the weights, or the "
        "test vocabulary for packaged and random weights.",
    )
    cache: ModelCache | None = Field(None, description="Where downloaded files are kept.")
    token_secret_ref: SecretKeyRef | None = Field(
        None, description="Secret with a Hugging Face token, for gated models."
    )
    served_name: Name | None = presettable(
        None, "The name clients ask for; none: the deployment's own name."
    )
    checksum: (
        Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$", max_length=71, min_length=71)] | None
    ) = Field(None, description="sha256 of the safetensors index; a mismatch stops the start.")

    rules: ClassVar = (
        *(_needs(source, field) for source, fields in NEEDED.items() for field in fields),
        *(_goes_with(field, sources) for field, sources in ONLY_WITH.items()),
        Rule(
            "path must be absolute for hostPath",
            lambda m: m.source != "hostPath" or (m.path or "/").startswith("/"),
            implies(
                "has(self.source) && self.source == 'hostPath' && has(self.path)",
                "self.path.startsWith('/')",
            ),
            field="path",
        ),
    )


class LoraAdapter(ApiModel):
    """A LoRA adapter served beside the model, under its own name."""

    name: Name = Field(description="The name clients ask for.")
    source: Literal["hf", "pvc", "hostPath"] = Field(description="Where its files come from.")
    path: Folder = Field(description="Hugging Face id, or a folder on the claim or the node.")
    claim: Name | None = Field(None, description="The PersistentVolumeClaim, for source pvc.")

    rules: ClassVar = (
        Rule(
            "source pvc needs claim, and no other source has one",
            lambda m: (m.source == "pvc") == (m.claim is not None),
            "(self.source == 'pvc') == has(self.claim)",
            field="claim",
        ),
    )
