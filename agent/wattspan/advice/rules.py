"""Advice on the energy of GPUs, from measured facts about boards and the services that use them.

Each piece of advice has the joules that it would have saved in the observed time, a range, and a
confidence. Nothing is advised where a figure that the advice needs is unknown.

Waiting time costs the static power, which a better overlap of communication and computation saves
(Kareus). A clock that varies around its mean costs more than the mean clock, because power is a
convex function of the clock (Kareus, theorem 1; Jensen 1906); the excess is computed from the
measured powers and clocks, by a quadratic regression. Time without a kernel within the use of a
board is shared by more work in a larger batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean
from typing import NamedTuple

from wattspan.advice.static_power import StaticPowerFit, StaticPowerRefusal
from wattspan.model import (
    SECOND,
    Microjoules,
    Milliwatts,
    ModelEnum,
    Provenance,
    StaticBasis,
    StaticPower,
    energy_at,
)
from wattspan.util.linear_systems import solved

MIN_OBSERVED = 60 * SECOND
"""Less time of observation permits no advice."""

MIN_WAITING = 0.02
"""The least share of waiting time in the time of a service's use of a board."""

MIN_CLOCK_DEVIATION = 0.05
"""The least standard deviation of the SM clock, relative to its mean."""

MIN_CLOCK_SAMPLES = 60
MIN_CAPPED = 0.1
"""The least part of the samples of the clock in which the power limit held it down."""

MAX_DYNAMIC_SHARE = 0.5
"""With a larger dynamic part of the energy, no larger batch is advised."""

MAX_BUSY = 0.9
MIN_UNUSED = 0.9
"""The least part of the observed time in which an idle board had no user."""

_CONFIGURED_ERROR = 0.05  # of an operator's figure, an assumption
_PRECISE = 0.02  # half-width of a fit, relative to it
_SURE = 2.0  # standard errors
_LEAST_EXCESS = 0.005  # of the power at the mean clock


class AdviceKind(ModelEnum):
    """The thing to change."""

    OVERLAP = "overlap_communication"
    LOCK_CLOCK = "lock_clock"
    LARGER_BATCH = "larger_batch"
    IDLE_BOARD = "idle_board"


class Confidence(ModelEnum):
    """The evidence of a piece of advice."""

    HIGH = "high"  # all figures are measured, or fitted precisely
    MEDIUM = "medium"  # a fitted figure, or an operator's
    LOW = "low"  # it assumes how the job reacts


class BoardClockSample(NamedTuple):
    """The SM clock and the power in mW of a busy board at one time.

    ``capped``: the power limit held the clock down.
    """

    clock_hz: int
    power: int
    capped: bool


@dataclass(slots=True)
class BoardUse:
    """The use of a board by its only user: energy in microjoules, times in nanoseconds.

    ``busy`` is the time with a running kernel in the ``metered`` time, ``waiting`` the time of
    waiting spans in the time of ``windows``.
    """

    energy: int = 0
    time: int = 0
    busy: int = 0
    metered: int = 0
    waiting: int = 0
    windows: int = 0

    def copy(self) -> BoardUse:
        return replace(self)

    def add(self, other: BoardUse) -> None:
        self.energy += other.energy
        self.time += other.time
        self.busy += other.busy
        self.metered += other.metered
        self.waiting += other.waiting
        self.windows += other.windows


class UseFacts(NamedTuple):
    """The use of a board by one process of a service; "" for a process without spans."""

    service: str
    use: BoardUse


class BoardFacts(NamedTuple):
    """The facts about one board in the observed time (nanoseconds)."""

    board: str
    name: str
    provenance: Provenance
    observed: int
    unused: int  # time without any user
    unused_energy: int
    in_use: bool  # now
    static: StaticPower | None
    fit: StaticPowerFit | StaticPowerRefusal
    idle_power: Milliwatts | None
    samples: Sequence[BoardClockSample]
    uses: Sequence[UseFacts]


class Advice(NamedTuple):
    """One piece of advice: energy in microjoules that it would have saved in ``observed`` ns.

    ``low`` and ``high`` are the range. ``share`` is the figure that it is based on: of waiting
    time, of the deviation of the clock, of time without a kernel, of time without a user. ``idle``
    is the part of ``energy`` that is idle energy of the board, which no process or span has; None
    if the idle power is unknown.
    """

    kind: AdviceKind
    service: str  # "" for a board as a whole
    board: str
    name: str
    energy: Microjoules
    low: Microjoules
    high: Microjoules
    confidence: Confidence
    observed: int
    share: float
    basis: StaticBasis | None
    provenance: Provenance
    sentence: str
    idle: Microjoules | None = None


