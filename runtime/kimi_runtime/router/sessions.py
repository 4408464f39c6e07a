"""Which conversation a request continues, and the ids that conversation really has.

A session is found by its longest known prefix within the tenant; a client's session id only breaks
ties. Prefixes are compared by what they say (special ids and the bytes between them), not by ids:
a model may sample other ids for a text than the encoder would give it. While a resent history says
the same as what was sampled, the sampled ids stay the prompt, since the KV cache was made from
them; from the first message that differs on, the encoder's ids are used. Pure: time is an argument.
"""

import hashlib
import struct
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kimi_runtime.protocol.chat import Rendered
from kimi_runtime.protocol.vocabulary import Vocabulary
from kimi_runtime.umbp.keys import block_keys, root_key

DIGEST_BYTES = 16
REMEMBERED_SEGMENTS = 65_536


@dataclass(frozen=True, slots=True)
class Geometry:
    """What decides block keys besides ids: workers that agree on it share names for KV."""

    model_digest: str
    layout: str
    block_tokens: int


@dataclass(eq=False, slots=True)
class Session:
    """One conversation: its ids so far, and the digests of its prefixes at message ends."""

    id: bytes
    tenant: str
    hint: str | None
    first_turn_tokens: int
    """Where the first prompt's messages ended: a match at least this long continues the session."""
    ids: "array[int]" = field(default_factory=lambda: array("I"))
    ends: dict[bytes, int] = field(default_factory=dict)
    """Digest of everything up to a message's end -> how many ids of `ids` that is."""
    owners: tuple[str, ...] = ()
    keys: Mapping[Geometry, Sequence[bytes]] = field(default_factory=dict)
    """Of the full blocks of `ids`."""
    turns: int = 0
    moved_s: float | None = None
    """When all its owners last changed."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request's place in its session."""

    session: Session
    ids: tuple[int, ...]
    """The prompt: sampled ids as far as they hold, the encoder's after that."""
    kept_tokens: int
    """Ids at the front that are known from earlier turns."""
    ends: Mapping[bytes, int]
    """Like `Session.ends`, for `ids`."""
    last_digest: bytes
    known_keys: Mapping[Geometry, Sequence[bytes]]
    """Keys of a conversation that has the first `kept_tokens` ids in common with this one."""
    continues: bool
    reencoded: bool
    """The session's newest output was resent with another text, so its ids were given up."""
    parent: Session | None = None
    """Of a new session: the one that `kept_tokens` are known from."""
    hint: str | None = None
    """The client's word for the conversation in this request."""


