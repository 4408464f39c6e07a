"""A deployment as processes of one machine."""

from pathlib import Path
from typing import Any

import pytest

from kimi_operator.api.load import validated
from kimi_operator.desired.effective import Effective, resolve
from kimi_operator.desired.policy import policy_of
from kimi_operator.desired.processes import (
    LocalPlan,
    Machine,
    Places,
    plan_processes,
    process_names,
)
from kimi_operator.presets.preset import load_preset
from kimi_runtime.errors import CapacityError, ConfigError
from kimi_runtime.spec.router import Cost, ExplainSpec, LeastLoad, RecordSpec, RouterSpec
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.spec.worker import FileWeights, PackagedWeights, RandomWeights, Role, WorkerSpec
from rule_cases import document

NANO = {"preset": "kimi-nano/cpu"}
LARGE = Machine(memory_bytes=2**36, shm_bytes=2**35, shm_path="/dev/shm")
RUN = Path("/dev/shm/k")


def effective(spec: dict[str, Any]) -> Effective:
    return resolve(validated(document(spec, "k"), "k.yaml"), load_preset, "k.yaml")


def planned(spec: dict[str, Any], machine: Machine = LARGE, **places: Any) -> LocalPlan:
    resolved = effective(spec)
    names = process_names(resolved.deployment.spec, places.get("nodes", 1))
    ports = {name: 9000 + index for index, name in enumerate(names)}
    here = Places(run_dir=RUN, call_key=Path("/s/call-key"), ports=ports, **places)
    return plan_processes(resolved, here, machine)


def workers(plan: LocalPlan) -> list[WorkerSpec]:
    return [process.spec for process in plan.processes if isinstance(process.spec, WorkerSpec)]


def router(plan: LocalPlan) -> RouterSpec:
    assert isinstance(plan.router.spec, RouterSpec)
    return plan.router.spec


def test_processes_are_named_and_in_starting_order():
    plan = planned({**NANO, "prefill": {"replicas": 2}, "decode": {"replicas": 1}})
    names = [process.name for process in plan.processes]
    assert names == ["umbp-0", "prefill-0", "prefill-1", "decode-0", "router-0"]


def test_the_router_knows_every_worker_and_the_pool_by_their_ports():
    plan = planned(NANO)
    found = {worker.name: (worker.role, worker.url) for worker in router(plan).workers}
    assert found == {
        "prefill-0": (Role.PREFILL, "http://127.0.0.1:9001"),
        "decode-0": (Role.DECODE, "http://127.0.0.1:9002"),
    }
    assert [pool.url for pool in router(plan).pools] == ["http://127.0.0.1:9000"]


def test_all_processes_share_one_key_and_one_folder():
    plan = planned(NANO)
    assert {process.spec.call_key for process in plan.processes} == {Path("/s/call-key")}
    assert {worker.run_dir for worker in workers(plan)} == {RUN}
    (pool,) = (p.spec for p in plan.processes if isinstance(p.spec, UmbpSpec))
    assert {worker.umbp_socket for worker in workers(plan)} == {pool.socket}


def test_decode_alone_is_a_worker_for_both():
    (worker,) = workers(planned({**NANO, "decode": {}}))
    assert (worker.name, worker.role) == ("decode-0", Role.BOTH)


def test_without_pool_there_is_no_daemon_and_no_socket():
    plan = planned({**NANO, "kvPool": {"enabled": False}})
    assert "umbp-0" not in [process.name for process in plan.processes]
    assert {worker.umbp_socket for worker in workers(plan)} == {None}
    assert router(plan).pools == ()


def test_an_ssd_tier_is_a_log_in_the_folder_that_is_given():
    ssd = {"path": "/nvme/kimi", "capacity": "1GiB", "writeRate": "200MB/s"}
    plan = planned({**NANO, "kvPool": {"ssd": ssd}})
    (pool,) = (p.spec for p in plan.processes if isinstance(p.spec, UmbpSpec))
    assert pool.ssd is not None
    assert (pool.ssd.folder, pool.ssd.capacity) == (Path("/nvme/kimi"), 2**30)
    assert (pool.ssd.segments, pool.ssd_write_rate) == (16, 200e6)
    assert UmbpSpec.model_validate_json(pool.model_dump_json()) == pool


