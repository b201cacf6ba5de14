"""Whose energy is a lower bound."""

from wattspan.attribution.missing import MissingEnergy
from wattspan.model import Consumer, Domain, HwType, Instant, Payer, Provenance, Usage

A, B, C = Consumer(1, 1), Consumer(2, 2), Consumer(3, 3)
BOARD = Domain("board", HwType.GPU, "board", "s", Provenance.MEASURED, resource="gpu:board")
PACKAGE = Domain("p", HwType.CPU, "p", "s", Provenance.MEASURED, resource="cpu:0")


def usage(resource: str, spent: dict[Payer, int], present: frozenset[Payer] = frozenset()) -> Usage:
    return Usage(resource, Instant(0, 0), Instant(10, 10), spent, 0, 10, present)


def test_gap_of_a_device_concerns_its_users_only() -> None:
    missing = MissingEnergy()
    missing.used(usage("gpu:board", {A: 5}, frozenset({B})))
    missing.used(usage("cpu:0", {C: 5}))
    missing.gap(BOARD, 100)
    missing.gap(BOARD, 50)
    assert set(missing.take((A, B, C))) == {(A, HwType.GPU), (B, HwType.GPU)}
    assert missing.until(A) == {HwType.GPU: 100}
    assert missing.until(C) == {}
    assert not [*missing.take((A, B, C))]


def test_gap_of_a_device_without_users_concerns_nobody() -> None:
    missing = MissingEnergy()
    missing.gap(BOARD, 100)
    assert not [*missing.take((A,))]
    assert missing.until(A) == {}


def test_gap_of_a_package_concerns_everybody() -> None:
    missing = MissingEnergy()
    missing.gap(PACKAGE, 100)
    assert set(missing.take((A, B))) == {(A, HwType.CPU), (B, HwType.CPU)}
    assert missing.until(C) == {HwType.CPU: 100}


def test_withheld_energy_concerns_payers_that_used_the_domain() -> None:
    missing = MissingEnergy()
    missing.withheld(HwType.CPU, usage("cpu:0", {A: 5, B: 0}))
    assert [*missing.take(())] == [(A, HwType.CPU)]
    assert missing.until(A) == {}


def test_ended_user_is_forgotten() -> None:
    missing = MissingEnergy()
    missing.used(usage("gpu:board", {A: 5, B: 5}))
    missing.used(usage("gpu:board", {A: 5}))
    missing.forget(A)
    missing.forget(C)
    missing.gap(BOARD, 100)
    assert missing.until(A) == {}
    assert missing.until(B) == {HwType.GPU: 100}
