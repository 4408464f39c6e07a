"""A list of workers and pools is taken as it changes; what is none changes nothing and is said."""

import pytest

from kimi_runtime.spec.fleet_file import FleetFile
from kimi_runtime.spec.router import FleetSpec, PoolEndpoint

ONE = FleetSpec(pools=(PoolEndpoint(name="a", url="http://a:1"),))


@pytest.fixture
def said():
    return []


@pytest.fixture
def file(tmp_path, said):
    return FleetFile(tmp_path / "fleet.json", "the list", said.append)


def test_a_list_is_told_once_for_every_change(file, tmp_path, said):
    for spec in (ONE, FleetSpec()):
        (tmp_path / "fleet.json").write_text(spec.model_dump_json())
        assert file.changed() == spec
        assert file.changed() is None
    assert said == []


def test_a_file_that_is_missing_is_said_once_until_it_is_there(file, tmp_path, said):
    assert (file.changed(), file.changed()) == (None, None)
    (tmp_path / "fleet.json").write_text(ONE.model_dump_json())
    assert file.changed() == ONE
    (tmp_path / "fleet.json").unlink()
    assert file.changed() is None
    assert (
        said
        == [f"the list {tmp_path / 'fleet.json'} cannot be read: No such file or directory"] * 2
    )


def test_what_is_no_list_is_said_with_its_place_and_changes_nothing(file, tmp_path, said):
    (tmp_path / "fleet.json").write_text('{"pools": [{"name": "a"}]}')
    assert (file.changed(), file.changed()) == (None, None)
    (why,) = said
    assert "is no FleetSpec: pools.0.url: Field required" in why
    (tmp_path / "fleet.json").write_text(ONE.model_dump_json())
    assert file.changed() == ONE