class NoAdviceReason(ModelEnum):
    """A figure that advice would need, or a condition that is not met."""

    NO_GPU = "no_gpu"
    SHORT_OBSERVATION = "short_observation"
    IDLE_UNKNOWN = "idle_unknown"
    NO_USE = "no_use"  # by a service with spans
    NO_WAITING_SPANS = "no_waiting_spans"
    FEW_WINDOWS = "few_windows"
    NOTHING_WAITS = "nothing_waits"
    STATIC_UNKNOWN = "static_unknown"


class NoAdvice(NamedTuple):
    """A reason for no advice about a board, or about the use of it by a service; "" for none."""

    reason: NoAdviceReason
    service: str
    board: str
    name: str
    sentence: str


def advise(boards: Iterable[BoardFacts], service: str | None = None) -> list[Advice]:
    """All advice, the most energy first; with ``service`` only that for its use of boards."""
    found: list[Advice] = []
    for board in boards:
        uses = _uses_by_service(board)
        for name, use in uses.items():
            if name and service in (None, name):
                found += _overlap(board, name, use)
                found += _larger_batch(board, name, use)
        if service is None or service in uses:
            found += _lock_clock(board, service or "")
        if service is None:
            found += _idle(board)
    return sorted(found, key=lambda one: (-one.energy, one.board, one.kind))


def reasons_for_none(
    boards: Sequence[BoardFacts], service: str | None = None
) -> Iterator[NoAdvice]:
    """The reasons, where ``advise`` has nothing; with ``service`` only those for its boards."""
    if not boards:
        yield NoAdvice(NoAdviceReason.NO_GPU, "", "", "", "No GPU is measured, and advice is about"
                       " GPUs only.")  # fmt: skip
    for board in boards:
        uses = _uses_by_service(board)
        if service is None or service in uses:
            yield from _missing_facts(board, any(uses))
            for name, use in sorted(uses.items()):
                if name and service in (None, name):
                    yield _no_overlap(board, name, use)


def _uses_by_service(board: BoardFacts) -> dict[str, BoardUse]:
    uses: dict[str, BoardUse] = defaultdict(BoardUse)
    for name, use in board.uses:
        uses[name].add(use)
    return uses


def _missing_facts(board: BoardFacts, used: bool) -> Iterator[NoAdvice]:
    """The reasons that apply to the board as a whole."""
    found: list[tuple[NoAdviceReason, str]] = []
    if board.observed < MIN_OBSERVED:
        seconds = board.observed / SECOND
        found.append((NoAdviceReason.SHORT_OBSERVATION,
                      f"{board.name} has been observed for {seconds:.0f} s, and advice needs"
                      f" {MIN_OBSERVED // SECOND} s."))  # fmt: skip
    if board.idle_power is None:
        found.append((NoAdviceReason.IDLE_UNKNOWN,
                      f"The idle power of {board.name} is unknown. The agent learns it once no"
                      " program uses the board for some seconds."))  # fmt: skip
    if not used:
        found.append((NoAdviceReason.NO_USE,
                      f"No service with spans has used {board.name} alone."))  # fmt: skip
    for reason, sentence in found:
        yield NoAdvice(reason, "", board.board, board.name, sentence)


def _no_overlap(board: BoardFacts, service: str, use: BoardUse) -> NoAdvice:
    """The first condition of advice on waiting that a service does not meet."""
    share = use.waiting / use.windows if use.windows else 0.0
    if not use.windows:
        reason = NoAdviceReason.NO_WAITING_SPANS
        sentence = (
            f"No waiting of {service} on {board.name} is known: it sent no span that is named in"
            " [spans] waiting while it was the only user of the board."
        )
    elif use.windows < MIN_OBSERVED:
        reason = NoAdviceReason.FEW_WINDOWS
        sentence = (
            f"{use.windows / SECOND:.0f} s of {service} on {board.name} are evaluated for waiting,"
            f" and advice needs {MIN_OBSERVED // SECOND} s."
        )
    elif share < MIN_WAITING:
        reason = NoAdviceReason.NOTHING_WAITS
        sentence = (
            f"{service} waits {share:.1%} of its time on {board.name}, and advice begins at"
            f" {MIN_WAITING:.0%}."
        )
    else:
        reason = NoAdviceReason.STATIC_UNKNOWN
        sentence = (
            f"{service} waits {share:.1%} of its time on {board.name}, and the static power of the"
            " board is neither fitted nor configured. Set [sources.nvml] static_watts."
        )
    return NoAdvice(reason, service, board.board, board.name, sentence)


