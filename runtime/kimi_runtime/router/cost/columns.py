"""Views as columns of numbers, kept from one decision to the next. Pure.

Nobody changes a view, so the numbers of a worker hold while its view is the same object and nothing
else was learned of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kimi_runtime.router.cost.seat import queued_depth
from kimi_runtime.router.estimate.models import Models
from kimi_runtime.router.view import WorkerView
from kimi_runtime.spec.worker import Role

Floats = npt.NDArray[np.float64]

MAX_ROWS = 8192


class Table(NamedTuple):
    """One number for each of several workers. Of those without another word it is the view's."""

    running: Floats
    waiting: Floats
    queued: Floats
    """Tokens."""
    depth: Floats
    """Of them, see `seat.queued_depth`."""
    held: Floats
    """Tokens of KV in use."""
    cached: Floats
    """Tokens."""
    busy: Floats
    """Utilisation; -1 where it is not told."""
    both: Floats
    """1: it serves whole requests."""
    unsure: Floats
    """1: its load is a guess."""
    age_s: Floats
    streams: Floats
    stateful: Floats
    """1: it resumes from checkpoints only."""
    bias: Floats
    """Learned: see `Speeds.bias`."""
    hits: Floats
    """Learned: see `HitRatios.ratio`, of its own memory."""
    queue: Floats
    """Learned: with the next, see `QueueRatios.factor`."""
    queue_var: Floats


class Columns:
    """Of the workers that decisions look at. Bounded: by `max_rows`, and those of one decision."""

    def __init__(self, models: Models, *, max_rows: int = MAX_ROWS) -> None:
        self._models, self._max_rows = models, max_rows
        self._learned = models.changes.count
        self._places: dict[str, int] = {}
        """Of workers, by name."""
        self._views: list[WorkerView] = []
        """By place: whose numbers those are. It keeps the views, so that no `id` names another."""
        self._rows: dict[int, int] = {}
        """Places by `id` of a view, of those whose numbers hold."""
        self._numbers = np.zeros((len(Table._fields), 0))

    def of(self, workers: Sequence[WorkerView]) -> Table:
        """The workers' numbers, in their order."""
        self._renew()
        known = self._rows
        missing = [one for one in workers if id(one) not in known]
        if missing:
            self._put(missing)
        rows = [known[id(one)] for one in workers]
        return Table(*self._numbers.take(rows, axis=1))

    def see(self, view: WorkerView) -> None:
        """A worker's view was made: look at it now, and not when somebody decides."""
        self._renew()
        if id(view) not in self._rows:
            self._put([view])

    def _renew(self) -> None:
        """Numbers of whom something was learned hold no more; those of workers long gone go."""
        changes = self._models.changes
        if len(self._views) > self._max_rows:
            self._places.clear()
            self._views.clear()
            self._rows.clear()
        if changes.count != self._learned:
            names = changes.since(self._learned)
            self._learned = changes.count
            if names is None:
                self._rows.clear()
                return
            for place in map(self._places.get, names):
                if place is not None:
                    self._rows.pop(id(self._views[place]), None)

    def _put(self, views: Sequence[WorkerView]) -> None:
        places = []
        for view in views:
            place = self._places.setdefault(view.name, len(self._views))
            if place == len(self._views):
                self._views.append(view)
            else:
                self._rows.pop(id(self._views[place]), None)
                self._views[place] = view
            self._rows[id(view)] = place
            places.append(place)
        missing = len(self._views) - self._numbers.shape[1]
        if missing > 0:
            spare = np.zeros((len(Table._fields), missing + len(self._views)))
            self._numbers = np.concatenate((self._numbers, spare), axis=1)
        self._numbers[:, places] = np.array([self._row(view) for view in views]).T

    def _row(self, one: WorkerView) -> tuple[float, ...]:
        models, name = self._models, one.name
        used = (one.total_blocks - one.free_blocks) * one.block_tokens
        return (
            one.running,
            one.waiting,
            one.queued_tokens,
            queued_depth(one),
            used if used > 0 else 0,
            one.cached_tokens,
            -1.0 if one.utilisation is None else one.utilisation,
            one.role is Role.BOTH,
            not one.certain,
            one.age_s,
            one.streams,
            one.checkpoints is not None,
            models.speeds(one.kind).bias(name),
            models.hits.ratio(name, "hbm"),
            *models.queues.factor(name),
        )
