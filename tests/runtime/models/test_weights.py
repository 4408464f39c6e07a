import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from kimi_runtime.errors import CapacityError, ConfigError
from kimi_runtime.models.tensors import k2_tensors
from kimi_runtime.models.weights import load_weights, open_weights, random_weights
from kimi_runtime.spec import published
from kimi_runtime.spec.model import KIMI_NANO
from kimi_runtime.spec.sizes import parameters
from kimi_runtime.spec.worker import FileWeights, RandomWeights
from tiny_k2 import tiny_spec

SPEC = tiny_spec()


def test_a_seed_gives_the_same_weights_everywhere():
    # a change here changes every key of every pool that holds nano's KV: bump nothing lightly
    assert random_weights(KIMI_NANO, 0).digest == "f90ab6537572001e0ffaaae6dad78dc4"


def test_seeds_and_dimensions_change_the_digest():
    digests = {
        random_weights(SPEC, 0).digest,
        random_weights(SPEC, 1).digest,
        random_weights(tiny_spec(norm_eps=2e-5), 0).digest,
    }
    assert len(digests) == 3


def test_a_tensor_does_not_depend_on_which_others_are_drawn():
    deeper = random_weights(tiny_spec(layers=3), 5).tensors
    for name, tensor in random_weights(SPEC, 5).tensors.items():
        assert torch.equal(tensor, deeper[name]), name


def test_the_inventory_has_as_many_parameters_as_the_spec_counts():
    count = sum(torch.Size(tensor.shape).numel() for tensor in k2_tensors(KIMI_NANO).values())
    assert count == parameters(KIMI_NANO).total


def test_random_weights_have_the_inventory_s_shapes_and_dtypes():
    tensors = random_weights(SPEC, 0).tensors
    assert {name: (tuple(t.shape), str(t.dtype)[6:]) for name, t in tensors.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in k2_tensors(SPEC).items()
    }


def write(folder, tensors, *, shards=1, prefix=""):
    names = sorted(tensors)
    index = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {prefix + name: tensors[name].contiguous() for name in names[shard::shards]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_gives_back_what_was_saved(tmp_path, shards, prefix):
    weights = random_weights(SPEC, 2)
    extra = {"model.layers.61.mtp.weight": torch.zeros(3)}
    write(tmp_path, {**weights.tensors, **extra}, shards=shards, prefix=prefix)
    loaded = load_weights(SPEC, tmp_path)
    assert loaded.digest == weights.digest
    assert all(torch.equal(loaded.tensors[name], weights.tensors[name]) for name in weights.tensors)


def test_a_bf16_bias_is_widened_when_read(tmp_path):
    tensors = dict(random_weights(SPEC, 2).tensors)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[name] = tensors[name].bfloat16()
    write(tmp_path, tensors)
    assert load_weights(SPEC, tmp_path).tensors[name].dtype == torch.float32


NORM = "model.norm.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
FAULTS = {
    "missing": (
        lambda t: t.pop(NORM),
        r"no tensor model\.norm\.weight \(a bfloat16 tensor of shape \(128,\)",
    ),
    "shape": (
        lambda t: t.update({NORM: t[NORM][:100]}),
        r"model\.norm\.weight in .* has shape \(100,\), but the model's config asks for \(128,\)",
    ),
    "dtype": (
        lambda t: t.update({NORM: t[NORM].float()}),
        r"model\.norm\.weight in .* is torch\.float32, but bfloat16 is expected",
    ),
    "quantised": (
        lambda t: t.update({EXPERT + "_packed": t.pop(EXPERT).to(torch.uint8)}),
        r"experts\.3\.up_proj\.weight .*weight_packed: the weights are stored otherwise",
    ),
}


@pytest.mark.parametrize(("change", "message"), FAULTS.values(), ids=FAULTS)
def test_a_wrong_tensor_is_named_with_what_was_expected(tmp_path, change, message):
    tensors = dict(random_weights(SPEC, 2).tensors)
    change(tensors)
    write(tmp_path, tensors)
    with pytest.raises(ConfigError, match=message):
        load_weights(SPEC, tmp_path)


def test_a_missing_shard_a_broken_file_and_an_empty_folder_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no \.safetensors file"):
        load_weights(SPEC, tmp_path)
    write(tmp_path, random_weights(SPEC, 2).tensors, shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.unlink()
    with pytest.raises(ConfigError, match=r"names model-00002-of-00002\.safetensors, which is not"):
        load_weights(SPEC, tmp_path)
    shard.write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        load_weights(SPEC, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="has no 'weight_map'"):
        load_weights(SPEC, tmp_path)


def test_the_worker_s_file_says_which_weights(tmp_path):
    spec, weights = open_weights(RandomWeights(seed=3))
    assert spec == KIMI_NANO
    assert weights.digest == random_weights(KIMI_NANO, 3).digest
    with pytest.raises(ConfigError, match=r"model folder .* is not there"):
        open_weights(FileWeights(path=tmp_path / "nowhere"))


def test_a_model_larger_than_the_machine_is_refused_before_anything_is_drawn():
    unquantised = published.K26.model_copy(update={"quantisation": None})
    with pytest.raises(CapacityError, match=r"random weights of kimi-k2.6 needs 19\d\d\.\d GiB"):
        random_weights(unquantised, 0)


def test_weights_are_values():
    with pytest.raises(dataclasses.FrozenInstanceError):
        random_weights(SPEC, 0).digest = "other"
