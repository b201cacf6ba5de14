"""Energy of a device: its counter where there is one, else the integral of its power.

Power is integrated by the trapezoid rule over samples stamped when they were read.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from wattspan.model import MILLISECOND, SECOND, Instant, Microjoules, Milliwatts, energy_at

MAX_GAP = 2 * SECOND
"""Over a longer period without a sample, the power is unknown."""

LEAST_JUMP = 1_000_000_000
"""A counter jumps if a step of it has more microjoules than this and the energy of ten seconds. One
jump tells nothing of a counter; the second one in a row tells that it does not fit the power.
"""


class PowerIntegral:
    """Ever-increasing microjoules from milliwatts, and a counter's energy over the same periods.

    Sums are kept in half milliwatt-nanoseconds (5e-13 J), so that nothing is lost to rounding.
    """

    def __init__(self) -> None:
        self._last: tuple[int, int, int | None] | None = None  # mono, milliwatts, microjoules
        self._halves = 0
        self._counted = 0
        self._compared_halves = 0
        self._jumped = False  # in the last step

    def feed(self, at: Instant, power: int, counter: int | None) -> bool:
        """Add one sample, with the value of the energy counter at that time, if there is one.

        False if the time since the last sample is too long: the integral then does not grow over
        it, and the caller must report a gap.
        """
        last, self._last = self._last, (at.mono, power, counter)
        if last is None:
            return True
        since, before, counter_before = last
        elapsed = at.mono - since
        if not 0 < elapsed <= MAX_GAP:
            return elapsed <= 0
        halves = (before + power) * elapsed
        self._halves += halves
        if counter is not None and counter_before is not None and counter >= counter_before:
            step, again = counter - counter_before, self._jumped
            self._jumped = step > LEAST_JUMP + energy_at(before + power, 5 * SECOND)
            if again or not self._jumped:
                self._compared_halves += halves
                self._counted += step
        elif counter_before is not None:  # a value of a moment, or a restart: nothing begins there
            self._last = (at.mono, power, None)
        return True

    def pause(self) -> None:
        """The time until the next sample is not integrated."""
        self._last = None

    @property
    def energy(self) -> Microjoules:
        """All that was integrated."""
        return Microjoules(self._halves // 2_000_000)

    @property
    def compared(self) -> tuple[Microjoules, Microjoules] | None:
        """Integrated and counted energy over the same periods; None before the first."""
        if not self._compared_halves and not self._counted:
            return None
        return Microjoules(self._compared_halves // 2_000_000), Microjoules(self._counted)


REPEATED_AFTER = SECOND
"""A value that repeats for as long is no reading: the next one that differs covers the time."""

FROZEN_AFTER = 5 * SECOND
MOTIONLESS_AFTER = 60 * SECOND
"""The same without a power: a board that draws a milliwatt moves a counter of millijoules."""
FROZEN_POWER = 1_000_000  # uJ: a counter that missed a whole joule does not count
SILENT_AFTER = 10 * SECOND
"""A counter that fails for as long is replaced by the power: the time is a gap by then."""


class CounterPeriod:
    """The interval of a counter's moves, from the times at which moves were observed.

    A reader cannot observe a finer step than its own interval, so the result is an upper bound.
    100 ms, the step of most GPUs, is assumed until enough moves were observed. Reads that are
    further apart than that show only a step that is longer still.
    """

    START = 100 * MILLISECOND
    ENOUGH = 9
    _GRAIN = 5 * MILLISECOND
    _COARSE = 3 * START // 2

    def __init__(self) -> None:
        self._gaps: deque[int] = deque(maxlen=2 * self.ENOUGH + 1)
        self._moves = 0
        self._moved_at: int | None = None
        self._last: tuple[int, int] | None = None  # the time and the value of the last read
        self.resolution = self.START

    def observe(self, mono: int, counter: int) -> None:
        last, self._last = self._last, (mono, counter)
        if last is None or counter == last[1]:
            return
        apart = mono - last[0]
        least = 3 * apart // 2 if apart > self._COARSE else 0
        if self._moved_at is not None and mono - self._moved_at >= least:
            self._gaps.append(mono - self._moved_at)
            self._moves += 1
            if self._moves % self.ENOUGH == 0:
                self._settle()
        self._moved_at = mono

    def _settle(self) -> None:
        typical = sorted(self._gaps)[len(self._gaps) // 2]
        rounded = max(self._GRAIN, round(typical / self._GRAIN) * self._GRAIN)
        # Small changes do not redefine the domain.
        if abs(rounded - self.resolution) * 5 > self.resolution:
            self.resolution = rounded


class EnergyMeter:
    """Compares counter and integral, and changes ``epoch`` whenever the other one counts."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.integral = PowerIntegral()
        self.step = CounterPeriod()
        self.derived: bool | None = None  # None: nothing was read yet
        self.frozen = self._repeats = False
        self._powered = False  # a power was read
        self._answered: int | None = None  # when the counter did so last, or was asked first
        self._moved: tuple[int, int, int] | None = None  # counter, when it moved, integral then

    def compare(
        self,
        at: Instant,
        counter: Microjoules | None,
        power: int | None,
        *,
        refused: bool,
        trusted: bool = True,
    ) -> bool | None:
        """True if the integral of the power counts at ``at``, False if the counter does.

        None if the energy is unknown.

        ``refused``: there is no counter. After a failure, its next value is awaited for a while. A
        counter that is not ``trusted`` is compared, and counts only without any power.
        """
        if counter is not None or self._answered is None:
            self._answered = at.mono
        silent = at.mono - self._answered >= SILENT_AFTER
        # What a frozen counter has missed, and what it catches up with, is not compared.
        bridged = power is None or self.integral.feed(at, power, None if self.frozen else counter)
        self._powered |= power is not None
        if counter is not None:
            self.step.observe(at.mono, counter)
            self._check_frozen(at, counter)
        if counter is not None and not self.frozen and (trusted or not self._powered):
            if not counter and not self._powered:  # it may be one that never moves
                return None
            self._choose(derived=False)
            return None if self._repeats else False
        if power is None or not (refused or silent or self.frozen or not trusted):
            return None
        self._choose(derived=True)
        if not bridged:
            self.epoch += 1
        return True

    def pause(self) -> None:
        """The board is not read from now on, because it is suspended: its counter may restart."""
        self.epoch += self.derived is not None
        self.integral.pause()
        self._moved, self._answered, self.frozen = None, None, False

    @property
    def unmeasured(self) -> bool:
        """True for a board whose counter and power have been 0 since the start."""
        return self.derived is None and self._moved is not None and not self._powered

    @property
    def comparison(self) -> tuple[Microjoules | None, Microjoules | None]:
        """Integrated and counted energy over the same periods; None if it is unknown.

        Without a counter, the first is all that was integrated.
        """
        compared = self.integral.compared
        if compared is None:
            return (self.integral.energy if self.derived else None), None
        return compared

    @property
    def basis(self) -> str:
        """The origin of the energy: "counter" or "power"; "" while it is unknown."""
        return "" if self.derived is None else "power" if self.derived else "counter"

    def _choose(self, *, derived: bool) -> None:
        if self.derived is not None and self.derived != derived:
            self.epoch += 1
        self.derived = derived

    def _check_frozen(self, at: Instant, counter: int) -> None:
        """Some stacks have a counter that answers and never moves."""
        if self._moved is None or self._moved[0] != counter:
            self._moved = (counter, at.mono, self.integral.energy)
            self.frozen = self._repeats = False
            return
        _, since, integral = self._moved
        missed, still = self.integral.energy - integral, at.mono - since
        self._repeats = still >= REPEATED_AFTER
        self.frozen = still >= FROZEN_AFTER and missed >= FROZEN_POWER
        if not self._powered:
            self.frozen = still >= MOTIONLESS_AFTER


