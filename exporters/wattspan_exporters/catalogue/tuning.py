"""How the series about tuning and caps are drawn from a snapshot.

A job's name comes from outside: as a label it is printable and at most ``LONGEST`` characters.

The catalogue's chapter on tuning and caps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wattspan.model import (
    CapRow,
    DecisionReason,
    HwType,
    Knob,
    Move,
    Provenance,
    Snapshot,
    TuningAccounts,
    TuningRow,
    TuningState,
)
from wattspan_exporters.catalogue.energy import boot_start_times, provenances, worst_provenance
from wattspan_exporters.catalogue.gpu import power_limits
from wattspan_exporters.catalogue.metric import (
    Chapter,
    Draw,
    Instrument,
    Metric,
    Sample,
    truncate_with_digest,
)

MAX_NAME_LENGTH = 100
"""Characters of a job's name that are kept in a label."""

_HERTZ = 1_000_000  # clocks are in megahertz

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
"""Why a cap is let go. Each is counted from zero, so that ``increase()`` sees the first."""


def name_label(name: str) -> str:
    """The name of a job or of a cap's holder, fit to be a label."""
    fit = "".join(c if c.isprintable() else "\ufffd" for c in name)
    return truncate_with_digest(name, fit, MAX_NAME_LENGTH)


# --------------------------------------------------------------------------------------- jobs


def job_value(field: Callable[[TuningRow], int | float | None]) -> Draw:
    """Draw one figure of every job that has it, labelled ``job knob``."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for row in snapshot.tuning.rows:
            if (value := field(row)) is not None:
                yield (name_label(row.job), row.knob), value

    return draw


def job_value_with_provenance(field: Callable[[TuningRow], int | float | None]) -> Draw:
    """The same of a figure about energy, labelled ``job knob provenance``."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for row in snapshot.tuning.rows:
            if (value := field(row)) is not None:
                yield (name_label(row.job), row.knob, _provenance(snapshot, row)), value

    return draw


