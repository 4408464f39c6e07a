from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.transfer.tcp_wire import WINDOW_SPANS, advance, windows

MEMORY = memoryview(bytes(range(256)) * 16)
PLACES = st.lists(
    st.tuples(st.integers(0, 2048), st.integers(1, 2048)), min_size=1, max_size=2 * WINDOW_SPANS
)


@given(PLACES, st.integers(1, 5000), st.binary(max_size=3), st.binary(max_size=3))
@settings(max_examples=50, deadline=None)
def test_windows_hold_the_places_in_order_and_what_goes_before_and_after(
    places, window_bytes, before, after
):
    cut = list(
        windows(
            MEMORY,
            places,
            window_bytes,
            before=memoryview(before) if before else None,
            after=memoryview(after) if after else None,
        )
    )
    wanted = b"".join(MEMORY[at : at + size] for at, size in places)
    assert b"".join(view for window in cut for view in window) == before + wanted + after
    for window in cut:
        assert len(window) <= WINDOW_SPANS + 2
        assert sum(view.nbytes for view in window) <= window_bytes + len(before) + len(after)


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=9), st.data())
@settings(max_examples=50, deadline=None)
def test_what_is_left_of_a_window_is_what_has_not_moved(parts, data):
    moved = data.draw(st.integers(0, sum(map(len, parts))))
    left = advance([memoryview(part) for part in parts], moved)
    assert b"".join(left) == b"".join(parts)[moved:]
