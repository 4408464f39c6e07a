"""Our K2 decoder computes what Hugging Face's DeepseekV3 does; `scripts/record-oracle` asked it."""

import functools
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import kimi_runtime.models
from kimi_runtime.models.k2 import K2Model
from kimi_runtime.models.weights import digest_of, load_weights, random_weights
from kimi_runtime.spec.config_file import load_config
from oracle_cases import CASES, GOLDEN, NANO, in_fp32
from tiny_k2 import BLOCK_TOKENS, Run, all_logits, cache_of

PACKAGED_NANO = Path(str(kimi_runtime.models.__file__)).parent / "kimi-nano"


@functools.cache
def golden():
    with safe_open(GOLDEN, framework="pt") as file:
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}, file.metadata()


@functools.cache
def weights_of(name):
    """As the oracle had them."""
    case, recorded = CASES[name], golden()[1].get(f"{name}.weights")
    if name != NANO:
        tensors = random_weights(case.spec, 0).tensors
    elif recorded is None or not (PACKAGED_NANO / "model.safetensors").is_file():
        pytest.skip("the trained kimi-nano is not in the package, or was not recorded")
    else:
        tensors = load_weights(load_config(PACKAGED_NANO), PACKAGED_NANO).tensors
    found = digest_of(case.spec, tensors)
    assert found == recorded, f"{name} has other weights now: run scripts/record-oracle"
    return tensors


@functools.cache
def model_of(name, dtype=torch.float32):
    tensors = weights_of(name)
    tensors = in_fp32(tensors) if dtype == torch.float32 else tensors
    return K2Model(CASES[name].spec, tensors)


def logits_of(name, dtype=torch.float32):
    case = CASES[name]
    return all_logits(model_of(name, dtype), case.ids)[case.rows]


@pytest.mark.parametrize("name", CASES)
def test_fp32_logits_are_those_of_hugging_face(name):
    got = logits_of(name)
    want = golden()[0][f"{name}.fp32"]
    # relative to a row's largest logit: one that is near zero has no digits of its own
    error = (got - want).abs().amax(dim=1) / want.abs().amax(dim=1)
    assert float(error.max()) < 1e-4
    assert float((got - want).norm() / want.norm()) < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_greedy_ids_over_the_paged_cache_are_those_of_hugging_face(name):
    case, model = CASES[name], model_of(name)
    want = golden()[0][f"{name}.greedy"].tolist()
    blocks = tuple(range(-(-(case.length + len(want)) // BLOCK_TOKENS)))[::-1]
    cache = cache_of(model, len(blocks), fill=torch.nan)
    logits, got = model.logits([Run(0, case.ids, blocks)], cache), []
    for start in range(case.length, case.length + len(want)):
        got.append(int(logits[0].argmax()))
        logits = model.logits([Run(start, (got[-1],), blocks)], cache)
    assert got == want


@pytest.mark.parametrize("name", CASES)
def test_bf16_logits_are_as_near_to_fp32_as_hugging_face_s(name):
    ours = logits_of(name, torch.bfloat16)
    exact, theirs = golden()[0][f"{name}.fp32"], golden()[0][f"{name}.bf16"].float()
    # by the row: sharp attention near a tie turns one row over, on either side
    errors = [(side - exact).norm(dim=1).median() for side in (ours, theirs)]
    assert float(errors[0]) < 1.25 * float(errors[1])


def test_the_cases_reach_past_the_original_positions_and_have_logits_of_some_spread():
    stretched = [case for case in CASES.values() if case.spec.rope.yarn is not None]
    assert any(case.length > 4 * case.spec.rope.yarn.original_positions for case in stretched)
    logits = [value for name, value in golden()[0].items() if name.endswith(".fp32")]
    assert len(logits) >= len(CASES) - 1
    assert all(float(value.std()) > 1.0 for value in logits)