def saved_bounds(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.tuning.rows:
        for bound, value in (("lower", row.saved_low), ("upper", row.saved_high)):
            if value is not None:
                yield (name_label(row.job), row.knob, bound, _provenance(snapshot, row)), value


def _provenance(snapshot: Snapshot, row: TuningRow) -> str:
    """What may be said of the energies that were compared."""
    own = tuple(a for a in snapshot.domains if a.domain.id in row.devices)
    return (
        worst_provenance(own)
        or provenances(snapshot).get(_HARDWARE_TYPES[row.knob])
        or Provenance.ESTIMATED
    )


def states(snapshot: Snapshot) -> Iterator[Sample]:
    """Every state of every job: 1 for the one it is in, 0 for the others."""
    for row in snapshot.tuning.rows:
        for state in TuningState:
            yield (name_label(row.job), row.knob, state), int(row.state is state)


def decisions(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.tuning.rows:
        counts = {(Move.RELEASE, reason): 0 for reason in RELEASES} | dict(row.decisions)
        for (move, reason), count in counts.items():
            yield (name_label(row.job), row.knob, move, reason), count


def decision_info(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.tuning.rows:
        yield (name_label(row.job), row.knob, row.decision.move, row.decision.reason), 1


def job_info(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.tuning.rows:
        applied = "true" if row.applied else "false"
        yield (
            (name_label(row.job), row.knob, name_label(row.service), name_label(row.span), applied),
            1,
        )


def mode_info(snapshot: Snapshot) -> Iterator[Sample]:
    yield (snapshot.tuning.mode,), 1


# --------------------------------------------------------------------------------------- caps


def capper_value(field: Callable[[TuningAccounts], int]) -> Draw:
    """Draw one figure of the capper's, without labels, where one is asked for."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        tuning = snapshot.tuning
        if tuning.capper is not None:
            yield (), int(field(tuning))

    return draw


def forwarded(snapshot: Snapshot) -> Iterator[Sample]:
    if snapshot.tuning.forwarded is not None:
        yield (), snapshot.tuning.forwarded


def forward_drops(snapshot: Snapshot) -> Iterator[Sample]:
    for reason, count in snapshot.tuning.forward_drops.items():
        yield (reason,), count


def host_ceiling(snapshot: Snapshot) -> Iterator[Sample]:
    if snapshot.tuning.ceiling is not None:
        yield (), snapshot.tuning.ceiling


def cap_flag(field: Callable[[CapRow], bool]) -> Draw:
    """Draw whether something is true of every knob, labelled ``hw_id knob``."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for row in snapshot.tuning.caps:
            yield (row.state.key.device, row.state.key.knob), int(field(row))

    return draw


def active_power_limits(snapshot: Snapshot) -> Iterator[Sample]:
    yield from _active_limits(snapshot, "mW", 1)


def active_clock_limits(snapshot: Snapshot) -> Iterator[Sample]:
    yield from _active_limits(snapshot, "MHz", _HERTZ)


def _active_limits(snapshot: Snapshot, unit: str, scale: int) -> Iterator[Sample]:
    """What every knob is held at, which is the least of what its holder and the ceiling allow."""
    for row in snapshot.tuning.caps:
        knob, device = row.state.key
        allowed = [value for value in (row.wanted, row.ceiling) if value is not None]
        if knob.unit == unit and allowed and row.holder and row.usable and not row.foreign:
            yield (device, knob, name_label(row.holder)), min(allowed) * scale


def all_power_limits(snapshot: Snapshot) -> Iterator[Sample]:
    """What GPUs tell of themselves, and what is known of every other device that can be capped."""
    yield from power_limits(snapshot)
    told = {gpu.domain_id for gpu in snapshot.gpus}
    for row in snapshot.tuning.caps:
        if row.state.key.knob.unit == "mW":
            yield from _limits(row, 1, own=row.state.key.device not in told)


def clock_limits(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.tuning.caps:
        if row.state.key.knob.unit == "MHz":
            yield from _limits(row, _HERTZ, own=True)


def _limits(row: CapRow, scale: int, *, own: bool) -> Iterator[Sample]:
    """What is known of a knob's limits; the device's ``own`` as well, not only those set here."""
    state = row.state
    known = [("original", row.original), ("ceiling", row.ceiling)]
    if own:
        known += [
            ("minimum", state.minimum), ("default", state.default), ("maximum", state.maximum),
            ("requested", state.requested), ("enforced", state.enforced),
        ]  # fmt: skip
    for limit, value in known:
        if value is not None:
            yield (state.key.device, limit), value * scale


COUNTER, GAUGE, INFO = Instrument.COUNTER, Instrument.GAUGE, Instrument.INFO

JOB_ATTRIBUTES = ("job", "knob")
CAP_ATTRIBUTES = ("hw.id", "knob")

TUNING = Chapter(
    "Tuning and caps",
    "Whole-run figures are of everything since the job was first seen, exploration included, "
    "against its original setting. What was saved is an estimate by comparison, with an interval "
    "at the declared confidence. `wattspan_autotune_saved_joules_total` counts only what the lower "
    "end has been sure of, so it never falls; `provenance` is that of the energies that were "
    "compared. One job's counters go on under another `knob` when it is that one's turn. Why a job "
    "is where it is, in a sentence: `wattspan tune explain`.",
    (
        Metric(
            "wattspan.autotune.mode.info", INFO, "",
            "Whether the tuner is on: `[autotune] mode`.",
            ("mode",), mode_info,
        ),
        Metric(
            "wattspan.autotune.job.info", INFO, "",
            "Which spans are the units of a job's work, and whether caps are applied to it.",
            (*JOB_ATTRIBUTES, "service.name", "span.name", "applied"), job_info,
        ),
        Metric(
            "wattspan.autotune.state", GAUGE, "",
            "Where a job stands: 1 for the state it is in, 0 for the others.",
            (*JOB_ATTRIBUTES, "state"), states,
        ),
        Metric(
            "wattspan.autotune.decision.info", INFO, "",
            "The decision in force, and why.",
            (*JOB_ATTRIBUTES, "move", "reason"), decision_info,
        ),
        Metric(
            "wattspan.autotune.decisions", COUNTER, "{decision}",
            "Decisions that differed from the one before, by what they do and why.",
            (*JOB_ATTRIBUTES, "move", "reason"), decisions,
        ),
        Metric(
            "wattspan.autotune.budget", GAUGE, "1",
            "How much slower the job may become over its whole run.",
            JOB_ATTRIBUTES, job_value(lambda row: row.budget),
        ),
        Metric(
            "wattspan.autotune.confidence", GAUGE, "1",
            "How sure bounds are.",
            JOB_ATTRIBUTES, job_value(lambda row: row.confidence),
        ),
        Metric(
            "wattspan.autotune.slowdown", GAUGE, "1",
            "How much slower the job has become over its whole run.",
            JOB_ATTRIBUTES, job_value(lambda row: row.slowdown),
        ),
        Metric(
            "wattspan.autotune.slowdown.bound", GAUGE, "1",
            "The upper bound of that slowdown.",
            JOB_ATTRIBUTES, job_value(lambda row: row.slowdown_bound),
        ),
        Metric(
            "wattspan.autotune.held.slowdown", GAUGE, "1",
            "How much slower the job is at the setting that is held.",
            JOB_ATTRIBUTES, job_value(lambda row: row.held_slowdown),
        ),
        Metric(
            "wattspan.autotune.held.slowdown.bound", GAUGE, "1",
            "The upper bound of that slowdown.",
            JOB_ATTRIBUTES, job_value(lambda row: row.held_bound),
        ),
        Metric(
            "wattspan.autotune.saving", GAUGE, "1",
            "The part of the energy of a unit of work that is saved at the setting that is held.",
            (*JOB_ATTRIBUTES, "provenance"), job_value_with_provenance(lambda row: row.saving),
        ),
        Metric(
            "wattspan.autotune.saved", COUNTER, "J",
            "Energy that has surely been saved: the most that the lower bound ever was.",
            (*JOB_ATTRIBUTES, "provenance"),
            job_value_with_provenance(lambda row: row.saved_surely),
        ),
        Metric(
            "wattspan.autotune.saved.estimate", GAUGE, "J",
            "Energy that has been saved, as far as is known now; it may fall, and below zero.",
            (*JOB_ATTRIBUTES, "provenance"), job_value_with_provenance(lambda row: row.saved),
        ),
        Metric(
            "wattspan.autotune.saved.bound", GAUGE, "J",
            "The bounds of that estimate.",
            (*JOB_ATTRIBUTES, "bound", "provenance"), saved_bounds,
        ),
        Metric(
            "wattspan.autotune.exploration", COUNTER, "s",
            "Time the job has lost to settings being measured.",
            JOB_ATTRIBUTES, job_value(lambda row: row.exploration),
        ),
        Metric(
            "wattspan.autotune.lost", GAUGE, "s",
            "Time the job has lost to caps in all, as far as is known now.",
            JOB_ATTRIBUTES, job_value(lambda row: row.lost),
        ),
        Metric(
            "wattspan.autotune.allowance", GAUGE, "s",
            "Time the budget allows the job to have lost by now.",
            JOB_ATTRIBUTES, job_value(lambda row: row.allowance),
        ),
        Metric(
            "wattspan.autotune.pairs", GAUGE, "{pair}",
            "Comparisons with the original setting that the present figures rest on.",
            JOB_ATTRIBUTES, job_value(lambda row: row.pairs),
        ),
        Metric(
            "wattspan.autotune.units", COUNTER, "{unit}",
            "Units of the job's work that have been seen.",
            JOB_ATTRIBUTES, job_value(lambda row: row.units),
        ),
        Metric(
            "wattspan.autotune.commit", GAUGE, "s",
            "How long it took from the job's first unit of work to its first certified setting.",
            JOB_ATTRIBUTES, job_value(lambda row: row.committed),
        ),
        Metric(
            "wattspan.cap.power", GAUGE, "W",
            "The power a device is held to, and for whom.",
            (*CAP_ATTRIBUTES, "holder"), active_power_limits,
        ),
        Metric(
            "wattspan.cap.clock", GAUGE, "Hz",
            "The clock frequency a device is held to, and for whom.",
            (*CAP_ATTRIBUTES, "holder"), active_clock_limits,
        ),
        Metric(
            "wattspan.clock.limit", GAUGE, "Hz",
            "A limit of the device's clock.",
            ("hw.id", "limit"), clock_limits,
        ),
        Metric(
            "wattspan.cap.usable", GAUGE, "",
            "Whether the knob can be written here.",
            CAP_ATTRIBUTES, cap_flag(lambda row: row.usable),
        ),
        Metric(
            "wattspan.cap.foreign", GAUGE, "",
            "Whether somebody else has set the knob, so that it is left alone.",
            CAP_ATTRIBUTES, cap_flag(lambda row: row.foreign),
        ),
        Metric(
            "wattspan.host.power.ceiling", GAUGE, "W",
            "The host's power budget, if there is one.",
            (), host_ceiling,
        ),
        Metric(
            "wattspan.capper.up", GAUGE, "",
            "Whether the process that alone may write limits answers; absent if none is asked for.",
            (), capper_value(lambda tuning: bool(tuning.capper)),
        ),
        Metric(
            "wattspan.capper.writes", COUNTER, "{write}",
            "Limits that it has written.",
            (), capper_value(lambda tuning: tuning.writes), begins=boot_start_times,
        ),
        Metric(
            "wattspan.capper.restores", COUNTER, "{write}",
            "Limits that it has given back to what they were.",
            (), capper_value(lambda tuning: tuning.restores), begins=boot_start_times,
        ),
        Metric(
            "wattspan.logs.forwarded", COUNTER, "{record}",
            "Log records about decisions and caps that the collector behind the agent has taken.",
            (), forwarded,
        ),
        Metric(
            "wattspan.logs.forward.drops", COUNTER, "{record}",
            "Log records that the collector behind the agent did not get, by reason.",
            ("reason",), forward_drops,
        ),
    ),
)  # fmt: skip
