"""Kimi's vocabulary: byte-pair ranks, the split pattern, and 256 special slots behind the ranks.

The rank file has one token a line, its bytes in base64 and its rank. Special tokens never come
from text here: a codec places their ids itself, so a user who types `<|im_end|>` gets the ids of
those ten characters and no control over the conversation.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path

import tiktoken

from kimi_runtime.errors import ConfigError, RequestError
from kimi_runtime.protocol.cuts import START, Position, cut

SPECIAL_SLOTS = 256
OFFICIAL_NAME = "tiktoken.model"
OFFICIAL_SHA256 = "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"
OFFICIAL_RANKS = 163_584

# Slots relative to the rank count. Every other slot is a reserved token, named by its absolute id.
SLOT_NAMES: Mapping[int, str] = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"

SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""What may become one token, first alternative first; `&&` is set intersection."""


class Vocabulary:
    """Text to ids and ids to bytes. Immutable; may be used by several threads.

    Ids `0 .. rank_count - 1` are byte sequences, the 256 behind them are special tokens. A model
    may have more rows than that and, with random weights, emit such an id: an id outside the table
    is an unknown special token, it decodes to no bytes and has a name.
    """

    def __init__(self, ranks: Mapping[bytes, int], digest: str) -> None:
        """`ranks` must have the ranks 0 .. n-1 once each and every single byte (ConfigError)."""
        tokens: list[bytes] = [b""] * len(ranks)
        for token, rank in ranks.items():
            if not 0 <= rank < len(tokens) or tokens[rank]:
                raise ConfigError(
                    f"the vocabulary's {len(tokens)} ranks must be 0 to {len(tokens) - 1}, "
                    f"once each; {rank} is out of range or twice; use an unmodified rank file"
                )
            tokens[rank] = token
        missing = [byte for byte in range(256) if bytes((byte,)) not in ranks]
        if missing:
            raise ConfigError(
                f"the vocabulary lacks the single byte {missing[0]:#04x} and {len(missing) - 1} "
                "more, so some text would have no ids; use a byte-level rank file"
            )
        self._tokens = tokens
        self._digest = digest
        self._encoding = tiktoken.Encoding(
            name=f"kimi-{digest[:12]}",
            pat_str=SPLIT_PATTERN,
            mergeable_ranks=dict(ranks),
            special_tokens={},
        )
        base = len(tokens)
        self._names = [
            SLOT_NAMES.get(slot, f"<|reserved_token_{base + slot}|>")
            for slot in range(SPECIAL_SLOTS)
        ]
        self._ids = {name: base + slot for slot, name in enumerate(self._names)}

    @property
    def rank_count(self) -> int:
        """How many ids stand for bytes; the first special id."""
        return len(self._tokens)

    @property
    def size(self) -> int:
        """Ranks and special slots together."""
        return len(self._tokens) + SPECIAL_SLOTS

    @property
    def digest(self) -> str:
        """Hex digest of the rank file: equal digests mean equal ids for equal text."""
        return self._digest

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Every special token's id, by name, in slot order."""
        return self._ids

    def special(self, name: str) -> int:
        """The id of a special token. Raises KeyError for a name that is none."""
        return self._ids[name]

    def is_special(self, token: int) -> bool:
        """Whether the id stands for no bytes: a special token, or one outside the table."""
        return not 0 <= token < len(self._tokens)

    def name(self, token: int) -> str:
        """What people call a special token; an id outside the table is `<|unknown_token_N|>`."""
        slot = token - len(self._tokens)
        if 0 <= slot < SPECIAL_SLOTS:
            return self._names[slot]
        if slot < 0 <= token:
            return self._tokens[token].decode("utf-8", "backslashreplace")
        return f"<|unknown_token_{token}|>"

    def encode_text(self, text: str, at: Position = START) -> list[int]:
        """The ids of plain text that lies at `at`; special tokens in it are plain text too.

        Raises RequestError for text with a lone surrogate, which has no UTF-8 form.
        """
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise RequestError(
                f"text has the lone surrogate U+{ord(text[exc.start]):04X} at character "
                f"{exc.start}, which is not valid Unicode; send valid UTF-8"
            ) from exc
        pieces, _ = cut(text, at)
        if len(pieces) == 1:
            return self._encoding.encode_ordinary(pieces[0])
        return [token for piece in pieces for token in self._encoding.encode_ordinary(piece)]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id: empty for special and unknown ids."""
        return self._tokens[token] if 0 <= token < len(self._tokens) else b""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of all ids, special and unknown ids left out. May end inside a character."""
        return b"".join(map(self.token_bytes, ids))

    def decode_text(self, ids: Iterable[int]) -> str:
        """`decode_bytes` as text; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


def open_vocabulary(path: Path | None = None) -> Vocabulary:
    """Read a rank file; None is the packaged test vocabulary of 2,048 ranks.

    A file named `tiktoken.model` must be Moonshot's own, byte for byte, because weights are
    trained on exactly these ids. Raises ConfigError for a file that cannot be read or is no rank
    file.
    """
    if path is None:
        data = (resources.files("kimi_runtime.protocol") / "data" / "test.ranks").read_bytes()
        return Vocabulary(_ranks(data, "the packaged vocabulary"), _digest(data))
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read the vocabulary {path}: {exc.strerror or exc}") from exc
    digest = _digest(data)
    if path.name == OFFICIAL_NAME and digest != OFFICIAL_SHA256:
        raise ConfigError(
            f"{path} has sha256 {digest}, but Kimi's {OFFICIAL_NAME} has {OFFICIAL_SHA256}; "
            "fetch it again, or rename it if another vocabulary is meant"
        )
    vocabulary = Vocabulary(_ranks(data, str(path)), digest)
    if digest == OFFICIAL_SHA256:
        _check_official(vocabulary)
    return vocabulary


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _ranks(data: bytes, where: str) -> dict[bytes, int]:
    """Parse a rank file. Raises ConfigError naming the line that is none."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as exc:
            raise ConfigError(
                f"{where}, line {number}: expected base64 bytes and a rank, got {line[:60]!r}"
            ) from exc
        if len(ranks) != number:
            raise ConfigError(f"{where}, line {number}: this token is there twice")
    if not ranks:
        raise ConfigError(f"{where} is empty; give a rank file")
    return ranks


def _check_official(vocabulary: Vocabulary) -> None:
    """The ids every Kimi checkpoint relies on; a shift by one makes every conversation wrong."""
    assert vocabulary.rank_count == OFFICIAL_RANKS
    assert vocabulary.special("<|im_end|>") == 163_586
    assert vocabulary.special("<|tool_calls_section_begin|>") == 163_595
    assert vocabulary.special("</think>") == 163_607
    assert vocabulary.special("[PAD]") == 163_839
    assert vocabulary.encode_text("don't 12345") == [88709, 220, 6694, 2899]
