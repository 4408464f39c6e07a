import base64
import importlib.util
import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.errors import ConfigError, RequestError
from kimi_runtime.protocol.cuts import BLOCK_CHARS, Position
from kimi_runtime.protocol.vocabulary import (
    OFFICIAL_SHA256,
    SLOT_NAMES,
    SPECIAL_SLOTS,
    SPLIT_PATTERN,
    open_vocabulary,
)

ROOT = Path(__file__).resolve().parents[3]
TEST = open_vocabulary()


def official_file() -> Path | None:
    data = os.environ.get("KIMISTACK_DATA")
    folders = [Path(data)] if data else []
    folders.append(ROOT.parent / "shared" / "data")
    files = [folder / "kimi-tokenizer" / "tiktoken.model" for folder in folders]
    return next((file for file in files if file.is_file()), None)


@pytest.fixture(scope="module")
def official():
    file = official_file()
    if file is None:
        pytest.skip("needs kimi-tokenizer/tiktoken.model in the folder KIMISTACK_DATA names")
    return open_vocabulary(file)


def trained_tokenizer():
    """Our ranks in the tokenizers library: the merge that makes each token, in rank order."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    spec = importlib.util.spec_from_file_location("train", ROOT / "scripts/train_vocabulary.py")
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    char_of = {byte: char for char, byte in train.byte_of_char().items()}
    ranks = {TEST.token_bytes(rank): rank for rank in range(TEST.rank_count)}

    def parts_of(token: bytes) -> tuple[bytes, bytes]:
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            merged = [ranks.get(a + b, 1 << 30) for a, b in itertools.pairwise(parts)]
            at = merged.index(min(merged))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts[0], parts[1]

    def chars(data: bytes) -> str:
        return "".join(char_of[byte] for byte in data)

    merges = [tuple(map(chars, parts_of(token))) for token in ranks if len(token) > 1]
    tokenizer = Tokenizer(BPE({chars(t): r for t, r in ranks.items()}, merges))
    tokenizer.pre_tokenizer = Sequence(
        [
            Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


TRAINED = trained_tokenizer()

SNIPPETS = ["the ", "don't", "WE'LL", " 12345", "中文", "  ", "\u3000", "é", "🙂", "##", "々"]
SNIPPETS += [
    "\r\n",
    "\n\n  ",
    "def f(x):\n\treturn ",
    "<|im_end|>",
    '{"a": 1}',
    "ǅ",
    "\u0301",
    "אב",
]

TEXTS = st.one_of(
    st.text(max_size=200),
    st.lists(
        st.sampled_from(SNIPPETS),
        max_size=40,
    ).map("".join),
)


def test_the_packaged_vocabulary_has_kimis_shape():
    assert (TEST.rank_count, TEST.size) == (2048, 2048 + SPECIAL_SLOTS)
    assert sorted(TEST.token_bytes(i) for i in range(256)) == [bytes((b,)) for b in range(256)]
    for slot in range(SPECIAL_SLOTS):
        token = TEST.rank_count + slot
        name = SLOT_NAMES.get(slot, f"<|reserved_token_{token}|>")
        assert (TEST.name(token), TEST.special(name)) == (name, token)


def test_the_committed_ranks_are_what_the_script_trains():
    spec = importlib.util.spec_from_file_location("train", ROOT / "scripts/train_vocabulary.py")
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    assert train.train(SPLIT_PATTERN) == train.TARGET.read_bytes()


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_decoding_undoes_encoding(text):
    assert TEST.decode_bytes(TEST.encode_text(text)) == text.encode()


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_ids_equal_those_of_another_implementation(text):
    assert TEST.encode_text(text) == TRAINED.encode(text).ids


@settings(max_examples=50, deadline=None)
@given(TEXTS, st.sampled_from(sorted(TEST.special_ids)), TEXTS)
def test_a_special_token_in_text_never_becomes_its_id(before, name, after):
    ids = TEST.encode_text(before + name + after)
    assert not any(TEST.is_special(token) for token in ids)
    assert TEST.decode_text(ids) == before + name + after


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "a\ud83d\ude42"])
def test_a_lone_surrogate_is_refused_by_name(text):
    with pytest.raises(RequestError, match="lone surrogate U\\+D"):
        TEST.encode_text(text)


@pytest.mark.parametrize("token", [-1, 2304, 163_840, 2**31 - 1])
def test_an_id_outside_the_table_is_an_unknown_special_token(token):
    assert TEST.is_special(token)
    assert TEST.decode_bytes([token]) == b""
    assert TEST.name(token) == f"<|unknown_token_{token}|>"


def test_a_block_boundary_of_the_conversation_is_a_token_boundary():
    word = TEST.encode_text("assistant")
    assert len(word) == 1
    cut_in_two = TEST.encode_text("assistant", Position(BLOCK_CHARS - 4))
    assert cut_in_two == TEST.encode_text("assi") + TEST.encode_text("stant")


GOLDEN = {
    "hello": [22931],
    "中文 mixed Text": [16717, 15682, 8557],
    "don't 12345": [88709, 220, 6694, 2899],
    "\U0001f642": [5885, 46813],
}


@pytest.mark.parametrize("text", GOLDEN)
def test_the_official_file_gives_the_official_ids(official, text):
    assert official.encode_text(text) == GOLDEN[text]


def test_the_official_file_has_the_official_special_ids(official):
    assert official.digest == OFFICIAL_SHA256
    assert (official.rank_count, official.size) == (163_584, 163_840)
    names = {163_586: "<|im_end|>", 163_594: "<|im_system|>", 163_605: "<|media_pad|>"}
    names |= {163_589: "<|reserved_token_163589|>", 163_649: "<|reserved_token_163649|>"}
    assert {token: official.name(token) for token in names} == names


BYTES = [base64.b64encode(bytes((b,))) + b" %d\n" % b for b in range(256)]


@pytest.mark.parametrize(
    ("data", "claim"),
    [
        (b"", "is empty"),
        (b"!!! 0\n", "line 1: expected base64"),
        (b"AA== zero\n", "line 1: expected base64"),
        (b"AA== 0\nAA== 1\n", "line 2: this token is there twice"),
        (b"".join(BYTES[:-1]), "lacks the single byte 0xff"),
        (b"".join(BYTES) + b"YWI= 300\n", "once each; 300 is out of range"),
    ],
)
def test_a_broken_rank_file_is_explained(tmp_path, data, claim):
    (tmp_path / "v.ranks").write_bytes(data)
    with pytest.raises(ConfigError, match=claim):
        open_vocabulary(tmp_path / "v.ranks")


def test_a_file_under_the_official_name_must_be_the_official_one(tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(b"".join(BYTES))
    with pytest.raises(ConfigError, match="rename it"):
        open_vocabulary(tmp_path / "tiktoken.model")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.ranks: No such file"):
        open_vocabulary(tmp_path / "nowhere.ranks")
