"""The router's file."""

from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt
from pydantic import Field, NonNegativeInt, PositiveInt

from kimi_runtime.spec.base import SpecModel
from kimi_runtime.spec.worker import Role
from kimi_runtime.units import Bytes, Seconds


class WorkerEndpoint(SpecModel):
    """Where a worker listens."""

    name: str
    role: Role
    url: str


class PoolEndpoint(SpecModel):
    """Where a pool daemon serves its feed."""

    name: str
    url: str


class LeastLoad(SpecModel):
    """The worker with the least work in its queue."""

    kind: Literal["least_load"] = "least_load"


class LongestPrefix(SpecModel):
    """The longest cached prefix, unless its holder is busier than the gain is worth."""

    kind: Literal["longest_prefix"] = "longest_prefix"
    queued_token_weight: Annotated[float, Ge(0)] = Field(
        1.0, description="Tokens of prefill that one queued token costs."
    )
    running_token_weight: Annotated[float, Ge(0)] = Field(
        64.0, description="Tokens of prefill that one running request costs."
    )


class Cost(SpecModel):
    """Who can serve it fastest: every plan's cost in seconds, to this request and to others.

    `model`, `gpu` and `tensor` name the speeds to start from; what is measured replaces them.
    Weights are exchange rates between seconds of different people or kinds, not units.
    """

    kind: Literal["cost"] = "cost"
    model: str = "kimi-nano"
    gpu: str = "cpu"
    tensor: PositiveInt = 1
    stream_weight: Annotated[float, Ge(0)] = Field(
        0.2, description="What a second of streaming costs next to one before the first token."
    )
    others_weight: Annotated[float, Ge(0)] = Field(
        1.0, description="What a second of somebody else costs next to one of this request."
    )
    interactive_quantile: Annotated[float, Field(ge=0.5, lt=1)] = Field(
        0.8, description="Plans are compared by this quantile of their cost; 0.5 ignores risk."
    )
    background_quantile: Annotated[float, Field(ge=0.5, lt=1)] = 0.5
    tie: Annotated[Seconds, Gt(0)] = Field(
        0.002, description="Costs closer than this, or than `tie_share`, are equal."
    )
    tie_share: Annotated[float, Gt(0)] = 0.03
    move_share: Annotated[float, Ge(0)] = Field(
        0.1, description="A session leaves its owner only for this share of the copy's time more."
    )
    move_again: Seconds = Field(
        30.0, description="For this long after a move, moving again costs up to 2 s more."
    )
    replication_horizon: Seconds = Field(
        60.0, description="How far ahead a copy of a shared prefix is expected to pay."
    )
    first_token_target: Annotated[Seconds, Gt(0)] | None = Field(
        None,
        description="A session start that would wait longer is held back as long as the router's "
        "`retry_window` lets it, or refused with a computed Retry-After; none: nobody is.",
    )


class RoundRobin(SpecModel):
    """Each in turn. A baseline."""

    kind: Literal["round_robin"] = "round_robin"


class PowerOfTwo(SpecModel):
    """The less loaded of two drawn at random. A baseline."""

    kind: Literal["power_of_two"] = "power_of_two"


class CacheAware(SpecModel):
    """SGLang's router: the best match, unless the load is out of balance. A baseline."""

    kind: Literal["cache_aware"] = "cache_aware"
    match_threshold: Annotated[float, Field(ge=0, le=1)] = 0.3
    imbalance_requests: NonNegativeInt = 64
    imbalance_ratio: Annotated[float, Ge(1)] = 1.5


class DynamoCost(SpecModel):
    """Dynamo's linear cost in blocks. A baseline; the defaults are Dynamo's."""

    kind: Literal["dynamo"] = "dynamo"
    overlap_credit: Annotated[float, Ge(0)] = 1.0
    host_credit: Annotated[float, Ge(0)] = 0.75
    prefill_load_scale: Annotated[float, Ge(0)] = 1.0
    active_request_weight: Annotated[float, Ge(0)] = 0.0


class LlmdFilter(SpecModel):
    """llm-d: holders unless they are far slower, then token load. A baseline."""

    kind: Literal["llm_d"] = "llm_d"
    match_threshold: Annotated[float, Field(ge=0, le=1)] = 0.8
    excess: Annotated[Seconds, Gt(0)] = 18.0
    tokens_per_s: Annotated[float, Gt(0)] = 15_928.0
    token_limit: PositiveInt = 4 * 2**20


class InferaCost(SpecModel):
    """Infera's cost in blocks with a decaying memory of its own picks. A baseline."""

    kind: Literal["infera"] = "infera"
    prefill_weight: Annotated[float, Ge(0)] = 20.0
    decode_weight: Annotated[float, Ge(0)] = 2.0
    decay: Annotated[float, Field(gt=0, le=1)] = 0.97


