"""The operator process: leadership, kopf around the reconciler, probes and metrics.

`python -m kimi_operator.main` runs it. It ends with exit code 1 when it loses its Lease: whatever
it was doing may not go on, and a restarted process starts from the cluster.
"""

import asyncio
import json
import logging
import logging.config
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import kopf
from aiohttp import web

from kimi_operator.cache import Cache, Key
from kimi_operator.clock import now_s, since_boot_s, unix_s
from kimi_operator.decide import Decider
from kimi_operator.handlers import (
    SELECTOR,
    Daemons,
    Login,
    Sessions,
    Wakes,
    configure,
    register,
)
from kimi_operator.kinds import BY_ID, watched_kinds
from kimi_operator.kube import Kube, TokenBucket, open_kube
from kimi_operator.lease import Leadership
from kimi_operator.metrics import Metrics
from kimi_operator.observed import Capabilities, ObjectKey
from kimi_operator.reconcile import NODES_FOR_S, Reconciler
from kimi_operator.reflect import Reflector, Source
from kimi_operator.relist import Relist
from kimi_operator.routers import Routers
from kimi_operator.settings import OperatorSettings, operator_settings
from kimi_operator.stamps import rfc3339, rfc3339_micro
from kimi_operator.wire import Tenure, Watches, session_options
from kimi_runtime.errors import ClusterError, ConfigError, KimistackError

LEASE = "kimi-operator"
OURS = ("kimistack.dev/v1alpha1/KimiDeployment", "kimistack.dev/v1alpha1/KimiWorkers")
RETRY_S = 2.0
RELIST_LOOK_S = 15.0
STUCK_S = 600.0
RENEWAL_STUCK_S = 180.0
CRDS_WITHIN_S = 600.0
STOP_WITHIN_S = 30.0
logger = logging.getLogger(__name__)


class Cluster(Kube, Source, Protocol):
    """The API server, with its watches."""


class LeadershipLost(KimistackError):
    """Another operator may lead now."""


