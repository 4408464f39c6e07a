"""What the engine needs of a runner whose model has a recurrent state beside its KV."""

from typing import NamedTuple, Protocol


class StateMemory(Protocol):
    """The states of the requests that a runner computes, opaque and of one size.

    A row that starts at position 0 begins with no state, whatever was here; every other row begins
    with the state that is here, and leaves the one after its last token.
    """

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""

    def state(self, request: int) -> memoryview:
        """The writable bytes of a request's state, valid until it is dropped."""

    def drop(self, request: int) -> None:
        """The request has ended; nothing happens if it has no state."""


class KeptState(NamedTuple):
    """A copy of the state behind the blocks `keys`."""

    keys: tuple[bytes, ...]
    state: bytes
    tenant: str
