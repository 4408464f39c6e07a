import random

import pytest

torch = pytest.importorskip("torch")

from kimi_runtime.models.rotary import frequencies
from kimi_runtime.protocol.vocabulary import open_vocabulary
from kimi_runtime.spec.model import KIMI_NANO
from kimi_runtime.training.initial import initial_masters
from kimi_runtime.training.loop import Example, Schedule, Training, pack
from kimi_runtime.training.model import TrainingK2
from kimi_runtime.training.optimiser import orthogonal
from kimi_runtime.training.weights import leaves_of
from tiny_k2 import tiny_spec

SPEC = tiny_spec(layers=3, vocab_size=2304, bos_id=2048, eos_ids=(2050,), pad_id=2303)
VOCABULARY = open_vocabulary()


def batch(step):
    draw = random.Random(step)
    first = [draw.choices(range(40), k=16) for _ in range(4)]
    examples = [Example(tuple(ids + ids), tuple(range(18, 32))) for ids in first]
    return [examples[:2], examples[2:]]


def training(steps=8):
    schedule = Schedule(steps=steps, warm_up=2, quantise_from=0.5)
    return Training(SPEC, schedule, VOCABULARY, seed=1, positions=64)


def test_a_resumed_run_equals_one_that_was_never_stopped(tmp_path):
    whole = training(steps=4)
    for step in range(4):
        whole.advance(batch(step))
    first = training(steps=4)
    for step in range(2):
        first.advance(batch(step))
    first.save(tmp_path / "state.pt")
    second = training(steps=4)
    second.load(tmp_path / "state.pt")
    for step in range(second.step, 4):
        report = second.advance(batch(step))
    assert (second.step, second.tokens) == (whole.step, whole.tokens) == (4, report.tokens)
    for name, master in whole.masters.items():
        assert torch.equal(master, second.masters[name]), name


def test_a_save_that_was_cut_short_leaves_the_one_before(tmp_path):
    path = tmp_path / "state.pt"
    run = training()
    run.advance(batch(0))
    run.save(path)
    path.with_suffix(".partial").write_bytes(b"killed while writing")
    again = training()
    again.load(path)
    assert again.step == 1