@dataclass
class Operator:
    """One operator process. `ready` is set while watches are running.

    `kube` writes while `tenure` lasts; so does what kopf writes.
    """

    settings: OperatorSettings
    kube: Cluster
    login: Login
    metrics: Metrics = field(default_factory=Metrics)
    cache: Cache = field(default_factory=Cache)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    tenure: Tenure = field(default_factory=lambda: Tenure(since_boot_s))
    watches: Watches = field(default_factory=lambda: Watches(now_s))
    _relist: Relist | None = None

    def __post_init__(self) -> None:
        self.wakes = Wakes(self.metrics)
        lease = ObjectKey("coordination.k8s.io/v1", "Lease", self.settings.own_namespace, LEASE)
        self.leadership = Leadership(
            self.kube,
            lease,
            self.settings.identity,
            self.tenure.now_s,
            lambda: rfc3339_micro(unix_s()),
            self.settings.lease_duration_s,
            self.tenure if self.settings.leader_election else None,
        )

    async def run(self) -> None:
        """Lead and reconcile until `stop` is set. Raises LeadershipLost, ClusterError."""
        async with asyncio.TaskGroup() as tasks:
            probes = tasks.create_task(self._serve_probes(), name="probes")
            try:
                if await self._elected():
                    await self._lead()
            finally:
                probes.cancel()
                if self.settings.leader_election:
                    await self.leadership.release()

    async def _elected(self) -> bool:
        """Wait for the Lease; False if the process is to end before that."""
        while self.settings.leader_election and not self.stop.is_set():
            if await self.leadership.attempt():
                break
            await _until(self.stop, self.leadership.retry_s)
        self.metrics.leading.set(int(not self.stop.is_set()))
        return not self.stop.is_set()

    async def _lead(self) -> None:
        served = await self._served()
        if served is None:
            return
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            routers = Routers(http, self.cache, self.wakes.wake, now_s)
            await self._reconcile(served, routers)

    async def _reconcile(self, served: Capabilities, routers: Routers) -> None:
        """Run kopf around the reconciler, and what goes on beside it, until the process ends."""
        reconciler = Reconciler(
            self.kube,
            self.cache,
            served,
            Decider(),
            self.metrics,
            unix_s,
            loads=routers,
            nodes_changed=self._wake_all,
        )
        registry, settings = kopf.OperatorRegistry(), kopf.OperatorSettings()
        configure(settings)
        sessions = Sessions(self.login, session_options(self.tenure, self.watches))
        daemons = Daemons(reconciler, self.wakes, self.metrics)
        register(registry, settings, self.cache, daemons, sessions)
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(self._renew(), name="lease"),
                tasks.create_task(self._keep_listing(served, reconciler), name="relist"),
                tasks.create_task(routers.run(), name="routers"),
                tasks.create_task(self._keep_looking_at_nodes(reconciler), name="nodes"),
            ]
            try:
                await self._reflect(tasks, served, beside)
                await kopf.operator(
                    registry=registry,
                    settings=settings,
                    standalone=True,
                    clusterwide=not self.settings.namespaces,
                    namespaces=self.settings.namespaces,
                    stop_flag=self.stop,
                    ready_flag=self.ready,
                )
            finally:
                self.ready.clear()
                for task in beside:
                    task.cancel()
                await sessions.close()

    async def _reflect(
        self, tasks: asyncio.TaskGroup, served: Capabilities, beside: list[asyncio.Task[None]]
    ) -> None:
        """Begin to watch children, by tasks added to `beside`; until all there are are known."""
        namespaces = self.settings.namespaces or (None,)
        reflectors = [
            Reflector(self.kube, self.cache, kind, namespace, SELECTOR, self.wakes.wake)
            for kind in watched_kinds(served)
            for namespace in namespaces
        ]
        beside += [tasks.create_task(each.keep(), name=each.kind.plural) for each in reflectors]
        for each in reflectors:
            while not (each.listed.is_set() or self.stop.is_set()):
                await _until(each.listed, RETRY_S)

    async def _served(self) -> Capabilities | None:
        """What the server serves, once it serves our kinds; None if the process is to end."""
        deadline_s = now_s() + CRDS_WITHIN_S
        while not self.stop.is_set():
            try:
                served = await self.kube.capabilities()
                missing = [kind for kind in OURS if not served.serves(kind)]
                if not missing:
                    return served
                problem = f"the cluster lacks the CRDs of {', '.join(missing)}: apply crds/"
            except ClusterError as exc:
                problem = str(exc)
            if now_s() > deadline_s:
                raise ConfigError(problem)
            logger.warning("%s", problem)
            await _until(self.stop, RETRY_S)
            if self.settings.leader_election:
                await self.leadership.attempt()
        return None

    async def _renew(self) -> None:
        """Renew the Lease; the process ends when it cannot."""
        while self.settings.leader_election and not self.stop.is_set():
            if not await self.leadership.attempt():
                self.metrics.leading.set(0)
                raise LeadershipLost(f"the Lease {LEASE} could not be renewed")
            await _until(self.stop, self.leadership.retry_s)

    async def _keep_listing(self, served: Capabilities, reconciler: Reconciler) -> None:
        """List kinds beside their watches until the process ends."""

        def missed(key: Key) -> None:
            self.metrics.missed.inc()
            self.wakes.wake(key)

        kinds = (BY_ID[OURS[0]], *watched_kinds(served))
        namespaces = self.settings.namespaces or (None,)
        relist = self._relist = Relist(
            self.kube, self.cache, self.watches, kinds, namespaces, SELECTOR, now_s, missed
        )
        while not await _until(self.stop, RELIST_LOOK_S):
            if await relist.once():
                for key in self.cache.deployments():
                    reconciler.forget_settled(key)

    async def _keep_looking_at_nodes(self, reconciler: Reconciler) -> None:
        """Have passes made where nodes came, went or changed, until the process ends."""
        while not await _until(self.stop, NODES_FOR_S):
            if not self.cache.deployments():
                continue
            try:
                await reconciler.look_at_nodes()
            except ClusterError as exc:
                logger.warning("listing nodes: %s", exc)

    def _wake_all(self) -> None:
        for key in self.cache.deployments():
            self.wakes.wake(key)

    @property
    def trouble(self) -> str | None:
        """Why the process should be restarted; None if it should not."""
        if self.wakes.oldest_s() > STUCK_S:
            return f"a deployment has waited for its pass for {self.wakes.oldest_s():.0f}s"
        if self.ready.is_set() and self.settings.leader_election:
            overdue_s = self.leadership.overdue_s
            if overdue_s > RENEWAL_STUCK_S:
                return f"the Lease should have been renewed {overdue_s:.0f}s ago"
        if self.ready.is_set() and self.watches.all_silent_s > STUCK_S:
            return f"no watch has told anything for {self.watches.all_silent_s:.0f}s"
        return self._relist.deaf if self._relist is not None else None

    @asynccontextmanager
    async def probes(self, host: str | None = None) -> AsyncIterator[int]:
        """Probes and metrics over HTTP, on all addresses unless told otherwise; their port.

        ConfigError if nothing can listen there.
        """
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, self.settings.http_port)
            try:
                await site.start()
            except OSError as exc:
                raise ConfigError(
                    f"cannot listen on port {self.settings.http_port} for probes and metrics "
                    f"({exc.strerror}); end what listens there, or set KIMISTACK_HTTP_PORT to a "
                    "free port"
                ) from exc
            yield int(runner.addresses[0][1])
        finally:
            await runner.cleanup()

    async def _serve_probes(self) -> None:
        async with self.probes():
            await asyncio.Event().wait()

    async def _healthz(self, _: web.Request) -> web.Response:
        trouble = self.trouble
        return web.Response(status=500 if trouble else 200, text=trouble or "ok")

    async def _readyz(self, _: web.Request) -> web.Response:
        # one that waits for the Lease is ready to take over
        waiting = self.settings.leader_election and not self.leadership.held
        ready = waiting or self.ready.is_set()
        return web.Response(status=200 if ready else 503, text="ok" if ready else "starting")

    async def _metrics(self, _: web.Request) -> web.Response:
        self.metrics.deployments.labels("known").set(len(self.cache.deployments()))
        return web.Response(body=self.metrics.text(), content_type="text/plain")


