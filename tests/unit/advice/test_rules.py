"""Advice: joules, range and confidence from facts, and silence without them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from wattspan.advice.rules import (
    MIN_CLOCK_SAMPLES,
    AdviceKind,
    BoardClockSample,
    BoardFacts,
    BoardUse,
    Confidence,
    NoAdviceReason,
    UseFacts,
    advise,
    reasons_for_none,
)
from wattspan.advice.static_power import StaticPowerFit, StaticPowerRefusal
from wattspan.model import SECOND, Milliwatts, Provenance, StaticBasis, StaticPower

MINUTES = 60 * SECOND
FITTED = StaticPower(Milliwatts(100_000), StaticBasis.FITTED)
FIT = StaticPowerFit(Milliwatts(100_000), Milliwatts(3_000), Milliwatts(400_000), 100, (60, 64))


def use(**changes: Any) -> BoardUse:
    """Ten minutes of 300 W with a kernel all of the time, a fifth of it waiting."""
    facts = {
        "energy": 180_000 * 10**6, "time": 10 * MINUTES, "busy": 10 * MINUTES,
        "metered": 10 * MINUTES, "waiting": 2 * MINUTES, "windows": 10 * MINUTES,
    }  # fmt: skip
    return BoardUse(**facts | changes)


def board(**changes: Any) -> BoardFacts:
    facts: dict[str, Any] = {
        "board": "gpu:0", "name": "A100 0", "provenance": Provenance.MEASURED,
        "observed": 20 * MINUTES, "unused": 0, "unused_energy": 0, "in_use": True,
        "static": FITTED, "fit": FIT, "idle_power": Milliwatts(60_000), "samples": (),
        "uses": (UseFacts("train", use()),),
    }  # fmt: skip
    return BoardFacts(**facts | changes)


def kinds(*boards: BoardFacts, service: str | None = None) -> list[AdviceKind]:
    return [one.kind for one in advise(boards, service)]


def test_waiting_time_costs_the_static_power() -> None:
    (one,) = advise([board()])
    assert one.kind is AdviceKind.OVERLAP
    assert (one.energy, one.low, one.high) == (12_000 * 10**6, 11_640 * 10**6, 12_360 * 10**6)
    assert (one.confidence, one.basis, one.share) == (Confidence.MEDIUM, StaticBasis.FITTED, 0.2)
    assert "20.0% of its time on A100 0, at 100 W" in one.sentence


def test_waiting_energy_names_its_idle_part_which_no_span_has() -> None:
    (one,) = advise([board()])
    assert one.idle == 7_200 * 10**6
    assert one.energy - one.idle == 40 * 120 * 10**6, "(static - idle power) x waiting time"
    (unknown,) = advise([board(idle_power=None)])
    assert unknown.idle is None
    (cooler,) = advise([board(idle_power=Milliwatts(130_000))])
    assert cooler.idle == cooler.energy


def test_precise_fit_gives_high_confidence() -> None:
    (one,) = advise([board(fit=FIT._replace(half_width=Milliwatts(1_000)))])
    assert one.confidence is Confidence.HIGH


def test_configured_static_power_has_an_assumed_error() -> None:
    configured = StaticPower(Milliwatts(100_000), StaticBasis.CONFIGURED)
    (one,) = advise([board(static=configured, fit=StaticPowerRefusal.FEW_WINDOWS)])
    assert (one.energy, one.low) == (12_000 * 10**6, 11_400 * 10**6)
    assert one.confidence is Confidence.MEDIUM


@pytest.mark.parametrize(
    "changes",
    [
        {"static": None},
        {"static": StaticPower(Milliwatts(60_000), StaticBasis.LOWER_BOUND)},
        {"uses": (UseFacts("train", use(waiting=0)),)},
        {"uses": (UseFacts("train", use(waiting=5 * SECOND)),)},
        {"uses": (UseFacts("train", use(windows=30 * SECOND)),)},
        {"uses": (UseFacts("", use()),)},
        {"uses": ()},
    ],
    ids=["unknown", "bound", "no wait", "short wait", "short time", "no service", "unused"],
)
def test_nothing_is_advised_where_nothing_is_known(changes: dict[str, Any]) -> None:
    assert advise([board(**changes)]) == []


def test_advice_of_a_service_is_about_it_only() -> None:
    other = UseFacts("serve", use())
    boards = [board(uses=(*board().uses, other)), board(board="gpu:1", uses=(other,), in_use=False,
                                                        unused=20 * MINUTES)]  # fmt: skip
    assert [one.service for one in advise(boards, "serve")] == ["serve", "serve"]
    assert len(advise(boards)) == 4
    assert advise(boards, "nobody") == []


def test_processes_of_a_service_are_one_use() -> None:
    twice = board(uses=(UseFacts("train", use()), UseFacts("train", use())))
    (one,) = advise([twice])
    assert one.energy == 24_000 * 10**6


def test_pauses_of_a_mostly_static_use_suggest_a_larger_batch() -> None:
    pausing = use(energy=66_000 * 10**6, busy=4 * MINUTES, waiting=0)
    (one,) = advise([board(uses=(UseFacts("train", pausing),))])
    assert one.kind is AdviceKind.LARGER_BATCH
    assert (one.energy, one.low, one.high) == (10_800 * 10**6, 0, 21_600 * 10**6)
    assert (one.confidence, one.share) == (Confidence.LOW, pytest.approx(0.6))


@pytest.mark.parametrize(
    "changes",
    [
        {"idle_power": None},
        {"uses": (UseFacts("t", use(energy=66_000 * 10**6, waiting=0)),)},
        {"uses": (UseFacts("t", use(busy=4 * MINUTES, waiting=0)),)},
        {"uses": (UseFacts("t", use(energy=0, busy=0, waiting=0)),)},
        {"uses": (UseFacts("t", use(energy=66_000 * 10**6, busy=1, metered=2, waiting=0)),)},
    ],
    ids=["no idle power", "busy", "dynamic", "no energy", "short"],
)
def test_no_larger_batch_is_advised_otherwise(changes: dict[str, Any]) -> None:
    changes = {"uses": (UseFacts("t", use(energy=66_000 * 10**6, busy=1, waiting=0)),)} | changes
    assert kinds(board(**changes)) == []


# -------------------------------------------------------------------------------------- clocks


def varying(spread: float, *, noise: float = 0.0, count: int = 200) -> list[BoardClockSample]:
    """A clock around 1.5 GHz, and a power that rises with its third power."""
    chance = random.Random(3)
    found = []
    for _ in range(count):
        ratio = 1 + chance.uniform(-spread, spread)
        power = 100_000 + 300_000 * ratio**3 + chance.gauss(0, noise * 400_000)
        found.append(BoardClockSample(round(1.5e9 * ratio), round(power), capped=ratio < 1))
    return found


def test_varying_clock_under_a_limit_suggests_its_mean() -> None:
    (one,) = advise([board(samples=varying(0.3), uses=(UseFacts("", use()),))])
    assert one.kind is AdviceKind.LOCK_CLOCK
    # E[r**3] - E[r]**3 = 3 * Var(r) = spread**2 of a uniform distribution
    assert one.energy == pytest.approx(300 * 0.09 * 600 * 1e6, rel=0.1)
    assert one.low < one.energy < one.high
    assert "its mean, 1" in one.sentence


@pytest.mark.parametrize(
    "samples",
    [
        varying(0.3, count=MIN_CLOCK_SAMPLES - 1),
        varying(0.03),
        varying(0.1, noise=0.5),
        [one._replace(capped=False) for one in varying(0.3)],
        [one._replace(power=400_000) for one in varying(0.3)],
        [BoardClockSample(10**9 * (1 + i % 2), 10**5 * (1 + i % 2), True) for i in range(100)],
    ],
    ids=["few", "steady", "noisy", "no limit", "power at the limit", "two clocks"],
)
def test_no_clock_is_advised_otherwise(samples: list[BoardClockSample]) -> None:
    assert kinds(board(samples=samples, uses=(UseFacts("", use()),))) == []


def test_no_clock_is_advised_for_an_unused_board() -> None:
    assert kinds(board(samples=varying(0.3), uses=())) == []


# --------------------------------------------------------------------------------- idle boards


def test_unused_board_has_its_energy() -> None:
    idle = board(uses=(), in_use=False, unused=19 * MINUTES, unused_energy=68_400 * 10**6)
    (one,) = advise([idle])
    assert one.kind is AdviceKind.IDLE_BOARD
    assert one.energy == one.low == one.high == 68_400 * 10**6
    assert (one.confidence, one.share) == (Confidence.HIGH, 0.95)


@pytest.mark.parametrize(
    "changes",
    [{"in_use": True}, {"observed": 30 * SECOND}, {"unused": 17 * MINUTES}],
    ids=["in use now", "short", "used before"],
)
def test_no_idle_board_is_advised_otherwise(changes: dict[str, Any]) -> None:
    idle = {"uses": (), "in_use": False, "unused": 20 * MINUTES} | changes
    assert kinds(board(**idle)) == []


def test_most_energy_is_first() -> None:
    idle = board(
        board="gpu:1", uses=(), in_use=False, unused=20 * MINUTES, unused_energy=72_000 * 10**6
    )
    assert kinds(board(), idle) == [AdviceKind.IDLE_BOARD, AdviceKind.OVERLAP]


# --------------------------------------------------------------------------- reasons for no advice


def reasons(*boards: BoardFacts, service: str | None = None) -> list[NoAdviceReason]:
    assert advise(boards, service) == []
    return [one.reason for one in reasons_for_none(boards, service)]


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"windows": 0, "waiting": 0}, NoAdviceReason.NO_WAITING_SPANS, "[spans] waiting"),
        ({"windows": 59 * SECOND}, NoAdviceReason.FEW_WINDOWS, "59 s of train on A100 0"),
        ({"waiting": 6 * SECOND}, NoAdviceReason.NOTHING_WAITS, "train waits 1.0% of its time"),
    ],
)
def test_service_without_advice_has_its_first_reason(
    changes: dict[str, int], reason: NoAdviceReason, words: str
) -> None:
    facts = board(uses=(UseFacts("train", use(**changes)),))
    assert reasons(facts) == [reason]
    (one,) = reasons_for_none([facts])
    assert (one.service, one.board, one.name) == ("train", "gpu:0", "A100 0")
    assert words in one.sentence


@pytest.mark.parametrize("static", [None, StaticPower(Milliwatts(60_000), StaticBasis.LOWER_BOUND)])
def test_waiting_service_without_a_static_power_has_that_reason(static: StaticPower | None) -> None:
    assert reasons(board(static=static)) == [NoAdviceReason.STATIC_UNKNOWN]


def test_board_without_advice_has_all_its_reasons() -> None:
    facts = board(observed=59 * SECOND, idle_power=None, uses=(UseFacts("", use()),))
    assert reasons(facts) == [
        NoAdviceReason.SHORT_OBSERVATION, NoAdviceReason.IDLE_UNKNOWN, NoAdviceReason.NO_USE,
    ]  # fmt: skip
    texts = [one.sentence for one in reasons_for_none([facts])]
    assert "observed for 59 s" in texts[0]
    assert "idle power of A100 0 is unknown" in texts[1]
    assert "No service with spans has used A100 0" in texts[2]


def test_host_without_a_gpu_has_that_reason() -> None:
    assert reasons() == [NoAdviceReason.NO_GPU]


def test_reasons_are_restricted_to_a_service_and_its_boards() -> None:
    quiet = use(waiting=0)
    one = board(uses=(UseFacts("train", quiet), UseFacts("eval", quiet)))
    other = board(board="gpu:1", uses=(UseFacts("eval", quiet),))
    found = list(reasons_for_none([one, other], "train"))
    assert [(each.service, each.board) for each in found] == [("train", "gpu:0")]
    assert reasons(one, other) == 3 * [NoAdviceReason.NOTHING_WAITS]
