"""Metrics of tuning, caps, and power budgets that several hosts share.

Applications choose names of jobs; as labels they are printable and at most
``MAX_JOB_NAME`` characters long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from operator import attrgetter

from wattspan.model import (
    DecisionReason,
    HwType,
    Knob,
    Move,
    Provenance,
    Snapshot,
    TuningRow,
    TuningState,
)
from wattspan.model.snapshot import FleetAccounts, FleetPlace
from wattspan.util.text import MAX_JOB_NAME, cut_with_digest
from wattspan_exporters.catalogue.definition import (
    Draw,
    Metric,
    Sample,
    declared,
    each,
    items_of,
    single,
)
from wattspan_exporters.catalogue.energy import boot_start_times, worst_provenance
from wattspan_exporters.catalogue.gpu import MEGAHERTZ, clock_limits

_HARDWARE_TYPES = {
    Knob.GPU_POWER: HwType.GPU,
    Knob.GPU_CLOCK: HwType.GPU,
    Knob.CPU_POWER: HwType.CPU,
}

RELEASES = (
    DecisionReason.OVER_BUDGET, DecisionReason.CHANGED,
    DecisionReason.PAUSED, DecisionReason.ENDED, DecisionReason.TAIL,
    DecisionReason.FOREIGN_WRITER, DecisionReason.THROTTLED, DecisionReason.SHARED,
    DecisionReason.MIG, DecisionReason.NO_PERMISSION,
    DecisionReason.NO_CAPPER, DecisionReason.LOST_DEVICE,
)  # fmt: skip
"""Reasons for a release. Each is counted from zero, so that ``increase()`` sees the first."""


@lru_cache(maxsize=256)  # drawn for each of the series of a job
def name_label(name: str) -> str:
    """The name of a job or of a cap's holder as a label value."""
    fit = "".join(c if c.isprintable() else "\ufffd" for c in name)
    return cut_with_digest(name, MAX_JOB_NAME, fit)


# --------------------------------------------------------------------------------------- jobs


def _labels(row: TuningRow) -> tuple[str, str]:
    return name_label(row.job), row.knob


def tuning_mode(snapshot: Snapshot) -> Iterator[Sample]:
    yield (snapshot.tuning.mode,), 1


