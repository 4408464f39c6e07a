"""Checkpoints with quantised weights: what they hold, and what is said when they do not."""

import json

import pytest
import torch
from safetensors.torch import save_file

from kimi_runtime.errors import ConfigError
from kimi_runtime.kernels.mxfp4 import dequantise_mxfp4, quantise_mxfp4_ref
from kimi_runtime.models.weights import load_weights, random_weights
from kimi_runtime.spec.published import FP8_BLOCKS, MXFP4_EXPERTS
from tiny_k2 import tiny_spec

PLAIN = random_weights(tiny_spec(), 2).tensors
MXFP4 = tiny_spec(quantisation=MXFP4_EXPERTS)
FP8 = tiny_spec(quantisation=FP8_BLOCKS)
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
DENSE = "model.layers.0.mlp.down_proj.weight"  # [128, 512]


def as_mxfp4():
    stored = {}
    for name, tensor in PLAIN.items():
        if ".mlp.experts." in name:
            codes, scales = quantise_mxfp4_ref(tensor)
            stored |= {f"{name}_packed": codes, f"{name}_scale": scales}
        else:
            stored[name] = tensor
    return stored


def is_blocked(name):
    kept = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "bias")
    return not any(part in name for part in kept)


def as_fp8():
    stored = {}
    for name, tensor in PLAIN.items():
        if not is_blocked(name):
            stored[name] = tensor
            continue
        rows, columns = tensor.shape
        scale = torch.full((-(-rows // 128), -(-columns // 128)), tensor.float().abs().max() / 448)
        stored[name] = (tensor.float() / scale[0, 0]).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
    return stored


def load(spec, folder, stored):
    save_file({name: t.contiguous() for name, t in stored.items()}, folder / "m.safetensors")
    return load_weights(spec, folder)


def test_mxfp4_experts_become_the_values_they_stand_for(tmp_path):
    loaded = load(MXFP4, tmp_path, as_mxfp4()).tensors
    for name, tensor in PLAIN.items():
        wanted = tensor
        if ".mlp.experts." in name:
            wanted = dequantise_mxfp4(quantise_mxfp4_ref(tensor)).bfloat16()
        assert torch.equal(loaded[name], wanted), name


def test_fp8_blocks_become_the_values_they_stand_for(tmp_path):
    loaded = load(FP8, tmp_path, as_fp8()).tensors
    for name, tensor in PLAIN.items():
        if is_blocked(name):
            torch.testing.assert_close(
                loaded[name].float(),
                tensor.float(),
                rtol=0.07,
                atol=float(tensor.abs().max()) / 448,
            )
        else:
            assert torch.equal(loaded[name], tensor), name


def test_each_block_has_the_scale_of_its_place(tmp_path):
    stored = as_fp8()
    scales = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    stored[DENSE] = torch.ones(128, 512).to(torch.float8_e4m3fn)
    stored[f"{DENSE}_scale_inv"] = scales
    loaded = load(FP8, tmp_path, stored).tensors[DENSE]
    assert torch.equal(loaded, scales.repeat_interleave(128, 1).expand(128, -1).bfloat16())


def put(name, change):
    return lambda stored: stored.update({name: change(stored[name])})


def spoilt(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor[0, 2] = value
        return tensor

    return change


FAULTS = {
    "missing scale": (
        MXFP4,
        as_mxfp4,
        lambda stored: stored.pop(f"{EXPERT}_scale"),
        rf"no tensor {EXPERT}_scale \(a part of {EXPERT}, a bfloat16 tensor of shape \(64, 128\)",
    ),
    "shape of codes": (
        MXFP4,
        as_mxfp4,
        put(f"{EXPERT}_packed", lambda codes: codes[:, :32]),
        r"_packed in .* has shape \(64, 32\), but the model's config asks for \(64, 64\)",
    ),
    "dtype of codes": (
        MXFP4,
        as_mxfp4,
        put(f"{EXPERT}_packed", lambda codes: codes.to(torch.int8)),
        r"_packed in .* is torch\.int8, but uint8 is expected",
    ),
    "NaN scale": (
        MXFP4,
        as_mxfp4,
        put(f"{EXPERT}_scale", spoilt(255)),
        r"_scale in .* is not a number at \(0, 2\) and 0 more places; bytes 0 to 254",
    ),
    "plain where MXFP4 is promised": (
        MXFP4,
        lambda: dict(PLAIN),
        lambda stored: None,
        r"there is .*_proj\.weight: the weights are stored otherwise than config\.json",
    ),
    "NaN block scale": (
        FP8,
        as_fp8,
        put(f"{DENSE}_scale_inv", spoilt(torch.nan)),
        r"_scale_inv in .* is not a number at \(0, 2\) and 0 more places; finite numbers",
    ),
    "dtype of blocks": (
        FP8,
        as_fp8,
        put(DENSE, lambda values: values.float().bfloat16()),
        r"down_proj\.weight in .* is torch\.bfloat16, but float8_e4m3fn is expected",
    ),
    "shape of block scales": (
        FP8,
        as_fp8,
        put(f"{DENSE}_scale_inv", lambda scales: scales[:, :3]),
        r"_scale_inv in .* has shape \(1, 3\), but the model's config asks for \(1, 4\)",
    ),
}


@pytest.mark.parametrize(("spec", "stored", "change", "message"), FAULTS.values(), ids=FAULTS)
def test_a_wrong_quantised_tensor_is_named_with_what_was_expected(
    tmp_path, spec, stored, change, message
):
    tensors = stored()
    change(tensors)
    with pytest.raises(ConfigError, match=message):
        load(spec, tmp_path, tensors)


def test_a_truncated_file_says_how_long_it_should_be(tmp_path):
    path = tmp_path / "m.safetensors"
    load(tiny_spec(), tmp_path, dict(PLAIN))
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 200):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="cannot be read as safetensors") as caught:
            load_weights(tiny_spec(), tmp_path)
        header = int.from_bytes(whole[:8], "little")
        if length > 8 + header:
            assert f"it has {length} bytes, but its header asks for {len(whole)}" in str(
                caught.value
            )


def test_a_header_that_is_not_json_is_named(tmp_path):
    body = b"{not json}" + b" " * 6
    (tmp_path / "m.safetensors").write_bytes(len(body).to_bytes(8, "little") + body)
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        load_weights(tiny_spec(), tmp_path)
    (tmp_path / "m.safetensors").write_bytes(
        (len(json.dumps([]))).to_bytes(8, "little") + json.dumps([]).encode()
    )
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        load_weights(tiny_spec(), tmp_path)
