"""One leader at a time."""

from dataclasses import dataclass, field

import pytest

from fakekube import Call, FakeKube, busy
from kimi_operator.lease import DURATION_S, RENEW_WITHIN_S, Leadership
from kimi_operator.observed import ObjectKey

KEY = ObjectKey("coordination.k8s.io/v1", "Lease", "llm", "kimi-operator")


@dataclass
class Clock:
    now_s: float = 1000.0
    stamps: int = 0

    def stamp(self) -> str:
        self.stamps += 1
        return f"2030-01-01T00:00:00.{self.stamps:06}Z"


@dataclass
class Two:
    """Two candidates, whose clocks need not agree."""

    kube: FakeKube = field(default_factory=FakeKube)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.a, self.b = (
            Leadership(
                self.kube, KEY, name, lambda o=offset: self.clock.now_s + o, self.clock.stamp
            )
            for name, offset in (("a", 0.0), ("b", -500.0))
        )


@pytest.fixture
def two() -> Two:
    return Two()


async def test_the_first_leads_and_the_second_waits(two: Two):
    assert await two.a.attempt()
    assert not await two.b.attempt()


async def test_a_renewing_holder_keeps_the_lease(two: Two):
    for _ in range(20):
        assert await two.a.attempt()
        two.clock.now_s += 5
        assert not await two.b.attempt()


async def test_a_dead_holder_is_followed_after_its_duration(two: Two):
    await two.a.attempt()
    await two.b.attempt()
    two.clock.now_s += DURATION_S - 1
    assert not await two.b.attempt()
    two.clock.now_s += 2
    assert await two.b.attempt()
    assert two.kube.objects[KEY]["spec"]["leaseTransitions"] == 1


async def test_a_holder_that_cannot_renew_gives_up_before_another_can_begin(two: Two):
    await two.a.attempt()
    await two.b.attempt()

    def down(_: Call) -> None:
        raise busy()

    two.kube.before = down
    two.clock.now_s += RENEW_WITHIN_S + 0.1
    assert not await two.a.attempt()
    two.kube.before = lambda _: None
    assert not await two.b.attempt(), "the old holder's lease has not run out yet"


async def test_an_old_holder_that_wakes_up_does_not_lead(two: Two):
    await two.a.attempt()
    await two.b.attempt()
    two.clock.now_s += DURATION_S + 1
    assert await two.b.attempt()
    assert not await two.a.attempt()


async def test_only_one_of_two_that_write_at_once_wins(two: Two):
    await two.a.attempt()
    two.clock.now_s += 1
    await two.b.attempt()
    two.clock.now_s += DURATION_S + 1
    stale = await two.kube.get(KEY)
    assert await two.b.attempt()
    assert stale is not None

    async def read_earlier(_: ObjectKey) -> object:
        return stale

    two.kube.get = read_earlier  # type: ignore[method-assign,assignment]
    assert not await two.a.attempt()


async def test_a_released_lease_is_taken_at_once(two: Two):
    await two.a.attempt()
    await two.a.release()
    assert not two.a.held
    assert await two.b.attempt()
