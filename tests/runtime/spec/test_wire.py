"""What crosses process boundaries survives it, and what does not belong there is refused."""

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from kimi_runtime.spec.base import ReportModel, SpecModel
from kimi_runtime.spec.hardware import CPU, MI355X, MI355X_NODE, NIC_400G
from kimi_runtime.spec.layout import KvLayout
from kimi_runtime.spec.parallel import Sharding
from kimi_runtime.spec.published import K3, K26, KIMI_LINEAR_48B, KIMI_NANO
from kimi_runtime.spec.request import (
    ErrorBody,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    Grammar,
    HandOff,
    HandOffBlock,
    KvPlan,
    KvUsage,
    Priority,
    RegionRef,
    Sampling,
    TokenLogprob,
)
from kimi_runtime.spec.router import LeastLoad, LongestPrefix, RouterSpec, WorkerEndpoint
from kimi_runtime.spec.umbp import (
    FeedBatch,
    FeedEvent,
    FeedHello,
    FeedLine,
    FeedSnapshotPage,
    UmbpSpec,
)
from kimi_runtime.spec.worker import (
    Capabilities,
    EngineLimits,
    FileWeights,
    LoadReport,
    RandomWeights,
    Role,
    WorkerInfo,
    WorkerSpec,
)

KEY = "00ff" * 8
HAND_OFF = HandOff(
    ticket="t-1",
    worker="prefill-0",
    release_url="http://127.0.0.1:1/release",
    layout="ab" * 16,
    region=RegionRef(
        transport="shm", peer="prefill-0", address="/x", key=1, size_bytes=4096, epoch=3
    ),
    tokens=65,
    blocks=(
        HandOffBlock(key=KEY, offset=0, size_bytes=64, tokens=64, tags=("aa", "bb")),
        HandOffBlock(key=None, offset=64, size_bytes=64, tokens=1, tags=("cc", "dd")),
    ),
    lease_s=30.0,
)
REQUEST = GenerateRequest(
    request_id="r-1",
    ids=(0, 5, 2**31 - 1),
    sampling=Sampling(
        temperature=0.0, max_tokens=7, logit_bias={5: -100.0, 7: 2.5}, stop_strings=("\n",), seed=3
    ),
    grammar=Grammar(kind="lark", text="start: 'x'", starts_after=(9,)),
    kv=KvPlan(keys=(KEY,), sources=("pool-0",), take=HAND_OFF),
    deadline_ms=1000,
    priority=Priority.BACKGROUND,
    tenant="acme",
    router="router-1",
)
WORKER = WorkerSpec(
    name="decode-0",
    role=Role.DECODE,
    port=0,
    weights=RandomWeights(seed=4),
    limits=EngineLimits(kv_bytes=256 * 2**20),
    run_dir=Path("run"),
    call_key=Path("run/call.key"),
)
INFO = WorkerInfo(
    name="decode-0",
    role=Role.DECODE,
    engine="kimistack",
    epoch=4,
    revision="r1",
    model="kimi-nano",
    model_digest="aa",
    layout="bb",
    vocabulary_digest="cc",
    block_tokens=64,
    block_bytes=1024,
    max_context_tokens=4096,
    total_blocks=8,
    capabilities=Capabilities(
        roles=(Role.DECODE,),
        per_request_roles=True,
        fetch_source=True,
        layer_streaming=False,
        mid_decode_move=False,
        grammar=True,
        logprobs=True,
    ),
)
VALUES: list[SpecModel] = [
    REQUEST,
    HAND_OFF,
    GenerateChunk(ids=(1, 2), logprobs=(TokenLogprob(id=1, logprob=-0.5, top=((1, -0.5),)),)),
    GenerateChunk(finish=FinishReason.STOP, usage=KvUsage(hbm_tokens=64, computed_tokens=1)),
    GenerateChunk(error=ErrorBody(status=429, type="x", message="m", retry_after_s=1.5)),
    WORKER,
    WORKER.model_copy(update={"weights": FileWeights(path=Path("model"))}),
    INFO,
    LoadReport(
        epoch=1,
        seq=2,
        waiting=0,
        running=1,
        queued_tokens=5,
        free_blocks=0,
        short_blocks=3,
        total_blocks=8,
        steps=9,
        last_request={"router-0": "r-1"},
        in_flight={"router-0": 1},
        draining=True,
    ),
    RouterSpec(
        port=8080,
        model_name="kimi-nano",
        workers=(WorkerEndpoint(name="w", role=Role.BOTH, url="http://127.0.0.1:1"),),
        policy=LeastLoad(),
        call_key=Path("call.key"),
    ),
    UmbpSpec(
        name="pool-0",
        port=0,
        socket=Path("s"),
        arena=Path("a"),
        dram_bytes=2**30,
        call_key=Path("k"),
    ),
    FeedHello(owner="w", epoch=1, seq=2, tier="hbm", block_tokens=64),
    FeedSnapshotPage(epoch=1, seq=2, page=0, last=True, keys=(KEY,)),
    FeedBatch(epoch=1, first_seq=3, events=(FeedEvent(op="add", key=KEY), FeedEvent(op="clear"))),
    KIMI_NANO,
    K26,
    K3,
    KIMI_LINEAR_48B,
    CPU,
    MI355X,
    NIC_400G,
    MI355X_NODE,
    KvLayout(dtype="bf16", block_tokens=64, layers=4, row_dim=576),
    Sharding(tensor=4, expert=8),
]


