"""What a forked child must not share with its parent: an arena's pages, and the locks on them.

A child could store to pages long after its parent gave them back, and an open file description
keeps its locks for as long as anybody has it open. So a child of `os.fork` gets nothing in place of
a parent's mapping, at the same addresses: whatever frees the inherited objects later unmaps that,
and nothing that the child has mapped since. To touch what is there kills the child.
"""

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable

_NO_ACCESS, _FIXED, _NO_RESERVE = 0, 0x10, 0x4000  # PROT_NONE, MAP_FIXED, MAP_NORESERVE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)

_mappings: "weakref.WeakKeyDictionary[mmap.mmap, Callable[[], object]]" = (
    weakref.WeakKeyDictionary()
)


def leave_to_parent(mapping: mmap.mmap, close: Callable[[], object]) -> None:
    """From now on, have forked children of this process lose `mapping` and call `close` (which may
    have been called before).
    """
    _mappings[mapping] = close


def _leave() -> None:
    for mapping, close in list(_mappings.items()):
        with contextlib.suppress(OSError):  # somebody else closed it: the mapping goes all the same
            close()
        if not mapping.closed:
            _unmap_in_place(mapping)
    _mappings.clear()


def _unmap_in_place(mapping: mmap.mmap) -> None:
    first = ctypes.c_char.from_buffer(mapping)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED | _NO_RESERVE
    at, size = ctypes.addressof(first), len(mapping)
    if _libc.mmap(at, size, _NO_ACCESS, flags, -1, 0) == _FAILED:
        # a child that could still write there must not live
        os.abort()


os.register_at_fork(after_in_child=_leave)