def saved_bounds(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.tuning.rows:
        for bound, value in (("lower", row.saved_low), ("upper", row.saved_high)):
            if value is not None:
                yield (*_labels(row), bound, _provenance(snapshot, row)), value


def _provenance(snapshot: Snapshot, row: TuningRow) -> str:
    """The provenance of the compared energies."""
    own = tuple(a for a in snapshot.domains if a.domain.id in row.devices)
    return (
        worst_provenance(own)
        or snapshot.provenance.get(_HARDWARE_TYPES[row.knob])
        or Provenance.ESTIMATED
    )


def states(snapshot: Snapshot) -> Iterator[Sample]:
    """Every state of every job: 1 for the present one, 0 for the others."""
    for row in snapshot.tuning.rows:
        for state in TuningState:
            yield (*_labels(row), state), int(row.state is state)


def decisions(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.tuning.rows:
        counts = {(Move.RELEASE, reason): 0 for reason in RELEASES} | dict(row.decisions)
        for (move, reason), count in counts.items():
            yield (*_labels(row), move, reason), count


def decision_info(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.tuning.rows:
        yield (*_labels(row), row.decision.move, row.decision.reason), 1


def job_info(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.tuning.rows:
        applied = "true" if row.applied else "false"
        yield (*_labels(row), name_label(row.service), name_label(row.span), applied), 1


def budgets(snapshot: Snapshot) -> Iterator[Sample]:
    """Of the jobs with a slowdown budget: tracked ones have latency limits instead."""
    for row in snapshot.tuning.rows:
        if row.load is None:
            yield _labels(row), row.budget


def slo_misses(snapshot: Snapshot) -> Iterator[Sample]:
    for row in _tracked(snapshot):
        for one in row.load.objectives if row.load is not None else ():
            if one.miss_ratio is not None:
                yield (*_labels(row), one.name), one.miss_ratio


def _tracked(snapshot: Snapshot) -> Iterator[TuningRow]:
    return (row for row in snapshot.tuning.rows if row.load is not None)


def _of_load(field: str) -> Draw:
    """One field of the load of every tracked job."""
    return each(_tracked, _labels, attrgetter(f"load.{field}"))


# --------------------------------------------------------------------------------------- caps


def _active_limits(unit: str, scale: int) -> Draw:
    """The effective caps of all knobs: the lowest of the holder's limit and the ceiling."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for row in snapshot.tuning.caps:
            knob, device = row.state.key
            allowed = [value for value in (row.wanted, row.ceiling) if value is not None]
            if knob.unit == unit and allowed and row.holder and row.usable and not row.foreign:
                yield (device, knob, name_label(row.holder)), min(allowed) * scale

    return draw


def _cap(field: str) -> Draw:
    """One condition of every knob."""
    return each(
        attrgetter("tuning.caps"),
        attrgetter("state.key.device", "state.key.knob"),
        lambda row: int(getattr(row, field)),
    )


def _capper(field: str) -> Draw:
    """A figure of the capper since the boot; absent if no capper is needed."""

    def draw(snapshot: Snapshot) -> int | None:
        tuning = snapshot.tuning
        return None if tuning.capper.answers is None else int(getattr(tuning.capper, field))

    return single(draw)


def _job(name: str, field: str = "") -> Metric:
    """A metric of one field of TuningRow, by default that of its name."""
    draw = each(attrgetter("tuning.rows"), _labels, attrgetter(field or name))
    return declared(f"wattspan.autotune.{name}", draw)


def _energy(name: str, field: str) -> Metric:
    """A metric of one field of TuningRow, with the provenance of the compared energies."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for row in snapshot.tuning.rows:
            if (value := getattr(row, field)) is not None:
                yield (*_labels(row), _provenance(snapshot, row)), value

    return declared(f"wattspan.autotune.{name}", draw)


TUNING = (
    declared("wattspan.autotune.mode.info", tuning_mode),
    declared("wattspan.autotune.job.info", job_info),
    declared("wattspan.autotune.state", states),
    declared("wattspan.autotune.decision.info", decision_info),
    declared("wattspan.autotune.decisions", decisions),
    declared("wattspan.autotune.budget", budgets),
    _job("confidence"),
    _job("slowdown"),
    _job("slowdown.bound", "slowdown_bound"),
    _job("held.slowdown", "held_slowdown"),
    _job("held.slowdown.bound", "held_bound"),
    _energy("saving", "saving"),
    _energy("saved", "saved_surely"),
    _energy("saved.estimate", "saved"),
    declared("wattspan.autotune.saved.bound", saved_bounds),
    _job("exploration"),
    _job("lost"),
    _job("allowance"),
    _job("pairs"),
    _job("units"),
    _job("commit", "committed"),
    declared("wattspan.autotune.slo.miss", slo_misses),
    declared("wattspan.autotune.load", _of_load("used")),
    declared("wattspan.autotune.load.requests", _of_load("load")),
    declared("wattspan.autotune.load.bin", _of_load("bin_bound")),
    declared("wattspan.cap.power", _active_limits("mW", 1)),
    declared("wattspan.cap.clock", _active_limits("MHz", MEGAHERTZ)),
    declared("wattspan.clock.limit", clock_limits),
    declared("wattspan.cap.usable", _cap("usable")),
    declared("wattspan.cap.foreign", _cap("foreign")),
    declared("wattspan.host.power.ceiling", single(attrgetter("tuning.ceiling"))),
    declared("wattspan.capper.up", _capper("answers")),
    declared("wattspan.capper.writes", _capper("writes"), begins=boot_start_times),
    declared("wattspan.capper.restores", _capper("restores"), begins=boot_start_times),
    declared("wattspan.capper.resets", _capper("resets"), begins=boot_start_times),
    declared("wattspan.logs.forwarded", single(attrgetter("tuning.forwarded"))),
    declared("wattspan.logs.forward.drops", items_of(attrgetter("tuning.forward_drops"))),
)

# ---------------------------------------------------------------------------------------- fleet

WHOLE_FLEET = "fleet"
"""The label of the place that has all hosts."""


def _host(name: str, value: Callable[[FleetAccounts], int | None]) -> Metric:
    """A metric of this host's part; absent outside a fleet."""

    def draw(snapshot: Snapshot) -> int | None:
        return None if snapshot.fleet is None else value(snapshot.fleet)

    return declared(f"wattspan.fleet.{name}", single(draw))


def _place(name: str, field: str = "") -> Metric:
    """A metric of each place, which the leader alone has: its field, by default of its name."""
    value: Callable[[FleetPlace], int | None] = attrgetter(field or name)

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for one in () if snapshot.fleet is None else snapshot.fleet.places:
            if (figure := value(one)) is not None:
                yield (one.place or WHOLE_FLEET,), figure

    return declared(f"wattspan.fleet.{name}", draw)


FLEET = (
    _host("host.allotment", attrgetter("allotment")),
    _host("host.safe", attrgetter("safe")),
    _host("host.demand", attrgetter("demand")),
    _host("contact", lambda accounts: int(accounts.in_contact)),
    _host("leader", lambda accounts: int(accounts.leads)),
    _place("budget"),
    _place("demand"),
    _place("allotted", "enforceable"),
    _place("safe"),
    _place("headroom"),
    _place("hosts"),
    _place("absent_hosts", "absent"),
    _host("ended_hosts", lambda accounts: accounts.ended if accounts.leads else None),
)
