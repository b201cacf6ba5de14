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
    Instrument,
    Metric,
    Sample,
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


def _active_limits(snapshot: Snapshot, unit: str, scale: int) -> Iterator[Sample]:
    """The effective caps of all knobs: the lowest of the holder's limit and the ceiling."""
    for row in snapshot.tuning.caps:
        knob, device = row.state.key
        allowed = [value for value in (row.wanted, row.ceiling) if value is not None]
        if knob.unit == unit and allowed and row.holder and row.usable and not row.foreign:
            yield (device, knob, name_label(row.holder)), min(allowed) * scale


COUNTER, GAUGE, INFO = Instrument.COUNTER, Instrument.GAUGE, Instrument.INFO

JOB_ATTRIBUTES = ("job", "knob")
CAP_ATTRIBUTES = ("hw.id", "knob")


def _job(name: str, instrument: Instrument, unit: str, text: str, field: str) -> Metric:
    """A metric of one field of TuningRow."""
    draw = each(attrgetter("tuning.rows"), _labels, attrgetter(field))
    return Metric(f"wattspan.autotune.{name}", instrument, unit, text, JOB_ATTRIBUTES, draw)


def _energy(name: str, instrument: Instrument, unit: str, text: str, field: str) -> Metric:
    """A metric of one field of TuningRow, with the provenance of the compared energies."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for row in snapshot.tuning.rows:
            if (value := getattr(row, field)) is not None:
                yield (*_labels(row), _provenance(snapshot, row)), value

    attributes = (*JOB_ATTRIBUTES, "provenance")
    return Metric(f"wattspan.autotune.{name}", instrument, unit, text, attributes, draw)


def _cap(name: str, text: str, field: str) -> Metric:
    """A metric of one condition of every knob."""
    draw = each(
        attrgetter("tuning.caps"),
        attrgetter("state.key.device", "state.key.knob"),
        lambda row: int(getattr(row, field)),
    )
    return Metric(f"wattspan.cap.{name}", GAUGE, "", text, CAP_ATTRIBUTES, draw)


def _capper(name: str, text: str, field: str) -> Metric:
    """A counter of the capper since the boot; absent if no capper is needed."""
    draw = single(lambda snapshot: _of_capper(snapshot, field))
    return Metric(
        f"wattspan.capper.{name}", COUNTER, "{write}", text, (), draw, begins=boot_start_times
    )


def _of_capper(snapshot: Snapshot, field: str) -> int | None:
    tuning = snapshot.tuning
    return None if tuning.capper.answers is None else int(getattr(tuning.capper, field))


TUNING = (
    Metric("wattspan.autotune.mode.info", INFO, "", "Mode of the tuner: `[autotune] mode`.",
           ("mode",), each(lambda snapshot: (snapshot.tuning.mode,), lambda mode: (mode,),
                           lambda _: 1)),
    Metric("wattspan.autotune.job.info", INFO, "",
           "Spans that are the job's units of work, and whether its caps are applied.",
           (*JOB_ATTRIBUTES, "service.name", "span.name", "applied"), job_info),
    Metric("wattspan.autotune.state", GAUGE, "",
           "State of a job: 1 for the present state, 0 for the others.",
           (*JOB_ATTRIBUTES, "state"), states),
    Metric("wattspan.autotune.decision.info", INFO, "",
           "The decision in force, and its reason.",
           (*JOB_ATTRIBUTES, "move", "reason"), decision_info),
    Metric("wattspan.autotune.decisions", COUNTER, "{decision}",
           "Decisions that differed from the previous one, by move and reason.",
           (*JOB_ATTRIBUTES, "move", "reason"), decisions),
    Metric("wattspan.autotune.budget", GAUGE, "1", "Slowdown budget of the whole run (ratio).",
           JOB_ATTRIBUTES, budgets),
    _job("confidence", GAUGE, "1", "Configured confidence level (0–1).", "confidence"),
    _job("slowdown", GAUGE, "1", "Slowdown of the whole run (ratio).", "slowdown"),
    _job("slowdown.bound", GAUGE, "1",
         "Upper confidence bound of the whole-run slowdown (ratio).", "slowdown_bound"),
    _job("held.slowdown", GAUGE, "1",
         "Slowdown at the setting that is held (ratio).", "held_slowdown"),
    _job("held.slowdown.bound", GAUGE, "1",
         "Upper confidence bound of the slowdown at the held setting (ratio).", "held_bound"),
    _energy("saving", GAUGE, "1",
            "Energy per unit of work saved at the held setting (ratio).", "saving"),
    _energy("saved", COUNTER, "J",
            "Energy that was certainly saved: the highest lower bound so far.", "saved_surely"),
    _energy("saved.estimate", GAUGE, "J",
            "Estimate of the energy saved; it can fall, and become negative.", "saved"),
    Metric("wattspan.autotune.saved.bound", GAUGE, "J", "Confidence bounds of the energy saved.",
           (*JOB_ATTRIBUTES, "bound", "provenance"), saved_bounds),
    _job("exploration", COUNTER, "s", "Time lost by exploration.", "exploration"),
    _job("lost", GAUGE, "s", "Estimate of the time lost by caps.", "lost"),
    _job("allowance", GAUGE, "s",
         "Time that the budget permits the run to have lost so far.", "allowance"),
    _job("pairs", GAUGE, "{pair}",
         "Paired comparisons on which the present figures are based.", "pairs"),
    _job("units", COUNTER, "{unit}", "Observed units of work.", "units"),
    _job("commit", GAUGE, "s",
         "Time from the first unit of work to the first certified setting.", "committed"),
    Metric("wattspan.autotune.slo.miss", GAUGE, "1",
           "Requests of a tracked job over a latency limit, of all since its start (ratio).",
           (*JOB_ATTRIBUTES, "slo"), slo_misses),
    Metric("wattspan.autotune.load", GAUGE, "1",
           "Load of a tracked job relative to the largest one at which its present setting is "
           "certified (ratio); absent at the original setting.",
           JOB_ATTRIBUTES, _of_load("used")),
    Metric("wattspan.autotune.load.requests", GAUGE, "{request}",
           "Load of a tracked job: requests in flight.", JOB_ATTRIBUTES, _of_load("load")),
    Metric("wattspan.autotune.load.bin", GAUGE, "{request}",
           "Largest load of the present load bin of a tracked job, in requests in flight.",
           JOB_ATTRIBUTES, _of_load("bin_bound")),
    Metric("wattspan.cap.power", GAUGE, "W", "Power cap of a device, by holder.",
           (*CAP_ATTRIBUTES, "holder"), lambda snapshot: _active_limits(snapshot, "mW", 1)),
    Metric("wattspan.cap.clock", GAUGE, "Hz", "Clock cap of a device, by holder.",
           (*CAP_ATTRIBUTES, "holder"),
           lambda snapshot: _active_limits(snapshot, "MHz", MEGAHERTZ)),
    Metric("wattspan.clock.limit", GAUGE, "Hz", "Clock limits of a device.",
           ("hw.id", "limit"), clock_limits),
    _cap("usable", "Access to the knob: 1 if the capper can write it, else 0.", "usable"),
    _cap("foreign",
         "Foreign setting: 1 if another program has set the knob and the capper leaves it, else 0.",
         "foreign"),
    Metric("wattspan.host.power.ceiling", GAUGE, "W",
           "Ceiling of the summed power limits of the host; absent without one.",
           (), single(attrgetter("tuning.ceiling"))),
    Metric("wattspan.capper.up", GAUGE, "",
           "State of the capper: 1 if it answers, else 0; absent if none is needed.",
           (), single(lambda snapshot: _of_capper(snapshot, "answers"))),
    _capper("writes", "Power-limit and clock-limit writes by the capper.", "writes"),
    _capper("restores", "Original limits restored by the capper.", "restores"),
    _capper("resets",
            "Caps that a reset of their device or driver removed, found by the capper.",
            "resets"),
    Metric("wattspan.logs.forwarded", COUNTER, "{record}",
           "Log records of decisions and caps that the collector has accepted.",
           (), single(attrgetter("tuning.forwarded"))),
    Metric("wattspan.logs.forward.drops", COUNTER, "{record}",
           "Log records of decisions and caps that the collector did not get, by reason.",
           ("reason",), items_of(attrgetter("tuning.forward_drops"))),
)  # fmt: skip

# ---------------------------------------------------------------------------------------- fleet

WHOLE_FLEET = "fleet"
"""The label of the place that has all hosts."""


def _host(name: str, unit: str, text: str, value: Callable[[FleetAccounts], int | None]) -> Metric:
    """A metric of this host's part; absent outside a fleet."""

    def draw(snapshot: Snapshot) -> int | None:
        return None if snapshot.fleet is None else value(snapshot.fleet)

    return Metric(f"wattspan.fleet.{name}", GAUGE, unit, text, (), single(draw))


