"""Looking for garbage less often while millions of small objects are made that are none. Pure."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 200_000
"""Made since the last look. By default it is 700, and a run is a tenth longer."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Inside, cycles wait longer for being found; afterwards all is as before."""
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, YOUNG_OBJECTS) if young else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