MIN_COMPARED_ENERGY = 5_000_000_000
"""Microjoules of integrated power before a counter is judged: more than five seconds of load."""
COMPARED_PERIOD = 60 * SECOND
"""A disagreement is one of this time."""
LARGEST_RATIO = 1.4
"""The ratio from which counter and power are not of one board, where the sensor sees all of it."""

STATED_ERROR = 0.1
"""Error of the comparison (ratio): 5 % of the counter and 5 % of the power sensor."""
STATED_WATTS = 5.0
"""The least error of a power sensor in watts, as nvidia-smi's manual states it."""

EnergyChoice = Literal["auto", "counter", "power"]


@dataclass(frozen=True, slots=True)
class SensorView:
    """The part of a board's energy that its power sensor can see.

    ``duty`` is the part of the time in its window, 1.0 for a mean of all time. ``busy``: kernels
    may have run; a load can be locked to the window only then. ``max_power`` is in milliwatts.
    """

    duty: float = 1.0
    busy: bool = True
    max_power: int = 0

    def bounds(self, integrated: int, duration: int) -> tuple[float, float]:
        """The range in microjoules of a counter that agrees with ``integrated`` microjoules.

        In the time outside the window the board may draw any power up to its largest.
        """
        allowance = max(STATED_ERROR * integrated, STATED_WATTS * duration / 1000)
        low, high = integrated - allowance, integrated + allowance
        if self.busy and self.duty < 1.0:
            unseen = (1.0 - self.duty) * self.max_power * duration / 1_000_000
            low = min(low, self.duty * integrated)
            high = max(high, self.duty * integrated + unseen)
        return low, high


