import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.engine.sampler import (
    NothingAllowed,
    RequestSampler,
    token_logprob,
    uniform,
)
from kimi_runtime.spec.request import Sampling

VOCAB = 12
UNIFORM_1_2 = 0.18567317254693572  # replays of recorded requests rest on it


def logits_of(seed=0, size=VOCAB):
    return (np.random.default_rng(seed).normal(size=size) * 2).astype(np.float32)


def sampler(prompt=(1, 2, 2), *, grammar=None, random_seed=0, eos_ids=(11,), vocab=VOCAB, **fields):
    fields.setdefault("max_tokens", 100)
    return RequestSampler(
        Sampling(**fields), prompt, vocab, grammar, random_seed=random_seed, eos_ids=eos_ids
    )


class Words:
    """A grammar mask from a set of ids, or none."""

    def __init__(self, allowed, size=VOCAB):
        self.ids, self.size, self.accepted = allowed, size, []

    def allowed(self):
        if self.ids is None:
            return None
        words = [0] * (-(-self.size // 32))
        for id_ in self.ids:
            words[id_ // 32] |= 1 << (id_ % 32)
        return b"".join(word.to_bytes(4, "little") for word in words)

    def accept(self, id_):
        self.accepted.append(id_)


def distribution(logits, sampling, prompt=(), output=()):
    """Probability of each id, from the definitions, in plain loops."""
    values = [float(value) for value in logits]
    for id_, bias in sampling.logit_bias.items():
        values[id_] += bias
    for id_ in range(len(values)):
        count = list(output).count(id_)
        if count or id_ in prompt:
            factor = sampling.repetition_penalty
            values[id_] = values[id_] / factor if values[id_] > 0 else values[id_] * factor
        values[id_] -= sampling.frequency_penalty * count
        values[id_] -= sampling.presence_penalty * (count > 0)
    top = max(values)
    weights = [np.exp((value - top) / sampling.temperature) for value in values]
    kept = [i for i, weight in enumerate(weights) if weight >= sampling.min_p]
    kept.sort(key=lambda i: (-weights[i], i))
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    total = sum(weights[i] for i in kept)
    nucleus, mass = [], 0.0
    for i in kept:
        if mass >= sampling.top_p * total:
            break
        nucleus.append(i)
        mass += weights[i]
    return np.array([weights[i] / mass if i in nucleus else 0.0 for i in range(len(values))])


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 50},
    {"top_p": 0.7},
    {"top_p": 0.05},
    {"min_p": 0.2},
    {"min_p": 0.1, "top_k": 5, "top_p": 0.8, "temperature": 1.3},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "temperature": 0.8},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"presence_penalty": 2.0},
    {"logit_bias": {3: 4.0, 7: -100.0}},
]


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_ids_are_drawn_with_the_defined_probabilities(fields):
    draws = 4000
    logits, output = logits_of(), (4, 4, 9)
    drawn = np.zeros(VOCAB)
    subject = sampler(**fields)
    for id_ in output:
        subject.accept(id_)
    for seed in range(draws):
        subject._seed = seed
        drawn[subject.draw(logits)[0]] += 1
    want = distribution(logits, subject.sampling, (1, 2, 2), output) * draws
    assert not drawn[want == 0].any()
    rare, common = want < 5, want >= 5
    # Pearson's statistic; its mean is the degrees of freedom, its deviation sqrt(2 df)
    cells = [*zip(drawn[common], want[common], strict=True)]
    if want[rare].sum() > 0:
        cells.append((drawn[rare].sum(), want[rare].sum()))
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    freedom = len(cells) - 1
    assert statistic <= freedom + 5 * np.sqrt(2 * max(freedom, 1))


