"""What processes take from their environment."""

import pytest
from pydantic import ValidationError

from kimi_runtime.settings import Settings, read_settings
from kimi_runtime.spec.worker import EngineLimits, RandomWeights, Role, WorkerSpec

SPEC = WorkerSpec.model_validate(
    {
        "name": "decode",
        "role": Role.DECODE,
        "port": 8000,
        "weights": RandomWeights(),
        "limits": EngineLimits(kv_bytes=2**20),
        "run_dir": "/run/k",
        "call_key": "/k",
    }
)


def test_pods_of_one_file_differ_by_name_address_port_and_revision():
    variables = {
        "KIMISTACK_NAME": "kimi-d-abc123-0-0",
        "KIMISTACK_HOST": "10.0.0.7",
        "KIMISTACK_PORT": "21648",
        "KIMISTACK_REVISION": "abc123",
    }
    spec = read_settings(variables).onto(SPEC)
    assert (spec.name, spec.host, spec.port, spec.revision) == (
        "kimi-d-abc123-0-0",
        "10.0.0.7",
        21648,
        "abc123",
    )


def test_an_empty_environment_changes_nothing():
    assert read_settings({}) == Settings()
    assert read_settings({"KIMISTACK_PORT": ""}).onto(SPEC) is SPEC


def test_a_port_that_is_none_is_refused():
    with pytest.raises(ValidationError):
        read_settings({"KIMISTACK_PORT": "http"}).onto(SPEC)