class CounterCheck:
    """Decides whether a counter fits the power that the board reports; one rule for all vendors.

    ``disagrees``: both differed by more than the sensors' stated errors in the last minute that
    tells; None before the first. ``misreports``: by far more, so that both are not of one board;
    it stays so. ``judged``: enough was compared for both, so that power may be read less often.
    """

    def __init__(self) -> None:
        self.disagrees: bool | None = None
        self.misreports = self.judged = False
        self.ratio = 1.0  # of the counter to the power, when that was found
        self._since: tuple[int, int] = (0, 0)
        self._began: tuple[int, int, int] | None = None  # of the minute: mono, both energies
        self._busy = False

    def observe(
        self,
        mono: int,
        compared: tuple[Microjoules, Microjoules] | None,
        view: SensorView,
        *,
        ignored: bool = False,
    ) -> None:
        """``compared`` is the integrated and the counted energy of the same periods.

        The time that is ``ignored`` does not count: the counter was frozen, or power seldom read.
        """
        if compared is None:
            return
        if ignored:
            self._since, self._began = compared, None
            return
        self._judge_all(compared, view)
        began = self._began
        if began is None:
            self._began, self._busy = (mono, *compared), False
            return
        self._busy |= view.busy
        duration = mono - began[0]
        if duration < COMPARED_PERIOD:
            return
        integrated, counted = compared[0] - began[1], compared[1] - began[2]
        self._began, busy = (mono, *compared), self._busy
        self._busy = False
        if duration - COMPARED_PERIOD > 2 * MAX_GAP or not integrated:
            return  # samples were missed
        self.judged |= compared[0] - self._since[0] >= MIN_COMPARED_ENERGY
        self._judge_minute(integrated, counted, duration, replace(view, busy=busy))

    def _judge_all(self, compared: tuple[Microjoules, Microjoules], view: SensorView) -> None:
        integrated, counted = (all_ - old for all_, old in zip(compared, self._since, strict=True))
        if integrated >= MIN_COMPARED_ENERGY:
            most, least = max(integrated, counted), min(integrated, counted)
            ratio = max(LARGEST_RATIO, 1.0 / view.duty)
            self.misreports = self.misreports or most > least * ratio

    def _judge_minute(self, integrated: int, counted: int, duration: int, view: SensorView) -> None:
        low, high = view.bounds(integrated, duration)
        near = replace(view, duty=1.0).bounds(integrated, duration)
        ratio = counted / integrated
        if not low <= counted <= high:
            if not self.disagrees or abs(ratio - self.ratio) > STATED_ERROR:
                self.ratio = ratio  # the finding is not reworded every minute
            self.disagrees = True
        elif near[0] <= counted <= near[1]:
            self.disagrees, self.ratio = False, ratio

    @property
    def finding(self) -> str:
        """The disagreement as the cause in a sentence; "" without one."""
        if not self.disagrees:
            return ""
        return (
            f"it counted {self.ratio:.2f} of the integrated power in a minute, which the stated"
            " errors of both do not explain"
        )


