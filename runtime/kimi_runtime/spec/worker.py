"""A worker: the file it starts from, what it can do, and what it reports."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from annotated_types import Gt
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from kimi_runtime.spec.base import ReportModel, SpecModel
from kimi_runtime.spec.transfer import TransferChaos, TransferNetwork
from kimi_runtime.units import Bytes, Seconds

TransferName = Literal["shm", "loopback", "tcp", "verbs"]


class Role(StrEnum):
    """What a worker is planned for. `BOTH` serves whole requests alone (aggregated)."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class RandomWeights(SpecModel):
    """Weights drawn from a seed: the architecture without its skill."""

    kind: Literal["random"] = "random"
    config: Path | None = Field(None, description="A Hugging Face config.json; None: kimi-nano's.")
    seed: int = 0


class FileWeights(SpecModel):
    """A folder with config.json and safetensors."""

    kind: Literal["files"] = "files"
    path: Path


class PackagedWeights(SpecModel):
    """A trained model that comes with the package."""

    kind: Literal["packaged"] = "packaged"
    name: Literal["kimi-nano"] = "kimi-nano"


Weights = Annotated[RandomWeights | FileWeights | PackagedWeights, Field(discriminator="kind")]


class EngineLimits(SpecModel):
    """How much one engine takes on at once."""

    block_tokens: PositiveInt = 64
    kv_bytes: Annotated[Bytes, Gt(0)] = Field(description="Memory for KV blocks, e.g. 256MiB.")
    max_running: PositiveInt = 64
    max_waiting: PositiveInt = Field(256, description="Beyond this a request is refused with 429.")
    step_tokens: PositiveInt = Field(512, description="Token budget of one step.")
    max_context_tokens: PositiveInt | None = Field(None, description="None: the model's own.")


class WorkerSpec(SpecModel):
    """The file a worker process starts from."""

    name: str
    role: Role
    engine: Literal["kimistack"] = "kimistack"
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)]
    weights: Weights
    vocabulary: Path | None = Field(None, description="A rank file; None: the test vocabulary.")
    limits: EngineLimits
    threads: PositiveInt = 1
    run_dir: Path = Field(description="Folder for sockets and shared memory; private to the user.")
    call_key: Path = Field(description="File with the deployment's call key.")
    umbp_socket: Path | None = Field(None, description="None: no pool.")
    node: str = Field(
        "", description="The machine it is on, after which its pool is named. Empty: any pool is."
    )
    transfer: TransferName = "shm"
    network: TransferNetwork = Field(
        TransferNetwork(), description="Of `tcp` and `verbs`; the others have none."
    )
    host_memory: bool = Field(
        False,
        description="Hand over by shm between workers whose run folder is one and the same, and "
        "by `transfer` between all others. KV then lies in a file there.",
    )
    revision: str = Field(
        "", description="Of the deployment: only workers of the same one are paired."
    )
    hand_off_lease: Annotated[Seconds, Gt(0)] = 30.0
    pull_deadline: Annotated[Seconds, Gt(0)] = 5.0
    drain: Annotated[Seconds, Gt(0)] = 10.0
    lease: Annotated[Seconds, Gt(0)] | None = Field(
        None,
        description="Once no router has heard of the worker for so long it ends what it does, and "
        "takes nothing more until one has. None: it works on.",
    )
    drain_file: Path | None = Field(
        None, description="While this file is not empty, routers are asked to leave the worker."
    )
    chaos: TransferChaos | None = Field(
        None,
        description="For tests alone: transfers fail on purpose. No deployment can ask for it; "
        "whoever tests writes it into this file.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _listens_twice(self) -> Self:
        if self.crosses_hosts and self.port and self.port == self.network.port:
            raise ValueError(
                f"network.port: {self.port} is the port of the worker's own HTTP face; KV "
                "transfers need another one, or 0 for any that is free"
            )
        return self

    @property
    def crosses_hosts(self) -> bool:
        """Whether KV is handed over through the network."""
        return self.transfer in ("tcp", "verbs")

    @property
    def transports(self) -> tuple[TransferName, ...]:
        """Every way it hands KV over, best first."""
        beside = self.host_memory and self.crosses_hosts
        return ("shm", self.transfer) if beside else (self.transfer,)


class Capabilities(ReportModel):
    """What an adapter advertises; plans are filtered by it."""

    roles: tuple[Role, ...]
    per_request_roles: bool
    fetch_source: bool
    layer_streaming: bool
    mid_decode_move: bool
    grammar: bool
    logprobs: bool
    transports: tuple[str, ...] = Field(
        (), description="Ways it hands KV over, best first. Empty: a worker that does not say."
    )


class WorkerInfo(ReportModel):
    """What a worker is: constant for one process (`GET /info`)."""

    name: str
    role: Role
    engine: str
    epoch: NonNegativeInt = Field(description="New for every process start.")
    revision: str = Field(description="Prefill and decode of different revisions are never paired.")
    node: str = Field(
        "", description="The machine it is on; the pool of that name is its own. Empty: any is."
    )
    model: str
    model_digest: str
    layout: str = Field(description="Digest of dtype, block size and KV geometry.")
    vocabulary_digest: str
    block_tokens: PositiveInt
    block_bytes: PositiveInt
    state_bytes: NonNegativeInt = Field(
        0, description="Of a state checkpoint, without which no prompt is gone on with; 0: none."
    )
    max_context_tokens: PositiveInt
    total_blocks: PositiveInt
    max_running: PositiveInt | None = Field(
        None, description="Sequences it runs at once; None: as many as there is space for."
    )
    capabilities: Capabilities


class LoadReport(ReportModel):
    """What a worker has to do right now (`GET /load`)."""

    epoch: NonNegativeInt
    seq: NonNegativeInt = Field(description="Rises with every report of one epoch.")
    waiting: NonNegativeInt
    running: NonNegativeInt
    queued_tokens: NonNegativeInt = Field(description="Prompt tokens admitted but not computed.")
    free_blocks: NonNegativeInt = Field(
        description="Blocks that could be taken, cached ones included, and that nobody waits for."
    )
    short_blocks: NonNegativeInt | None = Field(
        None,
        description="Blocks that those who wait lack beyond all that could be taken; then none is "
        "free. None: the engine does not tell.",
    )
    total_blocks: PositiveInt
    steps: NonNegativeInt
    last_request: dict[str, str] = Field({}, description="Newest request id seen, per router.")
    in_flight: dict[str, NonNegativeInt] = Field({}, description="Running and waiting, per router.")
    draining: bool = False
