"""Asking routers what they see, beside the passes: no pass ever waits for a router.

Each router's `GET /signals` is read by the pod's address, as often as somebody needs it: every
second while an instance drains, a worker is silent or nothing runs; every few seconds where the
planner counts; rarely otherwise. A pass is woken only when an answer changes what it would decide.
The API server is never asked anything here.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
from pydantic import ValidationError

from kimi_operator.cache import Cache, Key
from kimi_operator.heard import (
    SILENT_S,
    Answer,
    Heard,
    News,
    RouterPod,
    draining_pods,
    has_instances,
    is_scaled,
    news_of,
    outline,
    router_pods,
)
from kimi_operator.observed import Manifest, ObjectKey
from kimi_runtime.spec.signals import FORMER_S, RouterSignals

ASK_S = 2.0
URGENT_S, SCALED_S, QUIET_S = 1.0, 5.0, 30.0
TICK_S = 0.25
MOST_AT_ONCE = 64
MOST_BYTES = 2**20
"""A document of two thousand workers has about half of that."""
logger = logging.getLogger(__name__)


@dataclass
class _Told:
    pod: RouterPod
    signals: RouterSignals
    at_s: float


@dataclass
class _Deployment:
    """What is known of one deployment's routers, by uid of their pods."""

    since_s: float
    told: dict[str, _Told] = field(default_factory=dict)
    there: dict[str, RouterPod] = field(default_factory=dict)
    gone: dict[str, tuple[RouterPod, float]] = field(default_factory=dict)
    """Those that went, and when that was found."""
    due_s: float = 0.0
    asking: bool = False
    news: News = field(default_factory=News)
    children: Mapping[ObjectKey, Manifest] = field(default_factory=dict)
    """Their outline, as it was at the cache's change `looked_at`."""
    looked_at: int = -1


class Routers:
    """Follows the routers of every deployment in the cache. `run` it; `read` never waits.

    `now_s` is a clock that only goes forward: ages are told by it.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        cache: Cache,
        wake: Callable[[Key], None],
        now_s: Callable[[], float],
    ) -> None:
        self._http, self._cache, self._wake, self._now_s = http, cache, wake, now_s
        self._deployments: dict[Key, _Deployment] = {}
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)

    def read(self, key: Key, children: Mapping[ObjectKey, Manifest]) -> Heard:
        """What is known by now; what this pass needs to know sooner is asked for sooner."""
        now_s = self._now_s()
        state = self._state(key, now_s)
        self._note(state, router_pods(children), now_s)
        heard = self._heard(state, now_s)
        state.due_s = min(state.due_s, now_s + interval_s(children, heard))
        return heard

    async def run(self) -> None:
        """Ask whoever is due, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                now_s = self._now_s()
                known = self._cache.deployments()
                for key in known:
                    state = self._state(key, now_s)
                    if now_s >= state.due_s and not state.asking:
                        state.asking = True
                        tasks.create_task(self._ask(key, state), name=f"routers of {key}")
                for key in self._deployments.keys() - set(known):
                    del self._deployments[key]
                await asyncio.sleep(TICK_S)

    def _state(self, key: Key, now_s: float) -> _Deployment:
        state = self._deployments.get(key)
        if state is None:
            state = self._deployments[key] = _Deployment(since_s=now_s)
        return state

    def _children(self, key: Key, state: _Deployment) -> Mapping[ObjectKey, Manifest]:
        """The outline of the children. Those of a quiet deployment are not unpacked for a poll."""
        changes = self._cache.changes(key)
        if changes != state.looked_at:
            state.children, state.looked_at = outline(self._cache.children(key)), changes
        return state.children

    async def _ask(self, key: Key, state: _Deployment) -> None:
        """One round: every router at once, each with its own deadline."""
        try:
            pods = router_pods(self._children(key, state))
            self._note(state, pods, self._now_s())
            async with asyncio.TaskGroup() as tasks:
                for pod in pods:
                    tasks.create_task(self._ask_one(state, pod), name=f"router {pod.name}")
            self._tell(key, state)
        finally:
            state.asking = False

    async def _ask_one(self, state: _Deployment, pod: RouterPod) -> None:
        async with self._slots:
            asked_s = self._now_s()
            try:
                signals = await self._fetch(pod)
            except (aiohttp.ClientError, TimeoutError, OSError, ValidationError) as exc:
                logger.debug("router %s does not tell its signals: %r", pod.name, exc)
                return
        if pod.uid in state.there:
            # as old as the question: what the answer tells of may have changed on its way
            state.told[pod.uid] = _Told(pod, signals, asked_s)

    async def _fetch(self, pod: RouterPod) -> RouterSignals:
        limits = aiohttp.ClientTimeout(total=ASK_S)
        url = f"{pod.url}/signals"
        async with self._http.get(url, timeout=limits, allow_redirects=False) as response:
            response.raise_for_status()
            if response.status != 200:
                raise aiohttp.ClientPayloadError(f"status {response.status}")
            text = await response.content.read(MOST_BYTES + 1)
            while len(text) <= MOST_BYTES and (more := await response.content.readany()):
                text += more
        if len(text) > MOST_BYTES:
            raise aiohttp.ClientPayloadError(f"more than {MOST_BYTES} bytes")
        return RouterSignals.model_validate_json(text)

    def _note(self, state: _Deployment, pods: tuple[RouterPod, ...], now_s: float) -> None:
        """Which routers are there now; those that went are remembered for a while."""
        there = {pod.uid: pod for pod in pods}
        for uid in state.there.keys() - there.keys():
            state.gone[uid] = (state.there[uid], now_s)
            state.told.pop(uid, None)
        state.there = there
        for uid, (_, at_s) in list(state.gone.items()):
            if uid in there or now_s - at_s > FORMER_S:
                del state.gone[uid]

    def _heard(self, state: _Deployment, now_s: float) -> Heard:
        gone: dict[str, float] = {}
        for pod, at_s in state.gone.values():
            gone[pod.node] = min(gone.get(pod.node, now_s - at_s), now_s - at_s)
        return Heard(
            answers=tuple(
                Answer(told.pod, told.signals, now_s - told.at_s)
                for uid, told in sorted(state.told.items())
            ),
            gone=gone,
            watched_s=now_s - state.since_s,
        )

    def _tell(self, key: Key, state: _Deployment) -> None:
        """Wake the deployment if a pass would now decide otherwise."""
        now_s = self._now_s()
        children = self._children(key, state)
        self._note(state, router_pods(children), now_s)
        heard = self._heard(state, now_s)
        news = news_of(heard, children)
        before, state.news = state.news, news
        if news.adds_to(before):
            self._wake(key)
        state.due_s = now_s + interval_s(children, heard)


def interval_s(children: Mapping[ObjectKey, Manifest], heard: Heard) -> float:
    """How soon the routers should be asked again."""
    scaled = is_scaled(children)
    asleep = scaled and not has_instances(children)
    if asleep or draining_pods(children) or _any_silent(heard):
        return URGENT_S
    return SCALED_S if scaled else QUIET_S


def _any_silent(heard: Heard) -> bool:
    return any(
        worker.silent_s is not None and worker.silent_s > SILENT_S / 2 and not worker.left
        for answer in heard.answers
        for worker in answer.told.workers
    )
