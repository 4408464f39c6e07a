from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kimi_runtime.engine.plan import Row, RowsFailed, StepPlan
from kimi_runtime.engine.runner import NonFiniteLogits, TorchRunner, kv_block_bytes
from kimi_runtime.engine.sampler import NothingAllowed, RequestSampler
from kimi_runtime.errors import CapacityError, RequestError
from kimi_runtime.models.weights import ModelWeights, random_weights
from kimi_runtime.spec.request import Sampling
from kimi_runtime.transfer.memory import private_memory, shared_memory
from tiny_k2 import random_ids, tiny_spec

SPEC = tiny_spec()
WEIGHTS = random_weights(SPEC, 0)
BLOCKS = 24
GREEDY = Sampling(temperature=0.0, max_tokens=64)


def runner_of(memory=None, *, spec=SPEC, weights=WEIGHTS, blocks=BLOCKS, **fields):
    memory = memory or private_memory(blocks * kv_block_bytes(spec, 64))
    return TorchRunner(spec, weights, blocks=blocks, block_tokens=64, memory=memory, **fields)


@pytest.fixture(scope="module")
def runner():
    return runner_of()


def sampler_of(prompt, sampling=GREEDY, **fields):
    return RequestSampler(
        sampling, prompt, SPEC.vocab_size, random_seed=1, eos_ids=SPEC.eos_ids, **fields
    )


def generate(runner, prompt, count, *, blocks, sampling=GREEDY, chunk=10**9):
    """Ids of one request alone."""
    sampler = sampler_of(prompt, sampling)
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        last = start + len(part) == len(prompt)
        sampled = runner.run(StepPlan((Row(0, start, part, blocks, last),)), {0: sampler})
    return decode(runner, 0, sampled[0].id, len(prompt), count, blocks, sampler)


def decode(runner, request, id_, position, count, blocks, sampler):
    ids = [id_]
    sampler.accept(id_)
    while len(ids) < count:
        row = Row(request, position, (ids[-1],), blocks, sample=True)
        (sampled,) = runner.run(StepPlan((row,)), {request: sampler})
        ids.append(sampled.id)
        sampler.accept(sampled.id)
        position += 1
    return ids


def test_a_step_answers_sampled_rows_in_their_order(runner):
    prompts = [random_ids(n, seed=n) for n in (70, 5, 33)]
    rows = tuple(
        Row(number, 0, prompt, (2 * number, 2 * number + 1), sample=number != 1)
        for number, prompt in enumerate(prompts)
    )
    samplers = {0: sampler_of(prompts[0]), 2: sampler_of(prompts[2])}
    got = runner.run(StepPlan(rows), samplers)
    assert [sampled.request for sampled in got] == [0, 2]
    for sampled in got:
        alone = generate(runner, prompts[sampled.request], 1, blocks=(20, 21))
        assert sampled.id == alone[0]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=3, max_tokens=64)])
def test_ids_do_not_depend_on_chunking(runner, sampling):
    prompt = random_ids(150, seed=1)
    want = generate(runner, prompt, 12, blocks=(0, 1, 2), sampling=sampling)
    assert len(set(want)) > 3
    for chunk in (1, 7, 64, 100):
        got = generate(runner, prompt, 12, blocks=(9, 4, 7), sampling=sampling, chunk=chunk)
        assert got == want, chunk


def test_a_decode_worker_continues_from_copied_blocks():
    prefill, decode_side = runner_of(), runner_of()
    prompt = random_ids(130, seed=2)
    want = generate(prefill, prompt, 10, blocks=(0, 1, 2))
    other = runner_of()
    sampler = sampler_of(prompt)
    row = Row(0, 0, prompt, (5, 6, 7), sample=True)
    (first,) = other.run(StepPlan((row,)), {0: sampler})
    for source, target in ((5, 3), (6, 0), (7, 8)):
        decode_side.block(target)[:] = other.block(source)
    assert decode(decode_side, 0, first.id, 130, 10, (3, 0, 8), sampler) == want


def test_the_pool_lies_in_shared_memory_block_by_block(tmp_path):
    size = kv_block_bytes(SPEC, 64)
    memory = shared_memory(tmp_path / "kv", BLOCKS * size)
    runner = runner_of(memory)
    assert runner.block_bytes == size == SPEC.layers * 64 * 576 * 2
    assert sum(runner.layer_group_bytes) == size
    assert len(runner.layer_group_bytes) == SPEC.layers
    generate(runner, random_ids(3, seed=3), 1, blocks=(4,))
    content = (tmp_path / "kv").read_bytes()
    assert not any(content[: 4 * size])
    assert not any(content[5 * size :])
    assert content[4 * size : 5 * size] == bytes(runner.block(4))
    rows = np.frombuffer(runner.block(4), np.uint16).reshape(SPEC.layers, 64, 576)
    assert rows[:, :3].any(axis=-1).all()
    assert not rows[:, 3:].any()


@pytest.mark.parametrize(("layers", "groups"), [(1, [1]), (3, [1, 1, 1]), (7, [1, 2, 2, 2])])
def test_layer_groups_are_runs_of_whole_layers(layers, groups):
    spec = tiny_spec(layers=layers)
    runner = runner_of(spec=spec, weights=random_weights(spec, 0), blocks=2)
    layer_bytes = 64 * 576 * 2
    assert list(runner.layer_group_bytes) == [count * layer_bytes for count in groups]


