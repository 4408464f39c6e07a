import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from kimi_runtime.bench.quality.dialogues import Dialogues
from kimi_runtime.bench.quality.haystack import Haystack
from kimi_runtime.bench.quality.words import Words, is_held_out
from kimi_runtime.protocol.codec_k2 import K2Codec
from kimi_runtime.protocol.vocabulary import open_vocabulary
from kimi_runtime.training.curriculum import STAGES, Curriculum
from kimi_runtime.training.loop import padded_length
from kimi_runtime.training.rendering import example_of
from kimi_runtime.training.tasks import TextTasks, pieces, repeated

VOCABULARY = open_vocabulary()
CODEC = K2Codec(VOCABULARY)


def curriculum(seed=1):
    return Curriculum(VOCABULARY, seed=seed, steps=100, batch_tokens=1500, micro_tokens=600)


def test_a_batch_follows_from_its_number_and_the_seed():
    assert curriculum().batch(60) == curriculum().batch(60)
    assert curriculum().batch(60) != curriculum().batch(61)
    assert curriculum().batch(60) != curriculum(seed=2).batch(60)


@pytest.mark.parametrize("step", [0, 5, 20, 40, 60, 80, 90, 99])
def test_every_example_fits_its_stage_and_has_answers(step):
    stage = next(s for s in STAGES if step < s.until * 100)
    batch = curriculum().batch(step)
    padded = [len(part) * padded_length(max(len(e.ids) for e in part)) for part in batch]
    assert sum(padded) >= 1500
    for example in (example for part in batch for example in part):
        assert len(example.ids) <= stage.longest
        assert all(0 < place < len(example.ids) for place in example.answers)
        assert example.answers


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(40, 300))
def test_answers_of_copies_stand_before_them(seed, length):
    for task in (repeated, pieces):
        example = task(random.Random(seed), length, VOCABULARY)
        for place in example.answers:
            before = example.ids[: place - 1]
            last, wanted = example.ids[place - 1], example.ids[place]
            assert any(
                pair == (last, wanted) for pair in zip(before, example.ids[1:place], strict=False)
            )


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_text_tasks_end_where_they_were_asked_to(seed):
    tasks = TextTasks(VOCABULARY, Words(VOCABULARY, held_out=False))
    for task in (tasks.pairs, tasks.rewritten, tasks.sections):
        example = task(random.Random(seed), 120)
        assert len(example.ids) <= 120
        assert all(place < len(example.ids) for place in example.answers)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_what_is_asked_of_sections_was_declared_with_their_topic(seed):
    tasks = TextTasks(VOCABULARY, Words(VOCABULARY, held_out=False))
    text = VOCABULARY.decode_text(tasks.sections(random.Random(seed), 400).ids)
    asked = re.findall(r"The ([a-z ]+)\.\ntype (\w+) = \(_: {\n  (\w+)\n", text)
    assert asked
    for topic, name, parameter in asked:
        declared = text.partition(f"the {topic}.\ntype {name} ")[2]
        assert declared
        assert re.match(rf"= \(_: {{\n  {parameter}\b", declared)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_an_example_s_ids_are_the_prompt_and_what_the_assistant_said(seed, thinking):
    words = Words(VOCABULARY, held_out=False)
    dialogues = Dialogues(words, Haystack(VOCABULARY, words))
    dialogue = dialogues.draw(
        random.Random(seed), tools=2, exchanges=2, text_tokens=40, thinking=thinking
    )
    example = example_of(dialogue, CODEC)
    last = len(dialogue.exchanges[-1].messages) - 1
    prompt = CODEC.render(dialogue.chat(last)).ids
    assert example.ids[: len(prompt)] == prompt
    assert set(range(len(prompt), len(example.ids))) <= set(example.answers)
    assert example.ids[-1] == VOCABULARY.special("<|im_end|>")


def test_earlier_thoughts_are_kept_where_asked_and_are_answers_too():
    words = Words(VOCABULARY, held_out=False)
    dialogues = Dialogues(words, Haystack(VOCABULARY, words))
    for seed in range(5):
        dialogue = dialogues.draw(random.Random(seed), tools=2, exchanges=3, text_tokens=30)
        thoughts = [m.reasoning for e in dialogue.exchanges for m in e.messages if m.reasoning]
        kept = example_of(dialogue, CODEC, keep_reasoning=True)
        said = VOCABULARY.decode_text([kept.ids[place] for place in kept.answers])
        assert all(thought in said for thought in thoughts)
        assert len(example_of(dialogue, CODEC).answers) <= len(kept.answers)


def test_no_word_of_the_examination_is_ever_practised():
    words = Words(VOCABULARY, held_out=False)
    exam = Words(VOCABULARY, held_out=True)
    draw = random.Random(5)
    assert not any(is_held_out(words.word(draw)) for _ in range(300))
    assert all(is_held_out(exam.word(draw)) for _ in range(100))
