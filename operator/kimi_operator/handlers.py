"""kopf's triggers: they take in what watches tell and wake a deployment, and decide nothing.

One daemon per KimiDeployment makes its passes, one after another; events of the resource and of
its children only wake it, so that a burst of them becomes one pass. The event that tells of the
resource's deletion is handled until it is taken down in order, by whichever operator is there.
Children are listed before kopf starts (`reflect`): the first pass sees all there is.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakSet
from zlib import crc32

import aiohttp
import kopf

from kimi_operator.cache import Cache, Change, Key
from kimi_operator.clock import now_s
from kimi_operator.desired.labels import MANAGED_BY
from kimi_operator.kinds import BY_ID, Kind
from kimi_operator.kube import Credentials
from kimi_operator.metrics import Metrics
from kimi_operator.reconcile import Reconciler
from kimi_operator.teardown import FINALIZER
from kimi_runtime.errors import ClusterBusy, ClusterConflict, ClusterError

DEBOUNCE_S = 0.2
FIRST_BACKOFF_S = 1.0
MOST_BACKOFF_S = 60.0
TEARDOWN_POLL_S = 2.0
STOP_WITHIN_S = 2.0
AT_ONCE = 8
"""Passes at a time. Deciding keeps the event loop busy: hundreds at once would take turns so slowly
that requests, the renewal of the Lease among them, were late."""
OURS = "kimideployments"
SELECTOR = ",".join(f"{name}={value}" for name, value in MANAGED_BY.items())
Login = Callable[[], Awaitable[Credentials]]
logger = logging.getLogger(__name__)


@dataclass
class Wakes:
    """Who waits for a pass, and since when."""

    metrics: Metrics
    _events: dict[Key, asyncio.Event] = field(default_factory=dict)
    _since_s: dict[Key, float] = field(default_factory=dict)
    _teardowns: dict[Key, asyncio.Event] = field(default_factory=dict)

    @contextmanager
    def of_teardown(self, key: Key) -> Iterator[asyncio.Event]:
        """Set as often as the deployment is woken, beside the wake of its passes."""
        event = self._teardowns[key] = asyncio.Event()
        try:
            yield event
        finally:
            if self._teardowns.get(key) is event:
                del self._teardowns[key]

    def in_teardown(self) -> frozenset[Key]:
        """Deployments that are being taken down."""
        return frozenset(self._teardowns)

    @contextmanager
    def of(self, key: Key) -> Iterator[asyncio.Event]:
        """The deployment's wake, set at the start: create and resume are alike."""
        event = self._events[key] = asyncio.Event()
        self.wake(key)
        try:
            yield event
        finally:
            if self._events.get(key) is event:
                del self._events[key]
                self._since_s.pop(key, None)

    def wake(self, key: Key | None) -> None:
        """Have a pass made, if somebody makes passes of it."""
        if key is not None and key in self._teardowns:
            self._teardowns[key].set()
        event = self._events.get(key) if key is not None else None
        if event is not None and key is not None and not event.is_set():
            event.set()
            self._since_s.setdefault(key, now_s())
            self.metrics.waiting.set(len(self._since_s))

    def begun(self, key: Key) -> None:
        """A pass begins: what comes from now on needs another one."""
        self._events[key].clear()
        self._since_s.pop(key, None)
        self.metrics.waiting.set(len(self._since_s))

    def oldest_s(self) -> float:
        """How long the longest waiting deployment has waited."""
        return now_s() - min(self._since_s.values()) if self._since_s else 0.0


@dataclass
class Daemons:
    """Makes the passes of each deployment, and backs off where they fail."""

    reconciler: Reconciler
    wakes: Wakes
    metrics: Metrics
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    _writing: dict[Key, asyncio.Lock] = field(default_factory=dict)
    _over: set[str] = field(default_factory=set)

    async def keep(self, key: Key, stopped: Any) -> None:
        """Make passes until the deployment goes or the operator ends."""
        failures = 0
        with self.wakes.of(key) as wake:
            if self.reconciler.has_status(key):
                await stopped.wait(spread_s(key))  # known before this process: no hurry
            while not stopped:
                wait_s, failures = await self._guarded(key, failures)
                if failures:
                    await stopped.wait(wait_s)  # events come on, but the server asked for a pause
                    wake.set()
                await first_of(wake, stopped, wait_s)
                await stopped.wait(DEBOUNCE_S)

    async def _guarded(self, key: Key, failures: int) -> tuple[float | None, int]:
        """One pass that never raises: after how long the next is due, and failures in a row.

        kopf ends the whole operator over an exception in a daemon's worker, and one deployment's
        bad luck is no reason to stop serving the others.
        """
        began_s, outcome = now_s(), "failed"
        applies = self.reconciler.applies(key)
        try:
            async with self._one_of(key), self.turns:
                began_s = now_s()
                self.wakes.begun(key)
                wait_s = await self.reconciler.run_pass(key)
            outcome = "ok"
            return wait_s, 0
        except ClusterConflict as exc:
            outcome = "conflict"
            self.metrics.conflicts.inc()
            logger.info("%s: %s; once more", key, exc)
            retry_after_s = 0.0
        except ClusterBusy as exc:
            outcome = "busy"
            logger.warning("%s: %s", key, exc)
            retry_after_s = exc.retry_after_s or 0.0
        except ClusterError as exc:
            outcome = "refused"
            logger.warning("%s: %s", key, exc)
            retry_after_s = 0.0
        except Exception:
            logger.exception("%s: the pass failed by a defect of the operator", key)
            retry_after_s = 0.0
        finally:
            self.metrics.passes.labels(outcome).observe(now_s() - began_s)
        if self.reconciler.applies(key) > applies:
            failures = 0
        return max(backoff_s(failures), retry_after_s), failures + 1

    async def take_down(self, key: Key, uid: str) -> None:
        """Take down in order, within a deadline: deletion may be slow, but never stick.

        Returns when it is over, or has taken too long; then it is not begun again.
        """
        if uid in self._over:
            return
        deadline_s = now_s() + self.reconciler.teardown_s(key)
        failures = 0
        with self.wakes.of_teardown(key) as wake:
            while now_s() < deadline_s:
                wake.clear()
                wait_s = TEARDOWN_POLL_S
                try:
                    async with self._one_of(key):
                        if await self.reconciler.tear_down(key) is None:
                            break
                    failures = 0
                except ClusterError as exc:
                    logger.warning("%s: teardown: %s", key, exc)
                    wait_s, failures = backoff_s(failures), failures + 1
                try:
                    async with asyncio.timeout(wait_s):
                        await wake.wait()
                except TimeoutError:
                    pass
            else:
                logger.warning("%s: the teardown took too long; garbage collection goes on", key)
        self._over.add(uid)

    def forget(self, key: Key, uid: str) -> None:
        """A deployment is gone."""
        self._over.discard(uid)
        self._writing.pop(key, None)

    def _one_of(self, key: Key) -> asyncio.Lock:
        """Held while a deployment's children are written: by its passes, or by its teardown."""
        return self._writing.setdefault(key, asyncio.Lock())


