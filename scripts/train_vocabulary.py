#!/usr/bin/env python
"""Train the 2,048-rank test vocabulary over text this script generates, and write its rank file.

    python scripts/train_vocabulary.py [--check]

The corpus comes from a seeded generator, so every run writes the same bytes; `--check` compares
with the committed file instead of writing it. Byte-pair merges are learnt with Kimi's own split
pattern, in the order of their ranks, so that the file means the same to any byte-pair encoder.
"""

import argparse
import base64
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "runtime" / "kimi_runtime" / "protocol" / "data" / "test.ranks"
RANKS = 2048
SEED = 20
DOCUMENTS = 4000

SUBJECTS = """the scheduler|the router|a worker|the cache|this function|the user|the model|a test
the operator|every request|the agent|our service|the parser|a block|the queue|the client""".replace(
    "\n", "|"
).split("|")
VERBS = """reads|writes|returns|checks|keeps|moves|starts|stops|waits for|sends|computes|finds
changes|opens|closes|counts|expects|updates|removes|creates|explains|calls|shows""".replace(
    "\n", "|"
).split("|")
OBJECTS = """the next token|a list of files|the error message|its own state|the current directory
an empty string|the whole conversation|two numbers|the last result|some memory|the weather in Paris
a new branch|the configuration|the first line|an answer|the tool result|the deadline""".replace(
    "\n", "|"
).split("|")
ENDINGS = """before the step ends|when the queue is empty|because nothing else may|in order
without a copy|for each of them|as soon as it can|if there is one|again and again|on every node
with the same key|and then reports it""".replace("\n", "|").split("|")
NAMES = """path|value|index|count|name|items|result|request|token|block|state|key|size|text|line
query|city|unit|command|file|content|message|limit|offset|pattern""".replace("\n", "|").split("|")
TOOLS = """get_weather|read_file|write_file|search|run_command|list_files|edit_file|ask_user
add|fetch_url|grep|send_message""".replace("\n", "|").split("|")
CITIES = ["Paris", "Berlin", "Beijing", "Tokyo", "New York", "São Paulo", "Zürich", "Kraków"]
HAN_SUBJECTS = ["我们", "用户", "模型", "这个函数", "服务器", "今天", "程序", "他", "系统", "文件"]
HAN_VERBS = ["需要", "正在", "已经", "可以", "返回", "读取", "检查", "使用", "发送", "等待"]
HAN_OBJECTS = [
    "一个结果",
    "新的请求",
    "所有的数据",
    "天气信息",
    "错误的消息",
    "这段代码",
    "下一个词",
]
OTHERS = [
    "Der Speicher ist voll, bitte später noch einmal versuchen.",
    "El servidor no respondió; inténtalo de nuevo más tarde.",
    "Le modèle répond à la question posée par l'utilisateur.",
    "Сервер отвечает на запрос и ждёт следующего.",
    "サーバーは次のリクエストを待っています。",
    "서버가 다음 요청을 기다리고 있습니다.",
    "Well done 🙂 — that's it… “quoted” text → next ✓",
]


def sentence(draw: random.Random) -> str:
    """One English sentence."""
    words = f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(OBJECTS)}"
    if draw.random() < 0.6:
        words += f" {draw.choice(ENDINGS)}"
    if draw.random() < 0.2:
        words = f"I don't think that {words}, but it's what we'll see if they're right"
    return words[0].upper() + words[1:] + draw.choice([".", ".", ".", "!", "?", ":"])


def prose(draw: random.Random) -> str:
    """A paragraph, sometimes a Markdown list."""
    sentences = [sentence(draw) for _ in range(draw.randint(1, 6))]
    if draw.random() < 0.3:
        return f"## {sentences[0]}\n\n" + "\n".join(f"- {text}" for text in sentences) + "\n"
    return " ".join(sentences) + "\n"


def han(draw: random.Random) -> str:
    """Chinese sentences."""
    clauses = [
        draw.choice(HAN_SUBJECTS) + draw.choice(HAN_VERBS) + draw.choice(HAN_OBJECTS)
        for _ in range(draw.randint(2, 6))
    ]
    return "\uff0c".join(clauses) + draw.choice(["\u3002", "\uff01", "\uff1f"])


def arguments(draw: random.Random) -> dict[str, object]:
    """An object like those that tools are called with."""
    values: list[Callable[[], object]] = [
        lambda: draw.choice(CITIES),
        lambda: draw.randint(0, 9999),
        lambda: draw.random() < 0.5,
        lambda: sentence(draw),
        lambda: f"/src/{draw.choice(NAMES)}/{draw.choice(NAMES)}.py",
        lambda: [draw.choice(NAMES) for _ in range(draw.randint(0, 3))],
        lambda: {draw.choice(NAMES): draw.randint(0, 99)},
        lambda: None,
    ]
    names = draw.sample(NAMES, draw.randint(1, 4))
    return {name: draw.choice(values)() for name in names}