async def _until(event: asyncio.Event, within_s: float) -> bool:
    """Whether the event was set in that time."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


class JsonLines(logging.Formatter):
    """One JSON object a line. Nothing but the message is rendered: no values of a manifest."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "at": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        reference = getattr(record, "k8s_ref", None)  # kopf's
        if reference:
            line["object"] = f"{reference.get('namespace')}/{reference.get('name')}"
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(level: str) -> None:
    """JSON lines; libraries speak up from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("kimi_operator").setLevel(level.upper())


async def serve(settings: OperatorSettings) -> None:
    """Run until SIGTERM or SIGINT."""
    writes = TokenBucket(settings.write_rate, settings.write_burst, now_s, asyncio.sleep)
    tenure = Tenure(since_boot_s)
    watches = Watches(now_s)
    async with open_kube(
        writes, kubeconfig=settings.kubeconfig, tenure=tenure, watches=watches
    ) as kube:
        operator = Operator(settings, kube, kube.credentials, tenure=tenure, watches=watches)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, operator.stop.set)
        await operator.run()


def main() -> None:
    """The process. A KimistackError is one line of the log and exit code 1 or its own."""
    try:
        settings = operator_settings()
        log_to_stderr(settings.log_level)
        asyncio.run(serve(settings))
    except BaseExceptionGroup as group:
        known, rest = group.split(KimistackError)
        if rest is not None or known is None:
            raise
        _end(known.exceptions[0])
    except KimistackError as exc:
        _end(exc)


def _end(exc: BaseException) -> None:
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    logger.error("%s", exc)
    sys.exit(getattr(exc, "exit_code", 1))


if __name__ == "__main__":
    main()
