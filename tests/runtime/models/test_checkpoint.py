"""Folders of safetensors: faults of files and headers, and what of them is in memory."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kimi_runtime.errors import ConfigError
from kimi_runtime.models.checkpoint import Checkpoint
from kimi_runtime.models.weights import load_weights, random_weights
from tiny_k2 import tiny_spec

SPEC = tiny_spec()
NORM = "model.norm.weight"


def raw_file(path, header, data=bytes(64)):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(shape=(4, 4), dtype="F32", offsets=(0, 64)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


LIES = {
    "beyond the file": {"a": entry((4, 8), offsets=(0, 128))},
    "less than the shape": {"a": entry((4, 8))},
    "overlapping": {"a": entry(), "b": entry((4, 2), offsets=(32, 64))},
    "a hole": {"a": entry((2, 4), offsets=(0, 32)), "b": entry((1, 4), offsets=(48, 64))},
    "backwards": {"a": entry(offsets=(64, 0))},
    "negative": {"a": entry(offsets=(-64, 0))},
    "bytes of nobody": {"a": entry((2, 4), offsets=(0, 32))},
    "an unknown dtype": {"a": entry(dtype="F3")},
    "no offsets": {"a": {"dtype": "F32", "shape": [4, 4]}},
}


@pytest.mark.parametrize("header", LIES.values(), ids=LIES)
def test_a_header_that_lies_is_refused_by_the_file_s_name(tmp_path, header):
    path = tmp_path / "m.safetensors"
    raw_file(path, header)
    with pytest.raises(ConfigError, match=rf"{path} cannot be read as safetensors: .+; fetch the"):
        Checkpoint(tmp_path)


def test_an_honest_header_is_read(tmp_path):
    raw_file(
        tmp_path / "m.safetensors",
        {"a": entry((2, 4), offsets=(0, 32)), "b": entry((2, 4), offsets=(32, 64))},
    )
    found = Checkpoint(tmp_path)
    assert sorted(found) == ["a", "b"]
    assert found.shape("b") == (2, 4)
    assert torch.equal(found.tensor("b"), torch.zeros(2, 4))


@pytest.mark.parametrize("length", [0, 7, 8, 20])
def test_a_file_cut_in_its_header_is_named(tmp_path, length):
    path = tmp_path / "m.safetensors"
    raw_file(path, {"a": entry()})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ConfigError, match=rf"{path} cannot be read as safetensors"):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_refused_with_both(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(3)}, tmp_path / "two.safetensors")
    with pytest.raises(ConfigError, match=r"a is in one\.safetensors and in two\.safetensors"):
        Checkpoint(tmp_path)


def test_a_file_that_the_index_does_not_name_is_not_read(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"a": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(Checkpoint(tmp_path).tensor("a"), torch.ones(3))


def test_a_tensor_that_the_index_places_wrongly_is_missed_by_name(tmp_path):
    tensors = dict(random_weights(SPEC, 2).tensors)
    del tensors[NORM]
    save_file(tensors, tmp_path / "one.safetensors")
    index = {"weight_map": dict.fromkeys((*tensors, NORM), "one.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=rf"no tensor {re.escape(NORM)}"):
        load_weights(SPEC, tmp_path)


def resident_bytes(path: Path) -> int:
    """Bytes of the file that this process's mappings hold in memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_loading_holds_nothing_of_a_file_and_use_only_what_is_used(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file(dict(random_weights(SPEC, 2).tensors), path)
    size = path.stat().st_size
    weights = load_weights(SPEC, tmp_path)
    assert resident_bytes(path) == 0
    embedding = weights.tensors["model.embed_tokens.weight"]
    assert float(embedding.float().abs().sum()) > 0
    # a fault maps the pages around it too
    assert 0 < resident_bytes(path) < size / 2


def test_plain_tensors_are_the_mapped_file_itself(tmp_path):
    save_file(dict(random_weights(SPEC, 2).tensors), tmp_path / "m.safetensors")
    tensors = load_weights(SPEC, tmp_path).tensors
    first, again = tensors["lm_head.weight"], tensors["lm_head.weight"]
    assert first.data_ptr() == again.data_ptr()


def test_a_file_replaced_after_it_was_checked_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file(dict(random_weights(SPEC, 2).tensors), path)
    weights = load_weights(SPEC, tmp_path)
    path.unlink()
    save_file(dict(random_weights(SPEC, 3).tensors), path)
    with pytest.raises(ConfigError, match="was replaced while it was being loaded"):
        weights.tensors[NORM]