def test_a_pool_that_does_not_fit_says_what_it_needs():
    with pytest.raises(CapacityError, match=r"a KV pool of 24 blocks .* raise limits\.kv_bytes"):
        runner_of(private_memory(1000))


def test_a_block_number_outside_the_pool_is_refused(runner):
    with pytest.raises(IndexError):
        runner.block(BLOCKS)


def poison(runner, block):
    runner.block(block)[:] = np.full(runner.block_bytes // 2, 0x7FC0, np.uint16).tobytes()


def test_nan_fails_its_own_request_and_no_other(runner):
    prompts = {7: random_ids(80, seed=4), 8: random_ids(90, seed=5)}
    tables = {7: (10, 11), 8: (12, 13)}
    want = generate(runner, prompts[8], 2, blocks=tables[8])
    generate(runner, prompts[7], 1, blocks=tables[7])
    poison(runner, 10)
    samplers = {number: sampler_of(prompt) for number, prompt in prompts.items()}
    rows = (
        Row(7, 80, (3,), tables[7], sample=True),
        Row(8, 90, (want[0],), tables[8], sample=True),
    )
    with pytest.raises(RowsFailed, match="request 7: the logits at position 81") as caught:
        runner.run(StepPlan(rows), samplers)
    assert isinstance(caught.value.errors[7], NonFiniteLogits)
    assert [(sampled.request, sampled.id) for sampled in caught.value.sampled] == [(8, want[1])]


def test_a_poisoned_block_serves_its_next_owner_well(runner):
    prompt = random_ids(20, seed=6)
    want = generate(runner, prompt, 8, blocks=(14,))
    poison(runner, 15)
    assert generate(runner, prompt, 8, blocks=(15,)) == want


def test_a_dead_end_of_the_grammar_fails_its_own_request(runner):
    class Nothing:
        def allowed(self):
            return bytes(4 * (SPEC.vocab_size // 32 + 1))

        def accept(self, id_):
            raise AssertionError

    prompt = random_ids(9, seed=7)
    samplers = {1: sampler_of(prompt, grammar=Nothing()), 2: sampler_of(prompt)}
    rows = tuple(Row(number, 0, prompt, (15 + number,), sample=True) for number in (1, 2))
    with pytest.raises(RowsFailed) as caught:
        runner.run(StepPlan(rows), samplers)
    assert isinstance(caught.value.errors[1], NothingAllowed)
    assert [sampled.request for sampled in caught.value.sampled] == [2]


def test_an_id_or_a_position_outside_the_model_fails_its_own_row(runner):
    good = Row(1, 0, (5, 6), (18,), sample=False)
    bad_id = Row(2, 0, (5, SPEC.vocab_size), (19,), sample=False)
    late = Row(3, SPEC.max_positions, (5,), tuple([20] * 33), sample=False)
    with pytest.raises(RowsFailed) as caught:
        runner.run(StepPlan((good, bad_id, late)), {})
    assert set(caught.value.errors) == {2, 3}
    assert isinstance(caught.value.errors[2], RequestError)
    assert "beyond the model's 2048 positions" in str(caught.value.errors[3])
    assert caught.value.sampled == ()


def test_an_empty_step_and_a_step_that_samples_nothing_return_nothing(runner):
    assert list(runner.run(StepPlan(()), {})) == []
    assert list(runner.run(StepPlan((Row(0, 0, (1, 2, 3), (0,), sample=False),)), {})) == []


def test_ids_outside_the_vocabulary_table_are_never_drawn():
    limited = runner_of(vocabulary_size=3)
    for sampling in (GREEDY, Sampling(temperature=2.0, seed=1, max_tokens=64, logprobs=5)):
        sampler = RequestSampler(sampling, (1,), 3, random_seed=1)
        row = Row(0, 0, (1,), (0,), sample=True)
        (sampled,) = limited.run(StepPlan((row,)), {0: sampler})
        assert sampled.id < 3


def test_greedy_ties_take_the_lowest_id():
    tensors = dict(WEIGHTS.tensors)
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    runner = runner_of(weights=ModelWeights(tensors, "flat"))
    assert runner.model_digest == "flat"
    assert generate(runner, (4, 5), 3, blocks=(0,)) == [0, 0, 0]


def test_logprobs_come_with_the_id_where_asked(runner):
    prompt = random_ids(12, seed=8)
    sampling = Sampling(temperature=0.0, max_tokens=4, logprobs=3)
    row = Row(0, 0, prompt, (0,), sample=True)
    (sampled,) = runner.run(StepPlan((row,)), {0: sampler_of(prompt, sampling)})
    assert sampled.logprob.id == sampled.id == sampled.logprob.top[0][0]
    assert sampled.logprob.logprob == sampled.logprob.top[0][1] < 0


def test_the_calling_thread_does_not_matter(runner):
    prompt = random_ids(140, seed=9)
    want = generate(runner, prompt, 6, blocks=(0, 1, 2))
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(generate, runner, prompt, 6, blocks=(3, 4, 5)).result(timeout=60)
        assert pool.submit(torch.get_num_threads).result(timeout=60) == 1
    assert got == want
