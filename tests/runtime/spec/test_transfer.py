"""What a worker's file may say of its network."""

import pytest
from pydantic import ValidationError

from kimi_runtime.settings import read_settings
from kimi_runtime.spec.transfer import RdmaCard, TransferChaos, TransferNetwork
from kimi_runtime.spec.worker import EngineLimits, RandomWeights, Role, WorkerSpec


def worker(**fields: object) -> WorkerSpec:
    data = {
        "name": "decode",
        "role": Role.DECODE,
        "port": 8000,
        "weights": RandomWeights(),
        "limits": EngineLimits(kv_bytes=2**20),
        "run_dir": "/run/k",
        "call_key": "/k",
    }
    return WorkerSpec.model_validate(data | fields)


@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::7", "fe80::1%eth0", "node-1", "a.b.svc."])
def test_addresses_and_names_are_dialled(host: str):
    assert TransferNetwork(advertised=host).advertised == host


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("0.0.0.0", "stands for every address"),
        ("::", "stands for every address"),
        ("10.0.0.7:8200", "without port, scheme and brackets"),
        ("[fd00::7]", "without port, scheme and brackets"),
        ("http://node-1", "without port, scheme and brackets"),
        ("", "without port, scheme and brackets"),
        ("$(POD_IP)", "without port, scheme and brackets"),
    ],
)
def test_what_nobody_can_dial_is_refused(host: str, says: str):
    with pytest.raises(ValidationError, match=says):
        TransferNetwork(advertised=host)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 0),
        ("gid_index", 256),
        ("traffic_class", 256),
        ("service_level", 16),
        ("pkey_index", -1),
        ("queue_pairs", 0),
        ("send_depth", 0),
    ],
)
def test_what_no_card_has_is_refused(field: str, value: int):
    with pytest.raises(ValidationError, match=field):
        RdmaCard.model_validate({field: value})


def test_two_listeners_of_a_worker_do_not_share_a_port():
    network = TransferNetwork(port=8000)
    with pytest.raises(ValidationError, match="KV transfers need another one"):
        worker(transfer="tcp", network=network)
    assert worker(transfer="shm", network=network).transports == ("shm",)
    assert worker(port=0, transfer="tcp").network.port == 0


def test_chances_of_faults_that_exclude_each_other_are_at_most_one():
    assert worker(chaos={"corrupt": 0.5, "drop": 0.5}).chaos == TransferChaos(corrupt=0.5, drop=0.5)
    with pytest.raises(ValidationError, match=r"add up to 1.5; at most 1"):
        worker(chaos={"corrupt": 0.75, "drop": 0.75})
    assert worker().chaos is None


def test_memory_of_the_host_is_tried_before_the_network():
    assert worker(transfer="verbs", host_memory=True).transports == ("shm", "verbs")
    assert worker(transfer="verbs").transports == ("verbs",)
    assert worker(transfer="shm", host_memory=True).transports == ("shm",)


def test_pods_of_one_file_differ_by_where_they_hand_over():
    card = RdmaCard(gid_index=3)
    one = worker(transfer="verbs", network=TransferNetwork(port=8200, rdma=card))
    variables = {
        "KIMISTACK_TRANSFER_ADDRESS": "10.0.0.7",
        "KIMISTACK_TRANSFER_PORT": "21649",
    }
    network = read_settings(variables).onto(one).network
    assert (network.advertised, network.port, network.rdma) == ("10.0.0.7", 21649, card)
    with pytest.raises(ValidationError, match="advertised"):
        read_settings(variables | {"KIMISTACK_TRANSFER_ADDRESS": "0.0.0.0"}).onto(one)
    with pytest.raises(ValidationError, match=r"network\.port"):
        read_settings({"KIMISTACK_TRANSFER_PORT": "verbs"}).onto(one)
