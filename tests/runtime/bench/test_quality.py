import dataclasses
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

pytest.importorskip("torch")

from kimi_runtime.bench.quality.dialogues import Dialogues
from kimi_runtime.bench.quality.examination import Answer, Examiner, Tally, judge
from kimi_runtime.bench.quality.haystack import Haystack
from kimi_runtime.bench.quality.report import markdown, missed
from kimi_runtime.bench.quality.run import Plan, Result, examine
from kimi_runtime.bench.quality.tools import ToolMaker
from kimi_runtime.bench.quality.words import Words
from kimi_runtime.cli import app
from kimi_runtime.protocol.chat import Chat
from kimi_runtime.protocol.codec_k2 import K2Codec
from kimi_runtime.protocol.cuts import START
from kimi_runtime.protocol.incremental import encode_segments
from kimi_runtime.protocol.vocabulary import open_vocabulary
from kimi_runtime.spec.worker import RandomWeights

VOCABULARY = open_vocabulary()
CODEC = K2Codec(VOCABULARY)
EXAMINER = Examiner(CODEC)


def perfect(item):
    """The wanted message as the ids a model would emit after the prompt."""
    whole = CODEC.parts(
        dataclasses.replace(
            item.chat, messages=(*item.chat.messages, item.wanted), keep_reasoning=True
        )
    )[-1]
    opened = [segment.text for segment in whole].index("<think>")
    skip = opened + 1 if item.chat.thinking else opened + 2
    said = [segment for segment in whole[skip:] if item.chat.thinking or segment.text]
    return encode_segments(VOCABULARY, said, START)[0]


@pytest.mark.parametrize("thinking", [True, False])
def test_the_wanted_answers_get_full_marks(thinking):
    items = EXAMINER.dialogues(30, thinking=thinking)
    items += EXAMINER.needles(5, tokens=200, thinking=thinking)
    tally = Tally()
    for item in items:
        judge(item, EXAMINER.read(item, perfect(item)), tally)
    assert {name: tally.share(name) for name in tally.counts} == dict.fromkeys(tally.counts, 1.0)
    assert {"right tool", "right arguments", "valid JSON", "needle 200"} <= set(tally.counts)


def test_wrong_answers_are_told_apart():
    item = next(item for item in EXAMINER.dialogues(6, thinking=True) if item.wanted.calls)
    call = item.wanted.calls[0]
    other = json.dumps({**json.loads(call.arguments), "more": 1})
    cases = {
        (("get_other", call.arguments),): (0, 0, 1),
        ((call.name, other),): (1, 0, 1),
        ((call.name, call.arguments[:-1]),): (1, 0, 0),
        ((call.name, call.arguments), (call.name, call.arguments)): (0, 0, 1),
        (): (0, 0, 0),
    }
    for calls, expected in cases.items():
        tally = Tally()
        judge(item, Answer(calls, "", ended=True), tally)
        got = [tally.counts[name][0] for name in ("right tool", "right arguments", "valid JSON")]
        assert tuple(got) == expected, calls


def test_an_answer_must_hold_the_value_as_a_word_and_make_no_call():
    item = next(i for i in EXAMINER.dialogues(12, thinking=True) if not i.wanted.calls)
    item = dataclasses.replace(item, proof="47")
    for answer, right in (
        (Answer((), "The x is 47.", ended=True), 1),
        (Answer((), "The x is 475.", ended=True), 0),
        (Answer((("get_x", "{}"),), "47", ended=True), 0),
    ):
        tally = Tally()
        judge(item, answer, tally)
        assert [entry[0] for entry in tally.counts.values()] == [right], answer


def test_questions_depend_on_the_seed_alone():
    again = Examiner(CODEC).dialogues(8, thinking=True)
    assert [i.rendered.ids for i in again] == [
        i.rendered.ids for i in EXAMINER.dialogues(8, thinking=True)
    ]
    other = Examiner(CODEC, seed=1).dialogues(8, thinking=True)
    assert [i.rendered.ids for i in again] != [i.rendered.ids for i in other]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(30, 600))
def test_a_haystack_has_the_asked_length_and_one_sentence_that_answers(seed, tokens):
    words = Words(VOCABULARY, held_out=True)
    text, key, value = Haystack(VOCABULARY, words).draw(random.Random(seed), tokens)
    assert text.count(f"The {key} key is {value}.") == 1
    assert abs(len(VOCABULARY.encode_text(text)) - tokens) <= 40


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_wanted_calls_give_every_required_argument_of_a_declared_tool(seed):
    words = Words(VOCABULARY, held_out=False)
    dialogues = Dialogues(words, Haystack(VOCABULARY, words))
    dialogue = dialogues.draw(random.Random(seed), tools=3, exchanges=3, text_tokens=40)
    tools = {tool.name: tool for tool in dialogue.tools}
    calls = [call for e in dialogue.exchanges for m in e.messages for call in m.calls]
    for call in calls:
        schema = tools[call.name].parameters
        given_ = json.loads(call.arguments)
        assert set(schema["required"]) <= set(given_) <= set(schema["properties"])
        kinds = {"string": str, "number": int, "boolean": bool}
        for name, value in given_.items():
            assert isinstance(value, kinds[schema["properties"][name]["type"]])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_the_thought_before_a_call_names_every_argument_and_its_value(seed):
    words = Words(VOCABULARY, held_out=False)
    dialogues = Dialogues(words, Haystack(VOCABULARY, words))
    dialogue = dialogues.draw(random.Random(seed), tools=2, exchanges=2, text_tokens=40)
    for message in (m for e in dialogue.exchanges for m in e.messages if m.calls):
        for name, value in json.loads(message.calls[0].arguments).items():
            written = str(value).lower()
            assert re.search(rf"\b{name}( | = |\nfor ){written}\b", message.reasoning)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_tools_alike_have_topics_that_end_alike(seed):
    maker = ToolMaker(Words(VOCABULARY, held_out=False), alike=1.0)
    first, *others = maker.tools(random.Random(seed), 4)
    seen = {first.topic}
    for plan in others:
        assert any(plan.topic[-2:] == topic[-2:] for topic in seen)
        assert plan.topic not in seen
        seen.add(plan.topic)


async def test_an_untrained_model_is_examined_through_the_engine_and_found_wanting():
    plan = Plan(dialogues=2, needles=1, needle_tokens=(64,))
    result = await examine(RandomWeights(), plan)
    assert result.model == "kimi-nano"
    assert sum(asked for _, asked in result.tally.counts.values()) >= 3
    assert missed(result) == ["right tool", "right arguments"]


def test_the_table_shows_shares_and_floors():
    tally = Tally({"right tool": [19, 20], "right arguments": [17, 20], "needle 128": [3, 4]})
    result = Result("kimi-nano", "0123456789abcdef", Plan(needle_tokens=(128,)), tally)
    text = markdown(result)
    assert "| right tool | 19 | 20 | 95.0% | 95% |" in text
    assert "| key in a text of 128 tokens | 3 | 4 | 75.0% |  |" in text
    assert missed(result) == ["right arguments"]


def test_a_folder_that_is_not_there_is_one_line_and_exit_status_2(tmp_path):
    done = CliRunner().invoke(app, ["quality", "--model", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert done.output.startswith("kimistack: model folder")
    assert len(done.output.splitlines()) == 1


def test_a_chat_ends_before_the_message_in_question():
    item = EXAMINER.dialogues(1, thinking=True)[0]
    assert isinstance(item.chat, Chat)
    assert item.chat.messages[-1].role in ("user", "tool")
