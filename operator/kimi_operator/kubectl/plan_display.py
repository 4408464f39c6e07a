"""A plan for people."""

from collections.abc import Iterator
from difflib import unified_diff

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kimi_operator.field_changes import FieldChange
from kimi_operator.kubectl.planning import names
from kimi_operator.plan import ObjectChange, Plan
from kimi_operator.rollout import Stage

MARKS = {
    "create": ("+", "green"),
    "change": ("~", "yellow"),
    "repair": ("!", "magenta"),
    "delete": ("-", "red"),
}
FIELDS_SHOWN = 12


def show_plan(plan: Plan, console: Console) -> None:
    """Print it."""
    where = f"{plan.name} in namespace {plan.namespace}"
    if plan.refusal is not None:
        _line(console, f"{where}: refused: {plan.refusal.reason}: {plan.refusal.message}", "red")
        _fields(console, plan.spec, "  ")
        return
    if plan.empty:
        _line(console, f"{where}: nothing would change")
        _ends(plan, console)
        return
    _line(console, f"{where}: {'changed' if plan.exists else 'new'}", "bold")
    _fields(console, plan.spec, "  ")
    for key in plan.taken:
        _line(console, f"  {key} is there and belongs to somebody else: it stays as it is", "red")
    _objects(plan, console)
    _rollout(plan, console)
    _daemons(plan, console)
    _ends(plan, console)


def _objects(plan: Plan, console: Console) -> None:
    if not (plan.changes or plan.once):
        return
    _line(console, "\nobjects, from now to the end of the rollout:", "bold")
    for change in plan.changes:
        mark, style = MARKS[change.action]
        _line(console, f"  {mark} {_title(change)}", style)
        _fields(console, change.fields, "      ")
    for key in plan.once:
        _line(console, f"  + {key.kind} {key.name} (created once, never read)", "green")
    counted = {action: sum(c.action == action for c in plan.changes) for action in MARKS}
    counted["create"] += len(plan.once)
    _line(console, "  " + ", ".join(f"{n} to {action}" for action, n in counted.items() if n))


def _title(change: ObjectChange) -> str:
    return f"{change.key.kind} {change.key.name}"


def _fields(console: Console, fields: tuple[FieldChange, ...], indent: str) -> None:
    for change in fields[:FIELDS_SHOWN]:
        if "\n" in (change.before or "") + (change.after or ""):
            _lines(console, change, indent)
            continue
        before = "(none)" if change.before is None else _short(change.before)
        after = "(none)" if change.after is None else _short(change.after)
        _line(console, f"{indent}{change.path}: {before} -> {after}")
    if len(fields) > FIELDS_SHOWN:
        _line(console, f"{indent}and {len(fields) - FIELDS_SHOWN} fields more (-o json has all)")


def _lines(console: Console, change: FieldChange, indent: str) -> None:
    """The lines of a text that differ."""
    _line(console, f"{indent}{change.path}:")
    before, after = ((side or "").splitlines() for side in (change.before, change.after))
    hunks = unified_diff(before, after, n=0, lineterm="")
    found = [line for line in hunks if line[:2] != "@@"][2:]
    for line in found[:FIELDS_SHOWN]:
        _line(console, f"{indent}  {line[0]} {_short(line[1:].strip())}")
    if len(found) > FIELDS_SHOWN:
        _line(console, f"{indent}  and {len(found) - FIELDS_SHOWN} lines more")


def _short(text: str, most: int = 100) -> str:
    line = text.replace("\n", "\\n")
    return line if len(line) <= most else f"{line[:most]}…"


def _rollout(plan: Plan, console: Console) -> None:
    if plan.stages and all(not _moves(stage) for stage in plan.stages):
        return
    came = f"from {plan.current_revision} " if plan.current_revision else ""
    same = plan.current_revision == plan.update_revision
    title = (
        f"within revision {plan.update_revision}" if same else f"{came}to {plan.update_revision}"
    )
    _line(console, f"\nrollout {title}, pass by pass:", "bold")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("  STEP", "WHAT", "SERVING THEN", "GPUS"):
        table.add_column(column, overflow="fold")
    for stage in plan.stages:
        serving = ", ".join(f"{count} {role}" for role, count in stage.serving.items())
        table.add_row(
            f"  {stage.step}/{stage.total_steps}",
            "; ".join(_what(stage)) or "done",
            serving,
            str(stage.gpus),
        )
    console.print(table)


def _daemons(plan: Plan, console: Console) -> None:
    if not plan.daemons:
        return
    how = {
        "operator": "replaced one node at a time, after the routers",
        "user": "of an earlier spec until their pods are deleted",
    }
    nodes = ", ".join(plan.daemons)
    _line(console, f"\npool daemons, {how[plan.daemons_by]}:", "bold")
    _line(console, f"  {nodes}")


def _moves(stage: Stage) -> bool:
    return bool(stage.created or stage.drained or stage.kept_again)


def _what(stage: Stage) -> Iterator[str]:
    if stage.drained:
        yield f"drain {', '.join(names(stage.drained))}"
    if stage.kept_again:
        yield f"keep {', '.join(names(stage.kept_again))}"
    if stage.created:
        yield f"create {', '.join(names(stage.created))}"
    if not stage.done and not _moves(stage):
        yield f"waits: {stage.waiting_for}"


def _ends(plan: Plan, console: Console) -> None:
    if plan.outage is not None:
        _line(console, f"\noutage: {plan.outage}", "red")
    if plan.waits is not None:
        _line(console, f"\nit will wait: {plan.waits}", "yellow")
    for warning in plan.warnings:
        _line(console, f"\n{warning.type}: {warning.message}", "yellow")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
