"""Reports as text for a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kimi_operator.kubectl.report import InstanceLine, StatusReport
from kimi_operator.kubectl.top import TopReport

GOOD, BAD, UNKNOWN = "green", "red", "yellow"
HOLDS_WHEN_FALSE = frozenset({"Degraded", "Progressing", "Reconciling", "Stalled"})
"""Conditions whose False is the good answer."""
SENTENCES = frozenset({"MESSAGE", "BLOCKED"})
UNBOUNDED = 100_000
STATES = {"serving": GOOD, "failing": BAD}


def line(console: Console, text: str, style: str = "") -> None:
    """One line, not broken by the width of the terminal."""
    console.print(Text(text, style=style), soft_wrap=True)


def show_status(report: StatusReport, console: Console, now_s: float) -> None:
    """Print a StatusReport."""
    word = "Ready" if report.ready else "not Ready"
    line(console, f"{report.name} in namespace {report.namespace}: {word}", _good(report.ready))
    if report.url:
        line(console, f"  {report.model or 'its model'} at {report.url}")
    if report.gpu:
        budget = report.gpu.get("budget")
        of = f" of {budget}" if budget is not None else ""
        line(console, f"  GPUs: {report.gpu.get('used', 0)}{of}")
    if report.rollout:
        since = report.rollout.get("startedAt")
        began = f", begun {since}" if since else ""
        line(
            console, f"  rollout: step {report.rollout['step']} of {report.rollout['total']}{began}"
        )
    if report.recommendation:
        line(console, f"  recommendation: {report.recommendation}")
    if report.todo:
        line(console, "\nwhat to do", "bold")
        for todo in report.todo:
            line(console, f"  {todo}", UNKNOWN)
    _conditions(report.conditions, console)
    _roles(report.roles, console)
    _instances(report.instances, console, now_s)
    _revisions(report, console, now_s)


def _conditions(conditions: Iterable[Mapping[str, Any]], console: Console) -> None:
    table = _table("CONDITION", "STATUS", "REASON", "MESSAGE")
    for condition in conditions:
        good = (condition["status"] == "True") != (condition["type"] in HOLDS_WHEN_FALSE)
        style = UNKNOWN if condition["status"] == "Unknown" else _good(good)
        message = condition.get("message") or ""
        table.add_row(
            condition["type"],
            Text(condition["status"], style=style),
            condition["reason"],
            "" if message == condition["reason"] else message,
        )
    _titled(console, "conditions", table)


def _roles(roles: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    table = _table("ROLE", "DESIRED", "READY", "SERVING", "UPDATED", "REVISION", "OWNER", "BLOCKED")
    for name, role in roles.items():
        counts = (role.get(field, 0) for field in ("desired", "ready", "serving", "updated"))
        rest = (role.get(field) or "" for field in ("revision", "owner", "blocked"))
        table.add_row(name, *map(str, counts), *rest)
    _titled(console, "roles", table)


def _instances(instances: Sequence[InstanceLine], console: Console, now_s: float) -> None:
    table = _table("INSTANCE", "STATE", "READY", "IN FLIGHT", "AGE", "POD", "NODE", "POD STATE")
    for one in instances:
        first: list[str | Text] = [
            one.instance,
            Text(one.state, style=STATES.get(one.state, UNKNOWN)),
            f"{one.pods_ready}/{one.pods_desired}",
            number(one.in_flight),
            age(now_s - one.created_s),
        ]
        if not one.pods:
            table.add_row(*first, "-", "-", "-")
        for index, pod in enumerate(one.pods):
            restarts = f", {pod.restarts} restarts" if pod.restarts else ""
            head = first if index == 0 else [""] * len(first)
            table.add_row(*head, pod.pod, pod.node or "-", f"{pod.phase}{restarts}")
    _titled(console, "instances", table)
    for one in instances:
        for failure in one.failures:
            line(console, f"{one.instance}: {failure}", BAD)


def _revisions(report: StatusReport, console: Console, now_s: float) -> None:
    table = _table("REVISION", "NUMBER", "USE", "INSTANCES", "AGE", "")
    for one in report.revisions:
        table.add_row(
            one.revision,
            str(one.number),
            one.use or "-",
            str(one.instances),
            age(now_s - one.created_s),
            "failed" if one.failed else "",
        )
    _titled(console, "revisions", table)


def show_top(report: TopReport, console: Console) -> None:
    """Print a TopReport."""
    fleet = report.fleet
    line(console, f"{report.name} in namespace {report.namespace}, {fleet.routers} routers heard")
    parts = {
        "waiting": str(fleet.waiting_requests),
        "parked": str(fleet.parked_requests) if fleet.parked_requests else None,
        "queue": _seconds(fleet.queue_s),
        "TTFT p90": _seconds(fleet.ttft_p90_s),
        "ITL p90": _seconds(fleet.itl_p90_s),
        "KV use": _share(fleet.kv_use),
        "hand-off backlog": _seconds(fleet.transfer_backlog_s),
    }
    line(console, "  " + ", ".join(f"{name} {value}" for name, value in parts.items() if value))
    for silent in report.silent:
        line(console, f"  not heard: {silent}", UNKNOWN)
    table = _table(
        "WORKER",
        "ROLE",
        "NODE",
        "STATE",
        "IN FLIGHT",
        "WAITING",
        "KV USE",
        "TOK/S",
        "CACHED",
        "HEARD",
    )
    for one in report.workers:
        state = "draining" if one.draining else "ready" if one.ready else "not ready"
        table.add_row(
            one.pod,
            one.role,
            one.node or "-",
            Text(state, style=_good(one.ready and not one.draining)),
            number(one.in_flight),
            number(one.waiting),
            _share(one.kv_use) or "-",
            "-" if one.tokens_per_s is None else f"{one.tokens_per_s:.0f}",
            number(one.cached_tokens),
            "never" if one.silent_s is None else f"{one.silent_s:.1f}s ago",
        )
    _titled(console, "workers", table)


def _titled(console: Console, title: str, table: Table) -> None:
    """A narrow terminal breaks sentences, never a name; what is not a terminal breaks nothing."""
    if table.row_count:
        line(console, f"\n{title}", "bold")
        for column in table.columns:
            if column.no_wrap:
                column.min_width = max(cell_len(str(c)) for c in (column.header, *column.cells))
        unbounded = console.options.update(max_width=UNBOUNDED)
        least, most = Measurement.get(console, unbounded, table)
        table.width = max(least, console.width) if console.is_terminal else most
        console.print(table, crop=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=column not in SENTENCES)
    return table


def _good(good: bool) -> str:
    return GOOD if good else BAD


def number(value: int | None) -> str:
    """A count, or that it is not known."""
    return "-" if value is None else str(value)


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def age(seconds: float) -> str:
    """How long ago, as kubectl writes it."""
    whole = max(int(seconds), 0)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"
