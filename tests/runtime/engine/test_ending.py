"""A generation ends where it should, and not before its minimum."""

import pytest

from hash_engine import EOS, VOCABULARY
from kimi_runtime.engine.ending import Ending
from kimi_runtime.spec.request import FinishReason, Sampling

WORDS = VOCABULARY.encode_text("one two three four five")


def ending(most_ids: int = 100, **sampling: object) -> Ending:
    chosen = Sampling.model_validate({"max_tokens": 100, **sampling})
    return Ending(chosen, eos_ids=(EOS,), most_ids=most_ids, vocabulary=VOCABULARY)


def ends_after(end: Ending, ids: list[int]) -> tuple[int, FinishReason | None]:
    """How many ids it takes, and why it ends."""
    for count, number in enumerate(ids, start=1):
        reason = end.after(number)
        if reason is not None:
            return count, reason
    return len(ids), None


def test_the_end_of_turn_counts_unless_it_is_ignored():
    assert ends_after(ending(), [1, EOS, 2]) == (2, FinishReason.STOP)
    assert ends_after(ending(ignore_eos=True), [1, EOS, 2]) == (3, None)


def test_a_stop_id_counts_even_if_the_end_of_turn_is_ignored():
    assert ends_after(ending(ignore_eos=True, stop_ids=(7,)), [1, EOS, 7]) == (3, FinishReason.STOP)


def test_the_last_id_wanted_ends_it_and_a_stop_goes_before_length():
    assert ends_after(ending(2), [1, 2, 3]) == (2, FinishReason.LENGTH)
    assert ends_after(ending(2), [1, EOS]) == (2, FinishReason.STOP)


def test_nothing_ends_it_before_its_minimum():
    least = ending(min_tokens=3, stop_ids=(7,), stop_strings=("one",))
    assert ends_after(least, [7, *WORDS[:2], 7]) == (4, FinishReason.STOP)


@pytest.mark.parametrize("stop", ["o th", "two", " three f"])
def test_a_stop_string_ends_it_with_the_id_that_completes_it(stop):
    count, reason = ends_after(ending(stop_strings=(stop,)), WORDS)
    assert reason is FinishReason.STOP
    assert stop in VOCABULARY.decode_text(WORDS[:count])
    assert stop not in VOCABULARY.decode_text(WORDS[: count - 1])
