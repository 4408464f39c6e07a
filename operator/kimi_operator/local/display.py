"""A start as people see it: a live table on a terminal, plain lines anywhere else."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kimi_operator.local.child import tail
from kimi_operator.local.events import Event, Tell
from kimi_operator.local.stack import Stack
from kimi_runtime.clock import now_s

_STYLES = {"ready": "green", "gave_up": "red", "died": "yellow"}
_WORDS = {"starting": "starting", "loading": "loading", "ready": "ready", "gave_up": "failed"}


@dataclass
class _Row:
    """What the table says of a process."""

    word: str = "waiting"
    style: str = "dim"
    began_s: float | None = None
    seconds: float | None = None
    text: str = ""


@dataclass
class _Rows:
    """The table, redrawn by rich whenever it likes."""

    stack: Stack
    rows: dict[str, _Row] = field(default_factory=dict)

    def __rich__(self) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        for _ in range(4):
            table.add_column(no_wrap=True, overflow="ellipsis")
        for command in self.stack.commands:
            row = self.rows.setdefault(command.name, _Row())
            since = row.seconds if row.seconds is not None else _since(row.began_s)
            table.add_row(
                command.name,
                Text(row.word, style=row.style),
                "" if since is None else f"{since:.1f}s",
                Text(row.text or self._last_line(command.name, row), style="dim"),
            )
        return table

    def _last_line(self, process: str, row: _Row) -> str:
        """While a process loads, the end of its log tells what it does."""
        if row.word not in ("starting", "loading"):
            return ""
        lines = tail(self.stack.log(process), 1, within_bytes=4096)
        return _told(lines[-1]) if lines else ""


def _told(line: str) -> str:
    """What a log line says: the event of a structured one, else the line itself."""
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(line)["event"])
    return line


def _since(began_s: float | None) -> float | None:
    return None if began_s is None else now_s() - began_s


@contextmanager
def shown(stack: Stack, console: Console) -> Iterator[Tell]:
    """Show the events of a start until the stack serves, then one line for each that matters."""
    if not console.is_terminal:
        yield _plain(console)
        return
    rows = _Rows(stack)
    live = Live(rows, console=console, refresh_per_second=8, transient=False)
    plain = _plain(console)

    def tell(event: Event) -> None:
        if not live.is_started:
            plain(event)
        elif event.kind in _WORDS:
            row = rows.rows.setdefault(event.process, _Row())
            row.word, row.style = _WORDS[event.kind], _STYLES.get(event.kind, "cyan")
            row.text = event.text
            row.began_s = now_s() if event.kind == "starting" else row.began_s
            row.seconds = event.seconds if event.kind == "ready" else None
        elif event.kind in ("serving", "failed", "stopping"):
            live.stop()
            plain(event)

    with live:
        yield tell


def _plain(console: Console) -> Tell:
    def tell(event: Event) -> None:
        match event.kind:
            case "ready":
                text = f"{event.process}: ready after {event.seconds:.1f}s"
            case "starting":
                text = f"{event.process}: starting"
            case "died" | "gave_up" | "note" | "loading":
                text = f"{event.process}: {event.text}".removeprefix(": ")
            case "stopping":
                text = "stopping"
            case _:
                return  # said by the command itself
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    return tell