def _overlap(board: BoardFacts, service: str, use: BoardUse) -> Iterator[Advice]:
    static = board.static
    if static is None or static.basis is StaticBasis.LOWER_BOUND or use.windows < MIN_OBSERVED:
        return
    share = use.waiting / use.windows
    if share < MIN_WAITING:
        return
    error = _CONFIGURED_ERROR
    if static.basis is StaticBasis.FITTED and isinstance(board.fit, StaticPowerFit):
        error = board.fit.half_width / board.fit.power
    energy = energy_at(static.power, use.waiting)
    yield Advice(
        AdviceKind.OVERLAP,
        service,
        board.board,
        board.name,
        energy,
        Microjoules(round(energy * (1 - error))),
        Microjoules(round(energy * (1 + error))),
        Confidence.HIGH if error <= _PRECISE else Confidence.MEDIUM,
        use.windows,
        share,
        static.basis,
        board.provenance,
        f"{service} waits for other ranks {share:.1%} of its time on {board.name}, at"
        f" {static.power / 1000:.0f} W. Overlap communication with computation.",
        None if board.idle_power is None else min(energy, energy_at(board.idle_power, use.waiting)),
    )


def _larger_batch(board: BoardFacts, service: str, use: BoardUse) -> Iterator[Advice]:
    static, idle = board.static, board.idle_power
    if static is None or idle is None or use.metered < MIN_OBSERVED or not use.energy:
        return
    busy = use.busy / use.metered
    dynamic = 1 - min(1.0, energy_at(static.power, use.time) / use.energy)
    if dynamic > MAX_DYNAMIC_SHARE or busy > MAX_BUSY:
        return
    pauses = energy_at(idle, round(use.time * (1 - busy)))
    yield Advice(
        AdviceKind.LARGER_BATCH,
        service,
        board.board,
        board.name,
        Microjoules(pauses // 2),
        Microjoules(0),
        pauses,
        Confidence.LOW,
        use.time,
        1 - busy,
        static.basis,
        board.provenance,
        f"At most {dynamic:.0%} of the energy of {service} on {board.name} is dynamic, and no"
        f" kernel runs {1 - busy:.0%} of the time. Twice the batch halves these pauses for the same"
        " work if they stay as long; else run several jobs on one board.",
    )


def _lock_clock(board: BoardFacts, service: str) -> Iterator[Advice]:
    samples = board.samples
    used = sum(use.time for _, use in board.uses)
    if len(samples) < MIN_CLOCK_SAMPLES or used < MIN_OBSERVED:
        return
    capped = sum(sample.capped for sample in samples) / len(samples)
    mean = fmean(sample.clock_hz for sample in samples)
    deviation = sqrt(fmean((sample.clock_hz - mean) ** 2 for sample in samples)) / mean
    if capped < MIN_CAPPED or deviation < MIN_CLOCK_DEVIATION:
        return
    excess = _excess_power([(s.clock_hz / mean - 1, s.power) for s in samples])
    if excess is None:
        return
    power, error = excess
    energy, range_of = energy_at(round(power), used), energy_at(round(error), used)
    yield Advice(
        AdviceKind.LOCK_CLOCK,
        service,
        board.board,
        board.name,
        energy,
        Microjoules(energy - range_of),
        Microjoules(energy + range_of),
        Confidence.MEDIUM,
        used,
        deviation,
        None,
        board.provenance,
        f"The power limit of {board.name} is reached and its SM clock varies by {deviation:.0%}."
        f" Lock it at its mean, {mean / 1e6:.0f} MHz: the knob gpu_clock of the tuner proves it.",
    )


def _excess_power(points: Sequence[tuple[float, int]]) -> tuple[float, float] | None:
    """The mean power less that at the mean clock, in mW, and its half-width of 95 %.

    The points are the relative deviation of the clock and the power. None unless power is convex
    in the clock beyond the error.
    """
    count = float(len(points))
    powers = [sum(x**n for x, _ in points) for n in range(5)]
    sums = [sum(x**n * power for x, power in points) for n in range(3)]
    matrix = [[powers[i + j] for j in range(3)] for i in range(3)]
    # Two levels of the clock do not identify a curve.
    centred = powers[4] / count - (powers[2] / count) ** 2 - powers[3] ** 2 / count / powers[2]
    if centred <= 1e-3 * (powers[2] / count) ** 2:
        return None
    (base, slope, bend), (*_, inverse) = solved(matrix, [sums, [0.0, 0.0, 1.0]])
    squares = sum((power - base - slope * x - bend * x * x) ** 2 for x, power in points)
    spread = powers[2] / count
    error = _SURE * sqrt(squares / (count - 3) * inverse) * spread
    excess = bend * spread
    return (excess, error) if excess > max(error, _LEAST_EXCESS * base) else None


def _idle(board: BoardFacts) -> Iterator[Advice]:
    if board.in_use or board.observed < MIN_OBSERVED:
        return
    share = board.unused / board.observed
    if share < MIN_UNUSED:
        return
    energy = Microjoules(board.unused_energy)
    yield Advice(
        AdviceKind.IDLE_BOARD,
        "",
        board.board,
        board.name,
        energy,
        energy,
        energy,
        Confidence.HIGH,
        board.observed,
        share,
        None,
        board.provenance,
        f"{board.name} had no user {share:.0%} of the time. Give it work of another board, or turn"
        " it off.",
    )