def test_only_the_pools_roles_use_it():
    plan = planned({**NANO, "kvPool": {"roles": ["decode"]}})
    uses = {worker.name: worker.umbp_socket is not None for worker in workers(plan)}
    assert uses == {"prefill-0": False, "decode-0": True}


def test_fields_reach_the_files_they_are_for():
    limits = {"kvMemory": "64MiB", "maxRunning": 3, "stepTokens": 128, "threads": 2}
    spec = {
        **NANO,
        "limits": {"blockTokens": 32, "maxContextTokens": 4096},
        "decode": {"limits": limits, "drain": {"timeout": "7s"}},
        "router": {"policy": "least_load", "requestTimeout": "1m", "thinking": False},
        "kvPool": {"dram": "32MiB"},
    }
    plan = planned(spec, host="0.0.0.0", api_keys=Path("/keys"))
    (worker,) = workers(plan)
    assert (worker.limits.kv_bytes, worker.limits.max_running) == (64 * 2**20, 3)
    assert (worker.limits.block_tokens, worker.limits.max_context_tokens) == (32, 4096)
    assert (worker.threads, worker.drain) == (2, 7.0)
    found = router(plan)
    assert (found.policy, found.request_deadline, found.thinking) == (LeastLoad(), 60.0, False)
    assert (found.host, found.api_keys, found.family) == ("0.0.0.0", Path("/keys"), "k2")


def test_a_policy_with_reasons_starts_from_the_models_speeds_and_writes_them_down():
    log = Path("/s/explain.jsonl")
    found = router(planned({**NANO, "router": {"policy": "cost"}}, explain=log))
    assert found.policy == Cost(model="kimi-nano", gpu="cpu", tensor=1)
    assert found.explain == ExplainSpec(path=log)
    assert router(planned(NANO, explain=log)).explain is None
    for asked, expected in (("8MiB", ExplainSpec(path=log, max_bytes=8 * 2**20)), ("0B", None)):
        spec = {"router": {"policy": "cost", "explain": {"maxBytes": asked}}}
        assert router(planned({**NANO, **spec}, explain=log)).explain == expected
    assert router(planned(NANO, record=log)).record == RecordSpec(path=log)
    for asked, enabled in (("Enabled", True), ("Disabled", False)):
        spec = {"router": {"sessionAdmission": asked}}
        assert router(planned({**NANO, **spec})).sessions.enabled is enabled
    spec = {"router": {"policy": "cost"}, "rdma": {"allowTCP": True}}
    large = effective({"preset": "kimi-k2.6-mxfp4/mi355x", **spec})
    assert policy_of(large) == Cost(model="kimi-k2.6", gpu="MI355X", tensor=4)


def test_weights_are_drawn_or_read():
    assert workers(planned(NANO))[0].weights == PackagedWeights(name="kimi-nano")
    drawn = {**NANO, "model": {"source": "random", "seed": 3}}
    assert workers(planned(drawn))[0].weights == RandomWeights(seed=3)
    local = {**NANO, "model": {"source": "local", "path": "/m"}}
    assert workers(planned(local))[0].weights == FileWeights(path=Path("/m"))


def test_a_k3_model_is_spoken_to_in_k3():
    spec = {
        "model": {"source": "local", "path": "/m", "id": "moonshotai/Kimi-K3"},
        "limits": {},
        "decode": {"limits": {"kvMemory": "1GiB"}},
        "kvPool": {"enabled": False},
    }
    huge = Machine(memory_bytes=2**44, shm_bytes=2**44, shm_path="/dev/shm")
    assert router(planned(spec, huge)).family == "k3"


def test_files_survive_their_own_json():
    for process in planned(NANO).processes:
        assert (
            type(process.spec).model_validate_json(process.spec.model_dump_json()) == process.spec
        )


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"engine": "vllm", "image": "i"}, "spec.engine: vllm is not started here"),
        ({"model": {"source": "hf", "id": "a/b"}, "image": "i"}, "spec.model.source: hf needs a"),
        ({"kvPool": {"ssd": {"path": "/s", "capacity": "1MiB"}}}, "spec.kvPool.ssd.capacity: an"),
        ({"router": {"apiKeysSecretRef": {"name": "a", "key": "b"}}}, "with --api-key-file"),
        ({"decode": {"replicas": 0}}, "spec.decode.replicas: at least 1"),
        (
            {
                "preset": None,
                "model": {"source": "random"},
                "decode": {"parallelism": {"tp": 2}},
                "kvPool": {"enabled": False},
            },
            "spec.decode.parallelism: a worker started here is one process, this takes 2",
        ),
    ],
)
def test_what_one_machine_cannot_do_is_named(spec: dict[str, Any], says: str):
    base: dict[str, Any] = NANO
    if "engine" in spec:
        base = {"model": {"source": "local", "path": "/m"}}
    with pytest.raises(ConfigError) as refused:
        planned({**base, **spec})
    assert says in str(refused.value)


