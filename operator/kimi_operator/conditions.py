"""Conditions as Kubernetes wants them: one per type, stamped when their status flips."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MESSAGE_CAP = 4000


@dataclass(frozen=True)
class Condition:
    """One condition before it is stamped. `holds` None is Unknown."""

    type: str
    holds: bool | None
    reason: str
    message: str = ""

    @property
    def status(self) -> str:
        """True, False or Unknown."""
        return "Unknown" if self.holds is None else str(self.holds)


def stamped(
    conditions: Iterable[Condition],
    previous: Sequence[Mapping[str, Any]],
    generation: int,
    now: str,
) -> list[dict[str, Any]]:
    """The conditions with generation and time; a status that did not change keeps its time.

    A message is never empty: Kubernetes 1.20 stores an empty text of a custom resource as null.
    """
    before = {condition["type"]: condition for condition in previous}
    out = []
    for condition in conditions:
        old = before.get(condition.type, {})
        same = old.get("status") == condition.status and "lastTransitionTime" in old
        out.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": (condition.message or condition.reason)[:MESSAGE_CAP],
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if same else now,
            }
        )
    return out


@dataclass(frozen=True)
class Transition:
    """A condition whose status or reason changed; what Events are written of."""

    type: str
    status: str
    reason: str
    message: str


def transitions(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> tuple[Transition, ...]:
    """What changed from one status to the next, in the order of the conditions."""
    old = {condition["type"]: (condition["status"], condition["reason"]) for condition in before}
    return tuple(
        Transition(c["type"], c["status"], c["reason"], c["message"])
        for c in after
        if old.get(c["type"]) != (c["status"], c["reason"])
    )