def call(draw: random.Random) -> str:
    """A tool call's header, arguments and result."""
    tool, number = draw.choice(TOOLS), draw.randint(0, 12)
    body = json.dumps(arguments(draw), ensure_ascii=False)
    result = json.dumps(arguments(draw), indent=draw.choice([None, 2]))
    return f"functions.{tool}:{number}{body}\n## Return of functions.{tool}:{number}\n{result}"


def declaration(draw: random.Random) -> str:
    """Tools as a prompt declares them."""
    lines = ["# Tools", "", "## functions", "namespace functions {"]
    for tool in draw.sample(TOOLS, draw.randint(1, 3)):
        lines += [f"// {sentence(draw)}", f"type {tool} = (_: {{"]
        kinds = ["string", "number", "boolean", "Array<string>"]
        fields = [
            f"  {name}{draw.choice(['', '?'])}: {draw.choice(kinds)}"
            for name in draw.sample(NAMES, draw.randint(1, 3))
        ]
        lines += [",\n".join(fields), "}) => any;"]
    return "\n".join([*lines, "}\n"])


def python_code(draw: random.Random) -> str:
    """A Python function."""
    a, b, c = draw.sample(NAMES, 3)
    return (
        f"def {draw.choice(TOOLS)}(self, {a}: int, {b}: str = None) -> list[str]:\n"
        f'    """{sentence(draw)}"""\n'
        f"    {c} = []\n    for {a} in range(len({b})):\n"
        f"        if {a} % {draw.randint(2, 64)} == 0 and {b}[{a}] is not None:\n"
        f"            {c}.append({b}.{a})\n        else:\n            raise ValueError({b!r})\n"
        f"    return {c}\n\n\nclass {a.title()}{b.title()}:\n    import {c}\n"
    )


def other_code(draw: random.Random) -> str:
    """JavaScript, shell or C."""
    a, b, c = draw.sample(NAMES, 3)
    return draw.choice(
        [
            f"const {a} = await {b}({{ {c}: {draw.randint(0, 999)} }});\n"
            f"if (!{a}) {{\n  throw new Error(`{c} not found`);\n}}\nexport default {b};\n",
            f"$ git diff --stat | grep {a} && ls -la ./{b}\n"
            f"cat {c}.txt > /tmp/{a}.log 2>&1 || exit 1\n",
            f"static int {a}_{b}(const char *{c}, size_t {a}) {{\n"
            f"\tfor (int i = 0; i < {a}; i++) {{\n"
            f"\t\tif ({c}[i] == '\\0') {{\n\t\t\treturn -1;\n\t\t}}\n\t}}\n\treturn 0;\n}}\n",
            f"diff --git a/{a}.py b/{a}.py\n@@ -{draw.randint(1, 99)},7 +12,9 @@\n-    {b} = 1\n"
            f"+    {b} = {c}({draw.randint(1, 9999)})\n",
        ]
    )


def corpus() -> Iterator[str]:
    """The documents, always the same."""
    draw = random.Random(SEED)
    kinds = [prose, prose, prose, han, call, call, declaration, python_code, other_code]
    for number in range(DOCUMENTS):
        yield draw.choice(kinds)(draw)
        if number % 20 == 0:
            yield OTHERS[number // 20 % len(OTHERS)]
        if number % 10 == 0:
            yield draw.choice(["user", "assistant", "system", "tool", "tool_declare"])


def byte_of_char() -> dict[str, int]:
    """The byte that each character of the byte-level alphabet stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }


def train(split_pattern: str) -> bytes:
    """The rank file's bytes."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [
            Split(Regex(split_pattern), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = BpeTrainer(
        vocab_size=RANKS, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    table = byte_of_char()
    ranks = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    lines = [
        base64.b64encode(bytes(table[char] for char in token)) + b" %d\n" % rank
        for token, rank in ranks
    ]
    if len(lines) != RANKS:
        raise SystemExit(f"the corpus gave {len(lines)} ranks, not {RANKS}; enlarge it")
    return b"".join(lines)


def main() -> int:
    """Write the file, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "runtime"))
    from kimi_runtime.protocol.vocabulary import SPLIT_PATTERN

    data = train(SPLIT_PATTERN)
    if args.check:
        fresh = TARGET.read_bytes() == data
        print(f"{TARGET.name} is {'fresh' if fresh else 'stale: run this script'}")
        return 0 if fresh else 1
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_bytes(data)
    print(f"wrote {len(data)} bytes to {TARGET.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