MIN_POWER = Milliwatts(5_000)
"""A module draws more than its GPU by this and more: the stated error of a sensor."""

MIN_DIFFERENCE = 500_000_000
"""Microjoules between the energies of both scopes from which they tell the counter's scope."""


class ModuleScope:
    """The scope of a GPU's counter. ``module``: it counts the superchip with its CPU and memory.

    On a GH200 the counter is that of the module (zeus#172). A superchip is recognised by its answer
    to the power of the scope "module". Its counter is taken for the module's, unless the energies
    of both scopes show that it is the GPU's.
    """

    def __init__(self) -> None:
        self.module = False
        self._of_gpu, self._of_module = PowerIntegral(), PowerIntegral()

    def observe(
        self,
        at: Instant,
        counter: Microjoules | None,
        gpu: Milliwatts | None,
        module: Milliwatts | None,
    ) -> None:
        """Add the values read at one time; ``module`` is None of a GPU without one.

        Without the power of the GPU, nothing shows that the counter is the GPU's.
        """
        if gpu is None:
            self.module |= module is not None
            return
        if module is None or module - gpu < MIN_POWER:
            return
        self._of_gpu.feed(at, gpu, counter)
        self._of_module.feed(at, module, counter)
        inner, counted = self._of_gpu.compared or (0, 0)
        outer, _ = self._of_module.compared or (0, 0)
        known = outer - inner >= MIN_DIFFERENCE
        self.module = not known or abs(counted - outer) <= abs(counted - inner)


_PICOJOULES = 1_000_000  # in a microjoule
_WIDTHS = (1 << 32, 1 << 64)
_LARGEST_STEP = 1_000_000.0  # microjoules
_GRACE = SECOND // 10
"""The value may be this much older at one read than at another: allowance for plausible energy."""


class EnergyAccumulator:
    """Turns values of a board's energy accumulator into cumulative energy.

    AMD SMI returns an accumulator and the energy of one of its steps: 15.3 uJ, as a C float, on
    all boards. The accumulator has 64 bits, or 32 with the driver's first format of metrics
    (gpu_metrics 1.0), which last 66 kJ: two minutes of a busy board. Some software stacks return an
    accumulator or a step that does not fit the power of the board (ROCm/amdsmi issue 38).

    ``epoch`` grows when the energy since the value before is unknown: the accumulator may have
    wrapped more than once, or its step changed. A fall without a plausible wrap is left to the
    meter, which tells a restart from a smaller value of a moment (ROCm/amdsmi issue 115).
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._step = 0  # picojoules
        self._last: tuple[int, int] | None = None  # mono, value
        self._offset = 0  # steps of the wraps so far
        self._width: int | None = None  # known from a wrap

    def advance(
        self, at: Instant, value: int, microjoules: float, max_power: int
    ) -> Microjoules | None:
        """The energy up to ``at``, for a step of ``microjoules``; None if that is not a step.

        ``max_power``: the board's largest plausible power in milliwatts.
        """
        if not (math.isfinite(microjoules) and 0 < microjoules < _LARGEST_STEP) or value < 0:
            return None
        step = round(microjoules * _PICOJOULES)
        if step == 0:
            return None
        last, self._last = self._last, (at.mono, value)
        if last is None or step != self._step:
            self._restart(step)
        else:
            since, before = last
            self._follow(before, value, energy_at(max_power, at.mono - since + _GRACE))
        return Microjoules((self._offset + value) * self._step // _PICOJOULES)

    def _restart(self, step: int) -> None:
        if self._step:
            self.epoch += 1
        self._step, self._offset, self._width = step, 0, None

    def _follow(self, before: int, value: int, plausible: int) -> None:
        width = self._width
        if width is not None and self._energy(width) <= plausible:
            self.epoch += 1  # it may have wrapped more than once since the last value
        if value >= before:
            return
        for width in _WIDTHS:
            if before < width and self._energy(value + width - before) <= plausible:
                self._offset += width
                self._width = width
                return

    def _energy(self, steps: int) -> int:
        return steps * self._step // _PICOJOULES