@given(
    seed=st.integers(0, 2**20),
    fields=st.fixed_dictionaries(
        {
            "temperature": st.floats(0.1, 2.0),
            "top_p": st.floats(0.01, 1.0),
            "top_k": st.integers(0, 14),
            "min_p": st.floats(0.0, 0.9),
        }
    ),
)
@settings(max_examples=50, deadline=None)
def test_the_support_is_exactly_what_the_filters_keep(seed, fields):
    logits = logits_of(seed)
    subject = sampler(**fields)
    want = distribution(logits, subject.sampling)
    for draw in range(60):
        subject._seed = draw
        assert want[subject.draw(logits)[0]] > 0


def test_a_draw_inverts_the_cumulative_distribution_at_the_counter_s_number():
    logits = logits_of(3)
    for seed, position in itertools.product(range(40), (3, 4)):
        subject = sampler(seed=seed)
        for _ in range(position - 3):
            subject.accept(0)
        mass = np.cumsum(distribution(logits, subject.sampling, (1, 2, 2)))
        want = int(np.searchsorted(mass, uniform(seed, position), "right"))
        assert subject.draw(logits)[0] == want


def test_the_counter_s_numbers_are_uniform_and_fixed():
    numbers = np.array([uniform(seed, position) for seed in range(50) for position in range(40)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 9 + 5 * np.sqrt(18)
    assert len(set(numbers)) == len(numbers)
    assert uniform(1, 2) == UNIFORM_1_2


def test_a_draw_depends_on_seed_and_position_alone():
    logits = logits_of(1)
    first, second = sampler(seed=7), sampler(seed=7, random_seed=99)
    assert [first.draw(logits)[0] for _ in range(3)] == [second.draw(logits)[0]] * 3
    first.accept(0)
    moved = sampler(prompt=(1, 2, 2, 0), seed=7)  # goes on elsewhere, its output now a prompt
    assert first.position == moved.position == 4
    assert first.draw(logits) == moved.draw(logits)


def test_without_a_seed_the_request_s_own_random_seed_is_used():
    logits = np.zeros(VOCAB, np.float32)
    ids = {sampler(random_seed=seed).draw(logits)[0] for seed in range(60)}
    assert len(ids) > 6
    assert sampler(random_seed=5).draw(logits) == sampler(random_seed=5).draw(logits)


def test_temperature_0_takes_the_lowest_of_the_greatest():
    logits = np.array([1, 3, 3, 2], np.float32)
    subject = sampler(vocab=4, eos_ids=(), temperature=0.0, top_p=0.1, top_k=3)
    assert subject.takes_argmax
    assert subject.draw(logits)[0] == 1


@given(st.sets(st.integers(0, 5)), st.floats(0.0, 2.0), st.integers(0, 2**32))
def test_a_bias_of_minus_100_bans_an_id_however_likely_it_is(banned, temperature, seed):
    logits = np.full(6, 0.0, np.float32)
    logits[list(banned)] = 1e6
    subject = sampler(
        vocab=6, temperature=temperature, logit_bias=dict.fromkeys(banned, -100.0), seed=seed
    )
    if len(banned) == 6:
        with pytest.raises(NothingAllowed, match="logit_bias exclude all"):
            subject.draw(logits)
    else:
        assert subject.draw(logits)[0] not in banned


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 0},
        {"logit_bias": {1: 1.0}},
        {"presence_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"min_tokens": 1},
        {"grammar": Words(None)},
        {"temperature": 0.5},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_argmax_is_not_enough_where_anything_else_is_asked(fields):
    assert not sampler(**{"temperature": 0.0, **fields}).takes_argmax


def test_min_tokens_holds_eos_and_stop_ids_back():
    logits = np.zeros(VOCAB, np.float32)
    logits[11], logits[5], logits[3] = 9.0, 8.0, 7.0
    subject = sampler(temperature=0.0, min_tokens=2, stop_ids=(5,))
    for want in (3, 3, 11):
        assert subject.draw(logits)[0] == want
        subject.accept(want)
    assert subject.takes_argmax


def test_a_grammar_allows_exactly_its_ids_and_hears_what_was_accepted():
    grammar = Words({2, 7, 70}, size=100)
    subject = sampler(vocab=100, grammar=grammar, logit_bias={50: 100.0})
    drawn = set()
    for seed in range(200):
        subject._seed = seed
        drawn.add(subject.draw(np.zeros(128, np.float32))[0])
    assert drawn == {2, 7, 70}
    subject.accept(70)
    assert grammar.accepted == [70]


def test_ids_beyond_a_short_mask_are_not_allowed():
    logits = np.zeros(40, np.float32)
    logits[35] = 9.0
    subject = sampler(vocab=40, grammar=Words({4}, size=32), temperature=0.0)
    assert subject.draw(logits)[0] == 4


def test_ids_beyond_the_vocabulary_are_never_drawn():
    logits = np.zeros(64, np.float32)
    logits[VOCAB:] = 50.0
    subject = sampler(logprobs=20)
    for seed in range(50):
        subject._seed = seed
        id_, logprob = subject.draw(logits)
        assert id_ < VOCAB
        assert all(other < VOCAB for other, _ in logprob.top)


def test_nothing_allowed_is_an_error_that_names_the_position():
    with pytest.raises(NothingAllowed, match="no id is allowed at position 3"):
        sampler(grammar=Words(set())).draw(logits_of())


def test_a_draw_changes_nothing():
    subject = sampler(seed=1, presence_penalty=1.0)
    logits = logits_of()
    kept = logits.copy()
    assert subject.draw(logits) == subject.draw(logits)
    np.testing.assert_array_equal(logits, kept)


def test_logprobs_are_of_the_model_s_distribution_before_any_filter():
    logits = logits_of(4)
    subject = sampler(
        temperature=0.3, top_k=1, logit_bias={2: 50.0}, frequency_penalty=1.0, logprobs=3
    )
    id_, got = subject.draw(logits)
    exact = logits.astype(np.float64)
    want = exact - np.log(np.exp(exact).sum())
    assert id_ == got.id == 2
    assert got.logprob == pytest.approx(want[2])
    order = sorted(range(VOCAB), key=lambda i: (-want[i], i))[:3]
    assert [other for other, _ in got.top] == order
    assert [value for _, value in got.top] == pytest.approx([want[i] for i in order])


def test_top_logprobs_of_equals_start_with_the_lowest_id():
    got = token_logprob(np.zeros(VOCAB, np.float32), chosen=9, top=4)
    assert [id_ for id_, _ in got.top] == [0, 1, 2, 3]
    assert got.logprob == pytest.approx(-np.log(VOCAB))
    assert token_logprob(logits_of(), chosen=1, top=0).top == ()


@pytest.mark.parametrize("size", [2304, 163_840])
def test_filters_of_a_whole_vocabulary_keep_what_a_sort_would_keep(size):
    logits = logits_of(5, size)
    for fields in ({"top_p": 0.95}, {"top_k": 20}, {"top_p": 0.999999, "temperature": 2.0}):
        subject = sampler(vocab=size, **fields)
        scaled = logits.astype(np.float64) / subject.sampling.temperature
        weights = np.exp(scaled - scaled.max())
        order = np.argsort(-weights, kind="stable")
        if subject.sampling.top_k:
            keep = set(order[: subject.sampling.top_k].tolist())
        else:
            mass = np.cumsum(weights[order])
            enough = int(np.searchsorted(mass, subject.sampling.top_p * mass[-1])) + 1
            keep = set(order[:enough].tolist())
        kept = weights.copy()
        subject._filter(kept)
        assert abs(len(set(np.flatnonzero(kept).tolist()) ^ keep)) <= 1


def test_penalties_ignore_prompt_ids_outside_the_vocabulary():
    subject = sampler(prompt=(1, 500), repetition_penalty=2.0, temperature=0.0)
    assert 0 <= subject.draw(logits_of())[0] < VOCAB
