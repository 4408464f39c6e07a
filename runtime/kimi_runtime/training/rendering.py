"""Dialogues as training examples: the ids of a conversation, and which of them are the model's."""

from dataclasses import replace

from kimi_runtime.bench.quality.dialogues import Dialogue
from kimi_runtime.protocol.chat import Chat, Message
from kimi_runtime.protocol.codec_k2 import K2Codec
from kimi_runtime.protocol.cuts import START
from kimi_runtime.protocol.incremental import Part, Segment, encode_segments
from kimi_runtime.training.loop import Example

_THINK = Segment("<think>", control=True)
_THOUGHT = Segment("</think>", control=True)


def example_of(dialogue: Dialogue, codec: K2Codec, *, keep_reasoning: bool = False) -> Example:
    """The whole dialogue. Answers are what assistants say: from the thought on where the prompt
    keeps it, behind the empty pair of think tokens where it does not.

    The template keeps thoughts since the last question, all of them with `keep_reasoning`.
    """
    *_, final = dialogue.exchanges[-1].messages
    chat = dialogue.chat(len(dialogue.exchanges[-1].messages) - 1)
    chat = replace(chat, keep_reasoning=keep_reasoning)
    parts = [*codec.parts(chat), _final_part(final, codec, thinking=dialogue.thinking)]
    ids: list[int] = []
    answers: list[int] = []
    for part in parts:
        spoken = _spoken_from(part)
        before, at = encode_segments(codec.vocabulary, part[:spoken], START)
        said, _ = encode_segments(codec.vocabulary, part[spoken:], at)
        ids += before
        answers += range(len(ids), len(ids) + len(said))
        ids += said
    return Example(tuple(ids), tuple(answers))


def _final_part(message: Message, codec: K2Codec, *, thinking: bool) -> Part:
    """The last message as it is generated: with its reasoning, which later prompts leave out."""
    alone = Chat((message,), thinking=thinking, keep_reasoning=True)
    return codec.parts(alone)[-1]


def _spoken_from(part: Part) -> int:
    """Index of the first segment that the model generates; all of them when it generates none."""
    if part[0].text != "<|im_assistant|>":
        return len(part)
    opened, closed = part.index(_THINK), part.index(_THOUGHT)
    thought = any(segment.text for segment in part[opened + 1 : closed])
    return opened + 1 if thought else closed + 1
