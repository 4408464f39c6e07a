"""What a simulated context says, without its words: the keys of its blocks, by production's hash.

Text is known by a number and a length; two contexts have a block in common exactly if they are made
of the same pieces of the same texts up to its end. Pure.
"""

from collections.abc import Iterable, MutableSequence, Sequence
from typing import Self, overload

from kimi_runtime.engine.request import KeyChain
from kimi_runtime.umbp.keys import next_key, root_key

POOL_KEY = bytes(32)


class Content:
    """A context that grows. `keys` are those of its full blocks."""

    __slots__ = ("_left", "_parent", "_tail", "block_tokens", "keys", "tokens")

    def __init__(self, block_tokens: int, *, tenant: str = "default") -> None:
        self.block_tokens, self.tokens = block_tokens, 0
        self.keys: list[bytes] = []
        self._parent = root_key(POOL_KEY, model_digest="sim", layout="sim", tenant=tenant)
        self._tail: list[int] = []
        self._left = block_tokens

    def copy(self) -> Self:
        """Another context that says the same so far."""
        made = object.__new__(type(self))
        made.block_tokens, made.tokens = self.block_tokens, self.tokens
        made.keys, made._parent = self.keys.copy(), self._parent
        made._tail, made._left = self._tail.copy(), self._left
        return made

    def become(self, other: Self) -> None:
        """Say what `other` says, which nobody extends any more."""
        self.tokens, self.keys = other.tokens, other.keys
        self._parent, self._tail, self._left = other._parent, other._tail, other._left

    def extend(self, text: int, count: int, *, start: int = 0) -> None:
        """Then come `count` tokens of `text`, from its token `start` on."""
        self.tokens += count
        end, size = start + count, self.block_tokens
        while end - start >= self._left:
            self._piece(text, start, start + self._left)
            self._parent = next_key(POOL_KEY, self._parent, self._tail)
            self.keys.append(self._parent)
            start += self._left
            self._tail, self._left = [], size
        if end > start:
            self._piece(text, start, end)
            self._left -= end - start

    def _piece(self, text: int, start: int, end: int) -> None:
        low, high = text & 0xFFFFFFFF, text >> 32
        if self._tail[-4:-2] == [low, high] and self._tail[-1] == start:
            self._tail[-1] = end  # it goes on where the last one ended
        else:
            self._tail += (low, high, start, end)


class Unsaid(MutableSequence[int]):
    """The ids of a request of which only the number matters: what they say is in its keys.

    Each is 0. Bytes would be written, moved as they grow, and never looked at.
    """

    __slots__ = ("_count",)

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        """How many there are."""
        return self._count

    @overload  # type: ignore[override]  # a tuple of a tuple is no copy
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        """A zero, or as many as the slice is long."""
        count = self._count
        if type(index) is int and 0 <= index < count:
            return 0
        if isinstance(index, slice):
            start, stop, step = index.indices(count)
            return (0,) * (stop - start if step == 1 else len(range(start, stop, step)))
        return range(count)[index] * 0

    def append(self, value: int) -> None:
        """One more."""
        self._count += 1

    def extend(self, values: Iterable[int]) -> None:
        """So many more."""
        try:
            self._count += len(values)  # type: ignore[arg-type]  # `isinstance(_, Sized)` takes longer
        except TypeError:
            self._count += sum(1 for _ in values)

    def insert(self, index: int, value: int) -> None:
        """One more, wherever it is."""
        self._count += 1

    @overload
    def __setitem__(self, index: int, value: int) -> None: ...

    @overload
    def __setitem__(self, index: slice, value: Iterable[int]) -> None: ...

    def __setitem__(self, index: int | slice, value: int | Iterable[int]) -> None:
        """Nothing is said, so nothing can be said otherwise."""
        raise TypeError("ids of which only the number is known can't be changed")

    def __delitem__(self, index: int | slice) -> None:
        """Fewer; IndexError if it is not there."""
        self._count -= len(self[index]) if isinstance(index, slice) else 1 + self[index]


class KnownChain(KeyChain):
    """The chain of a request whose every key is known already, those of its answer included."""

    def __init__(self, known: Sequence[bytes], block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.keys: list[bytes] = []
        self.known = known

    def extend(self, ids: Sequence[int]) -> None:
        """See `KeyChain.extend`; ids say nothing here, only how many there are."""
        have, full = len(self.keys), len(ids) // self.block_tokens
        if full > have:
            self.keys.extend(self.known[have:full])
