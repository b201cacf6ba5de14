"""The lease of fixed limits for one command."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
from testbed.waiting import eventually

from wattspan.cli.frontier import measurement
from wattspan.cli.frontier.measurement import FixedLease
from wattspan.model import CapKey, CapRow, Knob, KnobState
from wattspan.ports import CapsError, CapTotals

KEY = CapKey(Knob.GPU_POWER, "gpu:0")
ORIGINAL, STEP = 700_000, 100_000


class StepCaps:
    """A capper that lowers its one limit by a step a request; implements ports.Caps."""

    totals = CapTotals()

    def __init__(self, floor: int = 0) -> None:
        self.limit, self.floor = ORIGINAL, floor
        self.holder, self.wanted = "", 0
        self.failure: Exception | None = None
        self.renewals, self.closed = 0, False
        self.threads: set[str] = set()

    def _turn(self) -> tuple[CapRow, ...]:
        self.threads.add(threading.current_thread().name)
        if self.failure is not None:
            raise self.failure
        state = KnobState(KEY, "GPU 0", requested=self.limit, enforced=self.limit)
        held = self.wanted if self.holder else None
        return (CapRow(state, original=ORIGINAL, wanted=held, holder=self.holder),)

    def rows(self, *, renew: bool = False) -> tuple[CapRow, ...]:
        self.renewals += renew
        return self._turn()

    def hold(self, job: str, caps: Mapping[CapKey, int], why: str) -> tuple[CapRow, ...]:
        rows = self._turn()
        self.holder, (self.wanted,) = job, caps.values()
        self.limit = max(self.wanted, self.floor, self.limit - STEP)
        return self._turn() if rows else rows

    def release(self, job: str = "") -> None:
        self._turn()
        self.holder, self.limit = "", ORIGINAL

    def close(self) -> None:
        self.closed, self.limit = True, ORIGINAL


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "RENEWAL_INTERVAL", 1_000_000)
    monkeypatch.setattr(measurement, "STEP_INTERVAL", 1_000_000)


def lease(caps: StepCaps, limit: int = 400_000) -> FixedLease:
    return FixedLease(lambda: caps, "frontier 7", {KEY: limit}, "a trial")


def test_block_begins_once_the_limit_is_reached() -> None:
    caps = StepCaps()
    with lease(caps) as held:
        assert caps.limit == 400_000
        eventually(lambda: caps.renewals > 2, "the lease is renewed")
        assert held.lost == ""
        assert held.watts() == {KEY.device: 400}


def test_original_limit_is_restored_after_the_block() -> None:
    caps = StepCaps()
    with pytest.raises(ZeroDivisionError), lease(caps):
        raise ZeroDivisionError
    assert (caps.limit, caps.holder, caps.closed) == (ORIGINAL, "", True)


def test_limit_below_the_floor_is_held_at_the_floor() -> None:
    caps = StepCaps(floor=500_000)
    with lease(caps) as held:
        assert held.watts() == {KEY.device: 500}
        assert held.lost == ""


def test_refusal_is_raised_before_the_block() -> None:
    caps = StepCaps()
    caps.failure = CapsError("GPU 0 is held for 'trainer'.", "held")
    with pytest.raises(CapsError, match="held for 'trainer'"), lease(caps):
        pytest.fail("the block must not run")
    assert caps.closed


def test_unexpected_error_at_the_start_is_a_refusal() -> None:
    caps = StepCaps()
    caps.failure = ValueError("no digits")
    with pytest.raises(CapsError, match="ValueError: no digits"), lease(caps):
        pytest.fail("the block must not run")
    assert caps.closed

    def connect() -> StepCaps:
        raise RecursionError

    with (
        pytest.raises(CapsError, match="RecursionError"),
        FixedLease(connect, "frontier 7", {KEY: 400_000}, "a trial"),
    ):
        pytest.fail("the block must not run")


def test_unexpected_error_of_a_renewal_is_told() -> None:
    caps = StepCaps()
    with lease(caps) as held:
        caps.failure = ValueError("no digits")
        assert "ValueError: no digits" in eventually(lambda: held.lost, "the loss is noticed")
    assert caps.closed


def test_end_of_the_capper_is_told() -> None:
    caps = StepCaps()
    with lease(caps) as held:
        caps.failure = CapsError("No capper answers.")
        assert eventually(lambda: held.lost, "the loss is noticed") == "No capper answers."


def test_limit_of_another_holder_is_told() -> None:
    caps = StepCaps()
    with lease(caps) as held:
        caps.holder = ""
        lost = eventually(lambda: held.lost, "the loss is noticed")
    assert lost == "The limit of GPU 0 is not held any more."


def test_client_is_used_by_one_thread() -> None:
    caps = StepCaps()
    with lease(caps):
        eventually(lambda: caps.renewals, "the lease is renewed")
    assert caps.threads == {"wattspan-lease"}
    assert not [one for one in threading.enumerate() if one.name == "wattspan-lease"]
