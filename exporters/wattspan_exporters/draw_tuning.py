"""How the series about tuning and caps are drawn from a snapshot.

A job's name comes from outside: as a label it is printable and at most ``LONGEST`` characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wattspan.model import (
    CapRow,
    HwType,
    Knob,
    Move,
    Provenance,
    Reason,
    Snapshot,
    TuningAccounts,
    TuningRow,
    TuningState,
)
from wattspan_exporters.draw_energy import provenances, worst
from wattspan_exporters.draw_gpu import power_limits
from wattspan_exporters.labels import marked
from wattspan_exporters.metric import Draw, Sample

LONGEST = 100
"""Characters of a job's name that are kept in a label."""

_HERTZ = 1_000_000  # clocks are in megahertz

_TYPE = {Knob.GPU_POWER: HwType.GPU, Knob.GPU_CLOCK: HwType.GPU, Knob.CPU_POWER: HwType.CPU}

RELEASES = (
    Reason.OVER_BUDGET, Reason.BUDGET_SPENT, Reason.CHANGED, Reason.PAUSED, Reason.ENDED,
    Reason.TAIL, Reason.FOREIGN_WRITER, Reason.THROTTLED, Reason.SHARED, Reason.MIG,
    Reason.PROFILE, Reason.NO_PERMISSION, Reason.NO_CAPPER, Reason.LOST_DEVICE,
)  # fmt: skip
"""Why a cap is let go. Each is counted from zero, so that ``increase()`` sees the first."""


def label(name: str) -> str:
    """The name of a job or of a cap's holder, fit to be a label."""
    fit = "".join(c if c.isprintable() else "\ufffd" for c in name)
    return marked(name, fit, LONGEST)


# --------------------------------------------------------------------------------------- jobs


def of_job(field: Callable[[TuningRow], int | float | None]) -> Draw:
    """Draw one figure of every job that has it, labelled ``job knob``."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for row in snapshot.tuning.rows:
            if (value := field(row)) is not None:
                yield (label(row.job), row.knob), value

    return draw


def with_provenance(field: Callable[[TuningRow], int | float | None]) -> Draw:
    """The same of a figure about energy, labelled ``job knob provenance``."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for row in snapshot.tuning.rows:
            if (value := field(row)) is not None:
                yield (label(row.job), row.knob, _provenance(snapshot, row)), value

    return draw


def saved_bounds(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.tuning.rows:
        for bound, value in (("lower", row.saved_low), ("upper", row.saved_high)):
            if value is not None:
                yield (label(row.job), row.knob, bound, _provenance(snapshot, row)), value


def _provenance(snapshot: Snapshot, row: TuningRow) -> str:
    """What may be said of the energies that were compared."""
    own = tuple(a for a in snapshot.domains if a.domain.id in row.devices)
    return worst(own) or provenances(snapshot).get(_TYPE[row.knob]) or Provenance.ESTIMATED


def states(snapshot: Snapshot) -> Iterator[Sample]:
    """Every state of every job: 1 for the one it is in, 0 for the others."""
    for row in snapshot.tuning.rows:
        for state in TuningState:
            yield (label(row.job), row.knob, state), int(row.state is state)


def decisions(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.tuning.rows:
        counts = {(Move.RELEASE, reason): 0 for reason in RELEASES} | dict(row.decisions)
        for (move, reason), count in counts.items():
            yield (label(row.job), row.knob, move, reason), count


def decision_info(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.tuning.rows:
        yield (label(row.job), row.knob, row.decision.move, row.decision.reason), 1


def job_info(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.tuning.rows:
        applied = "true" if row.applied else "false"
        yield (label(row.job), row.knob, label(row.service), label(row.span), applied), 1


def mode_info(snapshot: Snapshot) -> Iterator[Sample]:
    yield (snapshot.tuning.mode,), 1


# --------------------------------------------------------------------------------------- caps


def of_capper(field: Callable[[TuningAccounts], int]) -> Draw:
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


def of_cap(field: Callable[[CapRow], bool]) -> Draw:
    """Draw whether something is true of every knob, labelled ``hw_id knob``."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for row in snapshot.tuning.caps:
            yield (row.state.key.device, row.state.key.knob), int(field(row))

    return draw


def held_power(snapshot: Snapshot) -> Iterator[Sample]:
    yield from _held(snapshot, "mW", 1)


def held_clocks(snapshot: Snapshot) -> Iterator[Sample]:
    yield from _held(snapshot, "MHz", _HERTZ)


def _held(snapshot: Snapshot, unit: str, scale: int) -> Iterator[Sample]:
    """What every knob is held at, which is the least of what its holder and the ceiling allow."""
    for row in snapshot.tuning.caps:
        knob, device = row.state.key
        allowed = [value for value in (row.wanted, row.ceiling) if value is not None]
        if knob.unit == unit and allowed and row.holder and row.usable and not row.foreign:
            yield (device, knob, label(row.holder)), min(allowed) * scale


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