class Sessions:
    """At most `max_sessions` conversations of `max_ids` ids together; the coldest are forgotten."""

    def __init__(
        self, vocabulary: Vocabulary, pool_key: bytes, *, max_sessions: int, max_ids: int
    ) -> None:
        self._vocabulary, self._pool_key = vocabulary, pool_key
        self._end_id = vocabulary.special("<|im_end|>")
        self._max_sessions, self._max_ids = max_sessions, max_ids
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        self._by_digest: dict[bytes, dict[int, Session]] = {}
        self._memo: OrderedDict[bytes, bytes] = OrderedDict()
        self.total_ids = 0
        self.reencoded = 0
        self.kept = 0

    def __len__(self) -> int:
        """How many conversations are remembered."""
        return len(self._sessions)

    def begin(self, tenant: str, hint: str | None, rendered: Rendered) -> Turn:
        """The turn a rendered prompt makes. Changes nothing until `end`."""
        digests, last_digest = self._digests(tenant, rendered)
        origin, end, kept = self._deepest(tenant, hint, digests)
        ids, shift = rendered.ids, kept - end
        ends = {digest: position + shift for digest, position in digests if position >= end}
        if origin is not None:
            ids = (*origin.ids[:kept], *rendered.ids[end:])
            ends |= {
                digest: position for digest, position in origin.ends.items() if position < kept
            }
        continues = origin is not None and kept >= origin.first_turn_tokens
        session = origin
        if session is None or not continues:
            first = max(ends.values(), default=0)
            session = Session(last_digest, tenant, hint, first_turn_tokens=first)
        return Turn(
            session=session,
            ids=ids,
            kept_tokens=kept,
            ends=ends,
            last_digest=last_digest,
            known_keys={} if origin is None else origin.keys,
            continues=continues,
            reencoded=continues and kept < max(session.ends.values(), default=0),
            parent=None if continues else origin,
            hint=hint,
        )

    def keys(self, turn: Turn, geometry: Geometry) -> list[bytes]:
        """Block keys of the turn's full blocks; only blocks that are new to the session are hashed.

        They are the same for equal ids, geometry and tenant, whoever computes them.
        """
        known = turn.known_keys.get(geometry, ())[: turn.kept_tokens // geometry.block_tokens]
        return self._grown(known, turn.ids, geometry, turn.session.tenant)

    def end(
        self,
        turn: Turn,
        output: Sequence[int],
        *,
        owners: Sequence[str],
        keys: Mapping[Geometry, Sequence[bytes]],
        now_s: float = 0.0,
    ) -> None:
        """The turn was served: its prompt and output are the session's history from now on.

        A history's message ends with `end_id`, however the output ended (with `[EOS]`, or cut by a
        limit). KV of the last id was never computed, so it may be exchanged.
        """
        session = turn.session
        self._unlink(session)
        if output and self._vocabulary.is_special(output[-1]):
            output = output[:-1]
        session.ids = array("I", (*turn.ids, *output, self._end_id))
        start = max(turn.ends.values(), default=0)
        digest = self._chain(turn.last_digest, session.ids[start:])
        session.ends = {**turn.ends, digest: len(session.ids)}
        session.hint = turn.hint or session.hint  # clients begin to name it, or name it anew
        if session.owners and not {*owners} & {*session.owners}:
            session.moved_s = now_s
        session.owners, session.turns = tuple(owners), session.turns + 1
        session.keys = {
            geometry: self._grown(known, session.ids, geometry, session.tenant)
            for geometry, known in keys.items()
        }
        self.kept += not turn.reencoded and turn.continues
        self.reencoded += turn.reencoded
        self._link(session)
        while len(self._sessions) > self._max_sessions or (
            self.total_ids > self._max_ids and len(self._sessions) > 1
        ):
            self._unlink(next(iter(self._sessions.values())))

    def _grown(
        self, known: Sequence[bytes], ids: Sequence[int], geometry: Geometry, tenant: str
    ) -> list[bytes]:
        """The keys of all full blocks of `ids`, of which the first are `known`."""
        keys, size = list(known), geometry.block_tokens
        parent = root_key(
            self._pool_key,
            model_digest=geometry.model_digest,
            layout=geometry.layout,
            tenant=tenant,
        )
        new_ids = ids[len(keys) * size :]
        return keys + block_keys(self._pool_key, keys[-1] if keys else parent, new_ids, size)

    def _digests(self, tenant: str, rendered: Rendered) -> tuple[list[tuple[bytes, int]], bytes]:
        digest = hashlib.blake2b(tenant.encode(), digest_size=DIGEST_BYTES).digest()
        digests, start = [], 0
        for position in rendered.boundaries:
            digest = self._chain(digest, rendered.ids[start:position])
            digests.append((digest, position))
            start = position
        return digests, digest

    def _chain(self, parent: bytes, ids: Sequence[int]) -> bytes:
        """The digest of what `ids` say after `parent`, however the text is cut into ids."""
        packed = array("I", ids).tobytes()
        memo_key = hashlib.blake2b(parent + packed, digest_size=DIGEST_BYTES).digest()
        known = self._memo.get(memo_key)
        if known is None:
            known = self._memo[memo_key] = self._said(parent, ids)
            if len(self._memo) > REMEMBERED_SEGMENTS:
                self._memo.popitem(last=False)
        return known

    def _said(self, parent: bytes, ids: Sequence[int]) -> bytes:
        special, token_bytes = self._vocabulary.is_special, self._vocabulary.token_bytes
        chained = hashlib.blake2b(parent, digest_size=DIGEST_BYTES)
        text: list[bytes] = []
        for number in ids:
            if special(number):
                said = _as_shown(text)
                chained.update(struct.pack("<QI", len(said), number) + said)
                text = []
            else:
                text.append(token_bytes(number))
        said = _as_shown(text)
        chained.update(struct.pack("<Q", len(said)) + said)
        return chained.digest()

    def _deepest(
        self, tenant: str, hint: str | None, digests: Sequence[tuple[bytes, int]]
    ) -> tuple[Session | None, int, int]:
        for digest, position in reversed(digests):
            holders = self._by_digest.get(digest)
            if holders:
                newest_first = [holders[key] for key in reversed(holders)]
                session = next(
                    (one for one in newest_first if hint is not None and one.hint == hint),
                    newest_first[0],
                )
                assert session.tenant == tenant  # the tenant is in every digest
                return session, position, session.ends[digest]
        return None, 0, 0

    def _link(self, session: Session) -> None:
        self._sessions[id(session)] = session
        self.total_ids += len(session.ids)
        for digest in session.ends:
            self._by_digest.setdefault(digest, {})[id(session)] = session

    def _unlink(self, session: Session) -> None:
        if self._sessions.pop(id(session), None) is None:
            return
        self.total_ids -= len(session.ids)
        for digest in session.ends:
            holders = self._by_digest[digest]
            del holders[id(session)]
            if not holders:
                del self._by_digest[digest]


def _as_shown(parts: Sequence[bytes]) -> bytes:
    """The bytes as a client sees and resends them: what is no UTF-8 as U+FFFD."""
    return b"".join(parts).decode(errors="replace").encode()