def backoff_s(failures: int) -> float:
    """Seconds until the next attempt."""
    return float(min(FIRST_BACKOFF_S * 2**failures, MOST_BACKOFF_S))


def spread_s(key: Key, within_s: float = 2.0) -> float:
    """A delay of a deployment's own, so that a start with many of them is no burst."""
    return within_s * crc32(str(key).encode()) / 2**32


async def first_of(wake: asyncio.Event, stopped: Any, within_s: float | None) -> None:
    """Until one of the two is set, or the time is over."""

    async def until_stopped() -> None:
        await stopped.wait(within_s)

    async with asyncio.TaskGroup() as tasks:
        waits = {tasks.create_task(wake.wait()), tasks.create_task(until_stopped())}
        _, late = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in late:
            task.cancel()


def configure(settings: kopf.OperatorSettings) -> None:
    """What of kopf's defaults does not fit an operator that decides from levels."""
    settings.persistence.finalizer = FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix="kimistack.dev")
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix="kimistack.dev")
    settings.posting.enabled = False
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.enforce_retry_after = True
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 5
    settings.queueing.error_delays = (1, 2, 5, 10, 30)
    settings.scanning.disabled = True
    settings.peering.standalone = True


def register(
    registry: kopf.OperatorRegistry,
    settings: kopf.OperatorSettings,
    cache: Cache,
    daemons: Daemons,
    sessions: "Sessions",
) -> None:
    """Have kopf call us for every deployment, with the credentials we use ourselves."""

    @kopf.on.login(registry=registry, id="login")
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        return await sessions.log_in()

    ours = BY_ID["kimistack.dev/v1alpha1/KimiDeployment"]
    at = (ours.group, _version(ours), ours.plural)

    @kopf.on.event(*at, registry=registry, id="deployment-event")
    async def on_event(type: str | None, body: kopf.Body, **_: Any) -> None:  # noqa: A002
        change: Change = "DELETED" if type == "DELETED" else "MODIFIED"
        manifest = {**body, "apiVersion": ours.api_version, "kind": ours.kind}
        key = cache.saw(change, manifest)
        daemons.wakes.wake(key)
        metadata = body["metadata"]
        if type == "DELETED":
            daemons.forget(Key.of(metadata), metadata["uid"])
        elif "deletionTimestamp" in metadata and FINALIZER in (metadata.get("finalizers") or ()):
            # kopf takes the finalizer off after this, and after nothing else: it starts no daemon
            # for what was being deleted already when the operator came
            await daemons.take_down(Key.of(metadata), metadata["uid"])

    @kopf.daemon(
        *at,
        registry=registry,
        id="reconcile",
        cancellation_backoff=STOP_WITHIN_S,  # at the operator's end, for the pass under way
        cancellation_polling=TEARDOWN_POLL_S,
    )
    async def keep_reconciled(body: kopf.Body, stopped: Any, **_: Any) -> None:
        # a daemon may start before the event is handled that started it
        cache.saw("MODIFIED", {**body, "apiVersion": ours.api_version, "kind": ours.kind})
        await daemons.keep(Key.of(body.metadata), stopped)


class Sessions:
    """kopf's HTTP sessions, closed with it.

    It closes one that it has used when its credentials are refused, or at its own end; one that a
    later login replaced, or that ended unused, it forgets.
    """

    def __init__(self, login: Login, options: Mapping[str, Any]) -> None:
        """`options` are those of a session, see `session_options`."""
        self._login, self._options = login, options
        self._open: WeakSet[aiohttp.ClientSession] = WeakSet()

    async def log_in(self) -> kopf.AiohttpSession:
        """A session with the credentials of now."""
        info = kopf.ConnectionInfo(**asdict(await self._login()))
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers=info.as_http_headers(),
            **self._options,
        )
        self._open.add(session)
        return kopf.AiohttpSession(server=info.server, aiohttp_session=session)

    async def close(self) -> None:
        """Close all of them, and wait for their connections."""
        for session in list(self._open):
            await session.close()


def _version(kind: Kind) -> str:
    return kind.api_version.rpartition("/")[2]