def _place(name: str, unit: str, text: str, value: Callable[[FleetPlace], int | None]) -> Metric:
    """A metric of each place, which the leader alone has."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for one in () if snapshot.fleet is None else snapshot.fleet.places:
            if (figure := value(one)) is not None:
                yield (one.place or WHOLE_FLEET,), figure

    said = f"{text} From the leader of the fleet only."
    return Metric(f"wattspan.fleet.{name}", GAUGE, unit, said, ("place",), draw)


FLEET = (
    _host("host.allotment", "W", "Power limit that the fleet allots to this host.",
          attrgetter("allotment")),
    _host("host.safe", "W", "Power limit of this host without contact to the fleet, at most.",
          attrgetter("safe")),
    _host("host.demand", "W",
          "Power for which this host asks; absent if it asks for that of all its devices.",
          attrgetter("demand")),
    _host("contact", "", "Contact of this host to the fleet: 1 in a session, else 0.",
          lambda accounts: int(accounts.in_contact)),
    _host("leader", "", "Leadership of the fleet: 1 if this host leads, else 0.",
          lambda accounts: int(accounts.leads)),
    _place("budget", "W", "Power budget of a place.", attrgetter("budget")),
    _place("demand", "W", "Power for which the hosts of a place ask.", attrgetter("demand")),
    _place("allotted", "W", "Sum of the power limits that the hosts of a place may enforce now.",
           attrgetter("enforceable")),
    _place("safe", "W", "Sum of the power limits of the hosts of a place without contact.",
           attrgetter("safe")),
    _place("headroom", "W", "Part of the budget of a place that no host may use now.",
           attrgetter("headroom")),
    _place("hosts", "{host}", "Registered hosts of a place.", attrgetter("hosts")),
    _place("absent_hosts", "{host}", "Registered hosts of a place without contact.",
           attrgetter("absent")),
    _host("ended_hosts", "{host}",
          "Hosts that are not counted any more because they were absent for too long. From the"
          " leader of the fleet only.",
          lambda accounts: accounts.ended if accounts.leads else None),
)  # fmt: skip