def test_rates_rise_stay_and_fall_to_nothing():
    schedule = Schedule(steps=100, warm_up=4, decay_from=0.5)
    rates = [schedule.rates(step).matrices / schedule.matrices for step in range(100)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert set(rates[3:51]) == {1.0}
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[99] == pytest.approx(1 / 50)


def test_attention_s_projections_change_slowly_at_first():
    schedule = Schedule(steps=1000, warm_up=10, projections=0.3, projections_warm_up=200)
    shares = [schedule.rates(step).projections / schedule.matrices for step in (9, 99, 199, 300)]
    assert shares == pytest.approx([0.015, 0.15, 0.3, 0.3])
    assert schedule.rates(99).matrices == schedule.matrices


def test_the_first_layer_s_heads_begin_by_looking_1_to_4_tokens_back():
    masters, _ = initial_masters(KIMI_NANO, 3, VOCABULARY)
    assert [usual_offset(masters, head) for head in range(4)] == [1, 2, 3, 4]


def test_what_is_held_is_as_it_began_after_training():
    run = training(steps=2)
    masters, held = initial_masters(SPEC, 1, VOCABULARY)
    for step in range(2):
        run.advance(batch(step))
    assert {"1.q_up", "1.kv_up", "1.o", "embedding"} <= set(held)
    for name, mask in held.items():
        assert torch.equal(run.masters[name][mask], masters[name][mask]), name
        assert name.endswith("norm") or not torch.equal(run.masters[name], masters[name]), name


@pytest.mark.parametrize("alike", [1, 4])
def test_what_came_behind_the_same_eight_tokens_is_likelier_from_the_start(alike):
    """Of two places, the last `alike` tokens before which are the same, the right one is found."""
    masters, _ = initial_masters(KIMI_NANO, 3, VOCABULARY)
    leaves = leaves_of(masters, torch.float32, quantise=False)
    draw = random.Random(7)
    found = 0
    for _ in range(120):
        ids = draw.sample(range(2000), 60)
        ids[35 - alike : 35] = ids[20 - alike : 20]
        ids += ids[35 - 8 : 35] if draw.random() < 0.5 else ids[20 - 8 : 20]
        right, other = (35, 20) if ids[-8] == ids[35 - 8] else (20, 35)
        with torch.no_grad():
            model = TrainingK2(KIMI_NANO, positions=len(ids), dtype=torch.float32)
            logits = model.logits(leaves, model.hidden(leaves, torch.tensor([ids]))[0][-1])
        found += bool(logits[ids[right]] > logits[ids[other]])
    assert found >= 80  # 60 by chance


def usual_offset(masters, head):
    """How far back a head of layer 0 looks most often, by the rotary part of its scores."""
    spec = KIMI_NANO
    ids = torch.randint(0, 2000, (40,), generator=torch.Generator().manual_seed(5))
    x = rms_normed(masters["embedding"][ids])
    q = rms_normed(x @ masters["0.q_down"].T)
    q = q @ masters["0.q_up"].view(spec.heads, spec.qk_dim, -1)[head, spec.qk_nope_dim :].T
    k = x @ masters["0.kv_down"][spec.kv_lora_rank :].T
    turns = torch.arange(40)[:, None] * frequencies(spec.rope, spec.qk_rope_dim)
    q, k = (torch.view_as_complex(part.view(40, -1, 2)) for part in (q, k))
    q, k = (part * torch.polar(torch.ones_like(turns), turns) for part in (q, k))
    scores = (q @ k.conj().T).real.masked_fill(torch.ones(40, 40).triu(1) > 0, -torch.inf)
    offsets = torch.arange(40) - scores.argmax(1)
    return int(offsets[8:].mode().values)


def rms_normed(x):
    return x * x.square().mean(-1, keepdim=True).rsqrt()


def test_the_loss_on_copies_falls():
    run = training(steps=30)
    losses = [run.advance(batch(step)).loss for step in range(12)]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_the_bias_moves_towards_idle_experts_and_nothing_else_moves_it():
    run = training()
    run.advance(batch(0))
    bias = run.masters["1.router_bias"]
    assert set(bias.abs().tolist()) <= {0.0, float(torch.tensor(0.005))}
    assert bias.any()


def test_packing_points_at_the_place_before_each_answer():
    examples = [Example((5, 6, 7, 8), (2, 3)), Example((9, 4), (1,))]
    ids, places, wanted = pack(examples)
    assert ids.shape == (2, 32)
    real = wanted >= 0
    assert wanted[real].tolist() == [7, 8, 4]
    assert ids.flatten()[places[real] + 1].tolist() == [7, 8, 4]


def test_orthogonal_steps_have_singular_values_near_one():
    generator = torch.Generator().manual_seed(3)
    for shape in ((64, 32), (32, 64), (3, 32, 48)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=generator)))
        assert float(values.min()) > 0.3
        assert float(values.max()) < 1.5


def test_training_starts_with_heads_that_find_what_came_after_the_same_ids():
    masters, _ = initial_masters(KIMI_NANO, 0, VOCABULARY)
    model = TrainingK2(KIMI_NANO, positions=64, dtype=torch.float32)
    leaves = leaves_of(masters, torch.float32, quantise=False)
    first = torch.randint(0, 2048, (4, 32), generator=torch.Generator().manual_seed(1))
    ids = torch.cat((first, first), dim=1)
    with torch.no_grad():
        logits = model.logits(leaves, model.hidden(leaves, ids)[0]).view(4, 64, -1)
    seen, wanted = logits[:, 34:-1], ids[:, 35:]
    rank = (seen > seen.gather(-1, wanted[..., None])).sum(-1).float()
    assert float(rank.median()) < 40  # of 2,304; by chance it would be near 1,152


def test_tokens_that_differ_in_a_mark_alone_begin_alike():
    embedding = initial_masters(KIMI_NANO, 0, VOCABULARY)[0]["embedding"]
    known = {VOCABULARY.token_bytes(token): token for token in range(VOCABULARY.rank_count)}
    bare, marked, other = (embedding[known[text]] for text in (b"name", b" name", b"value"))
    assert float(torch.cosine_similarity(bare, marked, dim=0)) > 0.8
    assert abs(float(torch.cosine_similarity(bare, other, dim=0))) < 0.3
