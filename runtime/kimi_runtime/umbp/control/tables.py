"""Answers of the control service as text, and as what JSON can hold."""

from collections.abc import Mapping, Sequence
from typing import Any

from kimi_runtime.umbp.proto import control_pb2 as wire
from kimi_runtime.units import format_bytes

KEY_CHARACTERS = 12
"""Of a key that a table shows; JSON has it whole."""


def as_dict(message: Any) -> dict[str, Any]:
    """Every field under its name; bytes in hex, counts by their names, what is not set as None."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated and field.message_type is wire.Count.DESCRIPTOR:
            found[field.name] = {count.name: count.value for count in value}
        elif field.is_repeated:
            found[field.name] = [_plain(item) for item in value]
        elif field.has_presence and not message.HasField(field.name):
            found[field.name] = None
        else:
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return as_dict(value) if hasattr(value, "DESCRIPTOR") else value


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Columns as wide as they need; numbers to the right."""
    texts = [list(head), *[[_shown(str(cell)) for cell in row] for row in rows]]
    widths = [max(len(row[n]) for row in texts) for n in range(len(head))]
    right = [bool(rows) and isinstance(rows[0][n], int | float) for n in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in texts
    ]


def _shown(text: str) -> str:
    """What a name holds beside characters that a terminal shows would move its cursor: escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def inspected(answer: wire.InspectAnswer) -> str:
    """Of `Inspect`."""
    waits = f", waiting for {', '.join(answer.awaited)}" if answer.awaited else ""
    lines = [
        f"{answer.name}: {answer.phase}{waits}; epoch {answer.epoch}, {answer.clients} clients, "
        f"{answer.pins} pins, {answer.reservations} reservations",
        "",
    ]
    tiers = [
        (t.name, t.blocks, *map(format_bytes, (t.used_bytes, t.capacity_bytes)), t.state)
        for t in answer.tiers
    ]
    lines += table(("TIER", "BLOCKS", "USED", "OF", "STATE"), tiers)
    tenants = [
        (
            *(t.name, format_bytes(t.used_bytes), format_bytes(t.share_bytes)),
            format_bytes(t.quota_bytes) if t.HasField("quota_bytes") else "none",
        )
        for t in answer.tenants
    ]
    lines += ["", *table(("TENANT", "USED", "SHARE", "QUOTA"), tenants)]
    lines += ["", *_funnel(answer.funnel)]
    if answer.peers:
        peers = [
            (p.name, p.url, p.feed, p.standing, p.known_blocks, format_bytes(p.fetched_bytes))
            for p in answer.peers
        ]
        lines += ["", *table(("PEER", "URL", "FEED", "STANDING", "BLOCKS", "FETCHED"), peers)]
    if answer.hottest:
        hottest = [
            (
                b.key.hex()[:KEY_CHARACTERS],
                b.tenant,
                b.uses,
                format_bytes(b.size),
                f"{b.idle_s:.0f}s",
            )
            for b in answer.hottest
        ]
        lines += ["", *table(("HOTTEST", "TENANT", "USES", "SIZE", "IDLE"), hottest)]
    return "\n".join(lines)


_ENDS = {
    "memory": "in memory",
    "ssd": "on SSD",
    "peer": "at a peer",
    "not_computed": "nobody is known to have had them (not_computed)",
    "evicted": "they were here, and were evicted (evicted)",
    "unavailable": "who is said to have them did not give them (unavailable)",
    "late": "they did not come in the reader's time (late)",
    "corrupt": "their bytes did not match their tags (corrupt)",
}
"""How a lookup ended, in words; of those missed also the metric's `reason`."""


def _funnel(funnel: wire.Funnel) -> list[str]:
    total = funnel.looked_up or 1
    groups = (("found", funnel.hits), ("missed", funnel.lost))
    rows = [
        (how, _ENDS.get(count.name, count.name), count.value, f"{count.value / total:.1%}")
        for how, counts in groups
        for count in sorted(counts, key=lambda count: -int(count.value))
        if count.value
    ]
    return table(("LOOKED UP", "", str(funnel.looked_up), ""), rows)


def verified(tiers: Sequence[Mapping[str, Any]], damaged: Sequence[str]) -> str:
    """Of `Verify`, when all tiers are done."""
    lines = [
        f"{t['tier']}: {t['checked_blocks']} of {t['total_blocks']} blocks checked, "
        f"{format_bytes(t['checked_bytes'])}"
        for t in tiers
    ]
    found = [f"damaged, dropped: {key}" for key in damaged] or ["none is damaged"]
    return "\n".join([*lines, *found])


def evicted(answer: wire.EvictAnswer) -> str:
    """Of `Evict`."""
    left = f"; {answer.pinned_blocks} are being read and stay" if answer.pinned_blocks else ""
    return (
        f"evicted {answer.blocks} blocks of {format_bytes(answer.bytes)} from memory and "
        f"{answer.ssd_blocks} from SSD{left}; {format_bytes(answer.free_bytes)} are free"
    )


def drained(answer: wire.DrainAnswer) -> str:
    """Of `Drain`."""
    fates = {count.name: count.value for count in answer.blocks}
    kept = fates.get("moved", 0) + fates.get("elsewhere", 0)
    lost = {name: fates.get(name, 0) for name in ("refused", "late", "worthless")}
    why = ", ".join(f"{count} {name}" for name, count in lost.items() if count) or "none"
    lines = [
        f"kept: {kept} blocks are at peers ({fates.get('moved', 0)} moved, "
        f"{format_bytes(answer.moved_bytes)})",
        f"lost with this node: {sum(lost.values())} blocks ({why})",
    ]
    if answer.ssd_blocks:
        lines.append(f"on its SSD, if it comes back: {answer.ssd_blocks} blocks")
    if answer.pins_left:
        lines.append(f"{answer.pins_left} readers had not ended in time")
    return "\n".join(lines)


def reloaded(answer: wire.ReloadAnswer) -> str:
    """Of `Reload`."""
    if answer.refused:
        return f"refused, all is as before: {answer.refused}"
    lines = [f"in force now: {', '.join(answer.changed)}" if answer.changed else "nothing changed"]
    if answer.needs_restart:
        lines.append(f"these need a restart: {', '.join(answer.needs_restart)}")
    return "\n".join(lines)