def named(value):
    return type(value).__name__


@pytest.mark.parametrize("value", VALUES, ids=named)
def test_a_value_survives_json(value):
    assert type(value).model_validate_json(value.model_dump_json()) == value


@pytest.mark.parametrize(
    "value", [value for value in VALUES if not isinstance(value, ReportModel)], ids=named
)
def test_an_unknown_key_is_refused_by_name(value):
    document = json.loads(value.model_dump_json()) | {"brandNew": 1}
    with pytest.raises(ValidationError, match="brandNew"):
        type(value).model_validate_json(json.dumps(document))


@pytest.mark.parametrize(
    "value", [value for value in VALUES if isinstance(value, ReportModel)], ids=named
)
def test_what_a_newer_process_adds_to_a_report_is_passed_over(value):
    document = json.loads(value.model_dump_json()) | {"brandNew": 1}
    assert type(value).model_validate_json(json.dumps(document)) == value


@pytest.mark.parametrize("value", VALUES, ids=named)
def test_a_value_cannot_be_changed(value):
    field = next(iter(type(value).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(value, field, None)


def test_an_unknown_key_deep_inside_is_named_with_its_place():
    document = json.loads(WORKER.model_dump_json())
    document["limits"]["kvBytes"] = "1GiB"
    with pytest.raises(ValidationError, match=r"limits\.kvBytes"):
        WorkerSpec.model_validate(document)


def test_sizes_and_durations_are_written_for_people():
    document = json.loads(WORKER.model_dump_json())
    assert document["limits"]["kv_bytes"] == "256MiB"
    assert document["hand_off_lease"] == "30s"
    assert json.loads(MI355X.model_dump_json())["memory_rate"] == "8TB/s"


@pytest.mark.parametrize(
    ("model", "change", "field"),
    [
        (REQUEST, {"ids": []}, "ids"),
        (REQUEST, {"ids": [-1]}, "ids"),
        (REQUEST, {"ids": [2**31]}, "ids"),
        (REQUEST, {"request_id": ""}, "request_id"),
        (REQUEST, {"deadline_ms": 0}, "deadline_ms"),
        (REQUEST, {"priority": "urgent"}, "priority"),
        (REQUEST, {"kv": {"keys": ["xyz"]}}, "keys"),
        (WORKER, {"port": 65536}, "port"),
        (WORKER, {"role": "leader"}, "role"),
        (WORKER, {"weights": {"kind": "wishes"}}, "weights"),
        (WORKER, {"limits": {"kv_bytes": "0"}}, "kv_bytes"),
        (WORKER, {"limits": {"kv_bytes": "lots"}}, "kv_bytes"),
        (WORKER, {"drain": "0s"}, "drain"),
        (VALUES[9], {"policy": {"kind": "dice"}}, "policy"),
    ],
)
def test_a_wrong_value_is_refused_by_field(model, change, field):
    document = json.loads(model.model_dump_json()) | change
    with pytest.raises(ValidationError, match=field):
        type(model).model_validate(document)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"presence_penalty": 3},
        {"repetition_penalty": 0},
        {"max_tokens": -1},
        {"logprobs": 21},
        {"logit_bias": {"5": 101}},
    ],
)
def test_sampling_outside_its_range_is_refused(change):
    field = next(iter(change))
    with pytest.raises(ValidationError, match=field):
        Sampling.model_validate({"max_tokens": 1} | change)


def test_the_policy_is_longest_prefix_unless_told():
    spec = RouterSpec(port=1, model_name="m", workers=(), call_key=Path("k"))
    assert spec.policy == LongestPrefix()


@pytest.mark.parametrize("event", [{"op": "add"}, {"op": "remove"}, {"op": "clear", "key": KEY}])
def test_a_feed_event_has_a_key_unless_it_clears(event):
    with pytest.raises(ValidationError, match="key"):
        FeedEvent.model_validate(event)


def test_a_feed_line_is_told_by_its_kind():
    lines = TypeAdapter(FeedLine)
    assert lines.validate_json('{"kind":"batch","epoch":1,"first_seq":1,"events":[]}') == FeedBatch(
        epoch=1, first_seq=1, events=()
    )
    with pytest.raises(ValidationError, match="kind"):
        lines.validate_json('{"kind":"gossip"}')
