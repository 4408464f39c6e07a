"""The examination's table."""

from collections.abc import Iterator

from kimi_runtime.bench.quality.run import Result

FLOORS = {"right tool": 0.95, "right arguments": 0.90}
"""What kimi-nano must reach on held-out dialogues, with thinking."""

_ROWS = ("right tool", "right arguments", "valid JSON", "answer from a result", "recall", "lookup")


def markdown(result: Result) -> str:
    """A table with what was asked how often, what was right, and the floor where there is one."""
    plan = result.plan
    lines = [
        f"`{result.model}` (digest `{result.digest[:12]}`), {plan.dialogues} held-out dialogues, "
        f"seed {plan.seed}, greedy, {'thinking' if plan.thinking else 'instant'}, no grammar:",
        "",
        "| | right | asked | share | floor |",
        "| --- | --- | --- | --- | --- |",
        *_rows(result),
    ]
    return "\n".join(lines) + "\n"


def missed(result: Result) -> list[str]:
    """The floors that were not reached."""
    return [name for name, floor in FLOORS.items() if result.tally.share(name) < floor]


def _rows(result: Result) -> Iterator[str]:
    needles = tuple(f"needle {tokens}" for tokens in result.plan.needle_tokens)
    for name in (*_ROWS, *needles):
        right, asked = result.tally.counts.get(name, (0, 0))
        if not asked:
            continue
        floor = f"{FLOORS[name]:.0%}" if name in FLOORS else ""
        label = f"key in a text of {name.split()[1]} tokens" if name in needles else name
        yield f"| {label} | {right} | {asked} | {right / asked:.1%} | {floor} |"
