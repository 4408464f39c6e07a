"""Who holds an arena: a view as long as it is kept, a forked child never."""

import contextlib
import faulthandler
import mmap
import os
import signal

import pytest

from kimi_connect.arena import Shape, create_arena, reopen_arena

SHAPE = Shape(page_bytes=4096, pages=64)


@pytest.fixture
def arena(tmp_path):
    made = create_arena(f"{tmp_path}/arena", page_bytes=4096, pages=64, epoch=1)
    yield made
    made.close()


@contextlib.contextmanager
def forked(work):
    """A child that does `work`; what is yielded waits for it and tells how it ended."""
    child = os.fork()
    if not child:
        status = 1
        try:
            status = work() or 0
        finally:
            os._exit(status)
    ended = []

    def status():
        if not ended:
            ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return ended[0]

    try:
        yield status
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
            status()


def test_freeing_an_inherited_arena_unmaps_nothing_of_the_child_s(arena):
    def work():
        own = [mmap.mmap(-1, 1 << 16) for _ in range(32)]
        for mapping in own:
            mapping[:] = b"x" * len(mapping)
        arena.close()
        return any(mapping[:] != b"x" * len(mapping) for mapping in own)

    with forked(work) as status:
        assert status() == 0


def test_a_child_that_touches_its_parent_s_pages_is_killed(arena):
    arena.data[0] = 7

    def work():
        faulthandler.disable()  # what is meant to happen needs no report
        arena.data[0] = 8

    with forked(work) as status:
        assert status() == -signal.SIGSEGV
    assert arena.data[0] == 7


def test_what_a_parent_claimed_is_free_once_it_closes_though_a_child_lives(arena, tmp_path):
    assert arena.claim(1, 3)
    other = reopen_arena(f"{tmp_path}/arena", SHAPE)
    begun, begin = os.pipe()

    def work():
        os.write(begin, b"!")
        signal.pause()

    with forked(work), open(begun, "rb", buffering=0) as child:
        assert child.read(1)
        assert not other.take(2)
        arena.close()
        assert other.take(2)
    os.close(begin)
    other.close()


def test_a_closed_arena_keeps_no_child_from_leaving_the_others(arena, tmp_path):
    """What is raised as a child begins is told nobody: all that came behind it would be missing."""
    other = create_arena(f"{tmp_path}/other", page_bytes=4096, pages=64, epoch=1)
    arena.close()

    def work():
        faulthandler.disable()
        other.data[0] = 8

    with forked(work) as status:
        assert status() == -signal.SIGSEGV
    other.close()


def test_it_is_held_as_long_as_somebody_keeps_a_view(arena, tmp_path):
    instance = b"instance" * 2
    held = reopen_arena(f"{tmp_path}/arena", SHAPE)
    held.hold(instance)
    view = held.data
    held.close()
    del held
    assert arena.held_by(instance)
    view.release()
    assert not arena.held_by(instance)