def test_memory_that_is_not_there_is_told_in_numbers():
    small = Machine(memory_bytes=2**30, shm_bytes=2**35, shm_path="/dev/shm")
    with pytest.raises(CapacityError, match=r"needs 1\.\d\d GiB \(.*\) *, but .* has 1\.00 GiB"):
        planned(NANO, small)


def test_shared_memory_that_is_not_there_names_where():
    small = Machine(memory_bytes=2**35, shm_bytes=2**28, shm_path="/dev/shm")
    shared = {**NANO, "transfer": {"backend": "shm"}}
    with pytest.raises(CapacityError, match=r"but /dev/shm has 0\.25 GiB free; lower kvPool"):
        planned(shared, small)
    assert {worker.transfer for worker in workers(planned(shared))} == {"shm"}
    assert {worker.transfer for worker in workers(planned(NANO, small))} == {"tcp"}
    with pytest.raises(CapacityError, match="free; lower kvPool"):
        planned({**NANO, "transfer": {"hostMemory": True}}, small)


def test_workers_hand_over_as_the_spec_says_each_at_a_port_that_is_free():
    rdma = {"mode": "hostNetwork", "devices": ["rxe0"], "gidIndex": 1, "queuePairs": 2}
    spec = {
        **NANO,
        "transfer": {"backend": "verbs"},
        "rdma": rdma,
        "security": {"profile": "RDMA"},
    }
    for worker in workers(planned(spec)):
        assert (worker.transfer, worker.network.port) == ("verbs", 0)
        card = worker.network.rdma
        assert (card.devices, card.gid_index, card.queue_pairs) == (("rxe0",), 1, 2)
    assert workers(planned({**NANO, "decode": {}}))[0].transfer == "loopback"


def test_a_model_of_595_gb_is_refused_before_anything_starts():
    spec = {
        "model": {"source": "local", "path": "/m", "id": "moonshotai/Kimi-K2.6"},
        "decode": {"limits": {"kvMemory": "1GiB"}},
        "kvPool": {"dram": "1GiB"},
    }
    with pytest.raises(CapacityError, match="of weights"):
        planned(spec)


def test_with_several_nodes_each_has_a_pool_and_its_part_of_every_role():
    spec: dict[str, Any] = {**NANO, "prefill": {"replicas": 2}, "decode": {"replicas": 3}}
    spec |= {"kvPool": {"dram": "64MiB", "ssd": {"path": "/ssd", "capacity": "256MiB"}}}
    plan = planned(spec, nodes=2)
    pools = {p.name: p.spec for p in plan.processes if isinstance(p.spec, UmbpSpec)}
    assert list(pools) == ["umbp-0", "umbp-1"]
    for pool in pools.values():
        assert {(one.name, one.url.rsplit(":", 1)[0]) for one in pool.peers} == {
            ("umbp-0", "http://127.0.0.1"),
            ("umbp-1", "http://127.0.0.1"),
        }
        assert pool.ssd is not None
        assert pool.ssd.folder == Path("/ssd") / pool.name
    seats = {one.name: (one.node, (one.umbp_socket or RUN).name) for one in workers(plan)}
    assert seats == {
        "prefill-0": ("umbp-0", "umbp-0.sock"),
        "prefill-1": ("umbp-1", "umbp-1.sock"),
        "decode-0": ("umbp-0", "umbp-0.sock"),
        "decode-1": ("umbp-1", "umbp-1.sock"),
        "decode-2": ("umbp-0", "umbp-0.sock"),
    }
    assert {pool.name for pool in router(plan).pools} == set(pools)


def test_pools_that_are_no_peers_know_of_nobody():
    spec = {**NANO, "kvPool": {"dram": "64MiB", "peers": "Disabled"}}
    plan = planned(spec, nodes=2)
    assert not any(p.spec.has_peers for p in plan.processes if isinstance(p.spec, UmbpSpec))