Baseline = RoundRobin | PowerOfTwo | CacheAware | DynamoCost | LlmdFilter | InferaCost
PolicySpec = Annotated[LeastLoad | LongestPrefix | Cost | Baseline, Field(discriminator="kind")]
POLICY_KINDS = (
    *("longest_prefix", "least_load", "cost"),
    *("round_robin", "power_of_two", "cache_aware", "dynamo", "llm_d", "infera"),
)
"""Their names."""


class FleetSpec(SpecModel):
    """Who there is to route to. In a cluster it is a file of its own, which changes."""

    workers: tuple[WorkerEndpoint, ...] = ()
    pools: tuple[PoolEndpoint, ...] = ()
    wake: Annotated[Seconds, Gt(0)] | None = Field(
        None,
        description="While no worker runs, a request waits so long for one to be started, which "
        "somebody does who reads the router's signals. None: nobody does.",
    )


EXPLAIN_FILE = "explain.jsonl"
"""Where a router explains itself: in its deployment's state folder, or in one of its pod."""


class ExplainSpec(SpecModel):
    """A file to which every decision is written with its reasons, one JSON text a line."""

    path: Path
    max_bytes: Annotated[Bytes, Gt(0)] = Field(
        64 * 2**20, description="Of it and the one before it, PATH.1, together."
    )


RECORD_FILE = "sessions.jsonl"
"""Where the router of `kimistack up` records sessions: in its deployment's state folder."""


class RecordSpec(SpecModel):
    """A file to which every session is written once it is over, for `kimistack sim run`."""

    path: Path
    max_bytes: Annotated[Bytes, Gt(0)] = Field(
        64 * 2**20, description="Of it and the one before it, PATH.1, together."
    )


class SessionAdmission(SpecModel):
    """Sessions are let in as far as KV memory reaches, so that none evicts what another needs."""

    enabled: bool | None = Field(
        None, description="None: with the `cost` policy, and only while there is no pool."
    )
    oversubscribe: Annotated[float, Gt(0)] = Field(
        1.0, description="Tokens of sessions let in, over tokens that workers have memory for."
    )
    hold: Annotated[Seconds, Ge(0)] = Field(
        30.0,
        description="While its tool runs a session's memory is not given to a new one for so long "
        "at most; for less if the tool is nearly always back sooner.",
    )
    max_wait: Annotated[Seconds, Ge(0)] = Field(
        60.0, description="A session start that waited so long is refused, with a Retry-After."
    )
    max_waiting: PositiveInt = Field(128, description="Requests that wait; more starts get 429.")


class RouterSpec(SpecModel):
    """The file a router process starts from."""

    name: str = "router-0"
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)]
    model_name: str
    family: Literal["k2", "k3"] = "k2"
    thinking: bool = Field(True, description="Whether a request without the field thinks.")
    vocabulary: Path | None = None
    workers: tuple[WorkerEndpoint, ...]
    pools: tuple[PoolEndpoint, ...] = ()
    pools_ca: Path | None = Field(
        None,
        description="PEM: who signs the certificates of pools whose url begins with https; none: "
        "whom the system trusts. It is read again when it changes.",
    )
    pools_name: str | None = Field(
        None,
        description="What these certificates are made out to; none: to the host that is called.",
    )
    fleet: Path | None = Field(
        None, description="A FleetSpec file: its workers and pools beside these, as it changes."
    )
    policy: PolicySpec = LongestPrefix()
    explain: ExplainSpec | None = Field(None, description="None: decisions are only logged.")
    record: RecordSpec | None = Field(None, description="None: sessions are not recorded.")
    sessions: SessionAdmission = SessionAdmission()
    call_key: Path
    api_keys: Path | None = Field(None, description="One API key a line; None: no key is asked.")
    max_body: Annotated[Bytes, Gt(0)] = 32 * 2**20
    max_in_flight: PositiveInt = 256
    default_max_tokens: PositiveInt = 4096
    request_deadline: Annotated[Seconds, Gt(0)] = 600.0
    load_interval: Annotated[Seconds, Gt(0)] = 0.2
    send_stall: Annotated[Seconds, Gt(0)] = Field(
        30.0, description="A client that reads nothing for this long is dropped."
    )
    retries: NonNegativeInt = Field(2, description="Before the first token only.")
    retry_window: Annotated[Seconds, Ge(0)] = Field(
        10.0, description="A request that nobody can take while workers change waits this long."
    )
    drain: Annotated[Seconds, Gt(0)] = Field(
        30.0, description="After SIGTERM, requests may run on for this long."
    )
    linger: Annotated[Seconds, Ge(0)] = Field(
        0.0, description="Of that, how long requests on open connections are still taken."
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
