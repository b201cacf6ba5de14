"""The order of trials: a first descent, then blocks in random order, and the settings left out.

The first block goes down each knob from the highest setting, so that a knob is not followed further
once energy has risen twice beyond noise or time exceeds the longest one. The other blocks have the
remaining settings in random order, with the baseline in each, so that a drift of the machine shifts
all settings of a block alike.

For a known slowdown budget, a long descent takes every second setting first and then the ones
beside the best setting, and it also ends beyond the budget. The other blocks repeat only the
settings that may be recommended: the same number of trials as without it at most. A setting is
measured further only as long as that can change the recommendation: it may keep the budget, and its
energy may be lower than that of the present recommendation. That is successive elimination
(Even-Dar et al. 2006), with an indifference zone: settings of nearly equal energy are not told
apart.

With a time budget, the trial with the most expected gain is next. The trials are those of the
random order: each setting at most once in each of ``study.repeat`` blocks, with the baseline first
in a block. A block ends once another trial of a setting that it has already promises more than the
settings that it lacks.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from math import floor, log, log1p, sqrt
from operator import attrgetter
from random import Random
from typing import NamedTuple

from wattspan.frontier.estimates import CONFIDENCE, BlockModel, SettingEstimates, dominated
from wattspan.frontier.recommendation import DEFAULT_TOLERANCE
from wattspan.frontier.statistics import LogPoint, SettingFigures, best, gains, quantile
from wattspan.frontier.trials import Setting, Study, Trial, places

INDIFFERENCE = 0.02
"""Relative energy that is not worth further trials."""

MIN_FREEDOM = 2
"""Degrees of freedom from which the noise counts as known: the recommendation needs it."""

_PRIOR_NOISE, _PRIOR_FREEDOM = 0.02, 2
"""Relative noise of a trial that is assumed at first, as if known from so many trials."""

_OVER = 2.0
"""Standard errors beyond the limit from which a setting is not measured further."""

_WORSE = 1.0
"""Standard errors of energy, beyond the zone, from which a setting is not measured further."""


def undecided(
    estimates: SettingEstimates, max_slowdown: float, out: Container[int] = ()
) -> list[int]:
    """The numbers of the settings to repeat, besides the baseline; none of those ``out``.

    No claim is made from the errors that it assumes.
    """
    measured = estimates.measured
    if 0 not in measured:
        return []
    time, energy = estimates.time, estimates.energy
    excess = {number: time.contrast(number, 0)[0] - log1p(max_slowdown) for number in measured}
    errors = {number: _error(time, number, 0) for number in measured}
    # The best one is that which would be recommended with the assumed noise.
    deviations = quantile(CONFIDENCE, _PRIOR_FREEDOM + max(0, time.freedom))
    keeping = [
        number
        for number in measured
        if number
        and excess[number] <= min(0.0, log1p(DEFAULT_TOLERANCE) - deviations * errors[number])
    ]
    best = min([0, *keeping], key=lambda number: energy.value(number).value)
    found = [
        number
        for number in measured
        if number not in (0, best)
        and number not in out
        and excess[number] <= _OVER * errors[number]
        and energy.contrast(number, best)[0]
        < log(1 - INDIFFERENCE) + _WORSE * _error(energy, number, best)
    ]
    doubtful = found or excess[best] > -_OVER * errors[best]
    if best != 0 and (doubtful or time.freedom < MIN_FREEDOM):
        found.append(best)
    return sorted(found)


def trial_variance(model: BlockModel) -> float:
    """The variance of one trial's logarithm: the estimate, with the assumed one for few trials."""
    freedom = max(0, model.freedom)
    known = freedom * model.variance if freedom else 0.0
    return (_PRIOR_FREEDOM * _PRIOR_NOISE**2 + known) / (_PRIOR_FREEDOM + freedom)


def _error(model: BlockModel, one: int, other: int) -> float:
    return sqrt(trial_variance(model) * model.contrast(one, other)[1])


# ------------------------------------------------------------------------------------- time budget


LEAST_BLOCK = 3
"""Settings besides the baseline that a block has before it may end."""


def spent_seconds(study: Study) -> float:
    """The wall time of all trials so far."""
    return sum(trial.elapsed_seconds for trial in study.trials)


def affordable_trials(study: Study, budget: float) -> int:
    """The trials for which the rest of ``budget`` seconds suffices, by their mean time so far."""
    past = [trial.elapsed_seconds for trial in study.trials if trial.elapsed_seconds > 0]
    least = study.warm_up_seconds + study.window_seconds
    expected = max(least, sum(past) / len(past) if past else 0.0)
    return max(0, floor((budget - spent_seconds(study)) / expected))


class GainOrder:
    """Chooses among the trials that are to do, each a setting's number and a block."""

    def __init__(
        self,
        study: Study,
        done: Container[tuple[Setting, int]],
        out: Container[Setting],
        reference: LogPoint,
    ) -> None:
        """``out`` are settings without further trials; beyond ``reference`` nothing is gained."""
        self._study = study
        self._to_do = {
            number: [
                block
                for block in range(study.repeat)
                if (setting, block) not in done and (number == 0 or setting not in out)
            ]
            for number, setting in enumerate(study.settings)
        }
        self._newest = max((trial.block for trial in study.trials), default=0)
        self._reference = reference

    @property
    def to_do(self) -> int:
        """The number of trials to do."""
        return sum(map(len, self._to_do.values()))

    def next(self, random: Random) -> tuple[int, int] | None:
        """A setting's number and its block; None if nothing is to do."""
        blocks, newest = self._to_do, self._newest
        candidates = [number for number in blocks if number and blocks[number]]
        if newest in blocks[0]:
            return 0, newest
        if not candidates:
            return (0, blocks[0][0]) if blocks[0] else None
        lacking = [number for number in candidates if newest in blocks[number]]
        begins = newest + 1 in blocks[0]  # a further block is possible
        if begins:
            if not lacking:
                return 0, newest + 1
            if self._others() < LEAST_BLOCK:
                candidates = lacking
        chosen = self._best(candidates, random)
        if chosen in lacking:
            return chosen, newest
        return (0, newest + 1) if begins else (chosen, blocks[chosen][-1])

    def _others(self) -> int:
        """The settings in the newest block, without the baseline."""
        found = {one.setting for one in self._study.trials if one.block == self._newest}
        return len(found - {self._study.baseline})

    def _best(self, candidates: Sequence[int], random: Random) -> int:
        study = self._study
        estimates = SettingEstimates(study.settings, study.usable())
        counts = dict.fromkeys(estimates.measured, 0)
        for trial in estimates.trials:
            counts[estimates.numbers[trial.setting]] += 1
        found = dict.fromkeys(candidates, 0.0)
        if 0 in counts:
            time, energy = estimates.time, estimates.energy
            results = {
                number: SettingFigures(
                    LogPoint(time.contrast(number, 0)[0], energy.contrast(number, 0)[0]), trials
                )
                for number, trials in counts.items()
            }
            noise = LogPoint(trial_variance(time), trial_variance(energy))
            found = gains(candidates, places(study.settings), results, noise, self._reference)
        return best(found, counts, random)


# ---------------------------------------------------------------------------------- order of trials


DEFAULT_LONGEST = 1.5
"""Time per unit relative to the baseline, above which a knob is not followed further."""

RISES = 2
"""Settings in a row with more energy than the best one above, after which a knob ends."""

FIRST_NOISE = 0.05
"""Relative noise of one trial that is assumed until trials of a setting were repeated."""

_MARGIN = 2.0
"""Standard errors beyond which a difference is not noise, in the first block."""

_COARSE_FROM = 5
"""Settings of a knob from which a descent for a slowdown budget takes every second one first."""

_BEYOND = 2
"""Settings in a row beyond the slowdown budget, after which a knob ends: time has inversions."""

_FAR_BEYOND = 0.1
"""Relative time beyond the slowdown budget, after which a knob ends at once."""

_BUDGET_NOISE = 0.02
"""Relative noise of one trial that is assumed for the comparison with the budget."""


class Planned(NamedTuple):
    """The next trial."""

    setting: Setting
    block: int


@dataclass(frozen=True, slots=True)
class TrialSchedule:
    """Chooses trials until each remaining setting has ``study.repeat`` usable or failed ones.

    With ``max_slowdown``, the first block is followed by blocks of the settings that may be
    recommended for it, until the recommendation is decided or ``study.repeat`` times the number of
    settings is reached. With ``time_budget``, in seconds of all trials, the same trials are ordered
    by their expected gain, until the budget has no room for another one; a setting that failed gets
    no further trial. ``seed`` fixes the random order: a resumed study continues the same one.
    Of the first ``resumed`` trials, those that failed or do not count are tried again.
    """

    longest: float = DEFAULT_LONGEST
    seed: int = 0
    max_slowdown: float | None = None
    resumed: int = 0
    time_budget: float | None = None

    def next(self, study: Study) -> Planned | None:
        """The next trial, None when the study is complete or its time budget is spent."""
        if self.time_budget is None:
            return next(self._missing(study), None)
        if not affordable_trials(study, self.time_budget):
            return None
        seed = f"{self.seed}:{len(study.trials)}"
        found = self._gain_order(study).next(Random(seed))  # noqa: S311 - no secret
        return None if found is None else Planned(study.settings[found[0]], found[1])

    def remaining(self, study: Study) -> int:
        """Trials to go, if no further setting is left out; of further blocks, one is counted."""
        missing = self.missing(study)
        if self.time_budget is None:
            return missing
        return min(missing, affordable_trials(study, self.time_budget))

    def missing(self, study: Study) -> int:
        """As ``remaining``, with those for which the time budget does not suffice."""
        if self.time_budget is None:
            return sum(1 for _ in self._missing(study))
        return self._gain_order(study).to_do

    def pruned(self, study: Study) -> list[tuple[Setting, str]]:
        """The settings that need no further trial, with the reason, besides those of before."""
        known = dict(study.pruned)
        found = [one for one in self._hopeless(study) if one[0] not in known]
        return [one for one in found if one[0] != study.baseline]

    # --------------------------------------------------------------------------- inner workings

    def _missing(self, study: Study) -> Iterator[Planned]:
        """The trials to go, in their order."""
        done = self._done(study)
        out = {setting for setting, _ in study.pruned}
        complete = True
        for block in range(study.repeat if self.max_slowdown is None else 1):
            order = self._order(study, block, study.settings)
            if self.max_slowdown is not None:
                order = _coarse_first(order)
            for setting in order:
                if setting not in out and (setting, block) not in done:
                    complete = False
                    yield Planned(setting, block)
        if complete and self.max_slowdown is not None:
            yield from self._next_block(study, self.max_slowdown, out)

    def _gain_order(self, study: Study) -> GainOrder:
        failed = {trial.setting for trial in study.trials[self.resumed :] if trial.failure}
        slowest = self.longest if self.max_slowdown is None else 1 + self.max_slowdown
        return GainOrder(
            study,
            self._done(study),
            failed.union(setting for setting, _ in study.pruned),
            LogPoint(log(slowest), log(self.longest)),
        )

    def _done(self, study: Study) -> set[tuple[Setting, int]]:
        return {
            (trial.setting, trial.block)
            for number, trial in enumerate(study.trials)
            if trial.usable or number >= self.resumed
        }

    def _next_block(
        self, study: Study, max_slowdown: float, out: Container[Setting]
    ) -> Iterator[Planned]:
        """The rest of the present block of undecided settings with the baseline, or the next."""
        estimates = SettingEstimates(study.settings, study.usable())
        pruned = {number for number, one in enumerate(study.settings) if one in out}
        numbers = undecided(estimates, max_slowdown, pruned)
        if not numbers:
            return
        wanted = [study.baseline, *(study.settings[number] for number in numbers)]
        done = self._done(study)
        newest = max(1, *(trial.block for trial in study.trials))
        for block in (newest, newest + 1):
            missing = [one for one in self._order(study, block, wanted) if (one, block) not in done]
            if missing:
                if len(done) + len(missing) <= study.repeat * len(study.settings):
                    yield from (Planned(setting, block) for setting in missing)
                return

    def _order(self, study: Study, block: int, settings: Sequence[Setting]) -> Sequence[Setting]:
        if block == 0:
            return study.settings
        shuffled = list(settings)
        Random(f"{self.seed}:{block}").shuffle(shuffled)  # noqa: S311 - no secret
        return shuffled

    def _hopeless(self, study: Study) -> Iterator[tuple[Setting, str]]:
        trials = study.usable()
        if not trials:
            return
        means = _means(trials)
        base = means.get(study.baseline)
        if base is None:
            return
        ended = [
            one for knob in _descents(study.settings) for one in self._end_of(knob, means, base)
        ]
        yield from ended
        if self.max_slowdown is not None and self.time_budget is None:
            out = {setting for setting, _ in (*study.pruned, *ended)}
            yield from self._passed_over(study, means, base, out)
        for one in dominated(SettingEstimates(study.settings, trials)):
            better = study.settings[one.by]
            yield study.settings[one.setting], f"slower and more energy than {better}"

    def _end_of(
        self, chain: Sequence[Setting], means: Mapping[Setting, _SettingMean], base: _SettingMean
    ) -> Iterator[tuple[Setting, str]]:
        """The settings of one knob's descent that lie behind its end."""
        least: _SettingMean | None = None
        rises, beyond, reason = 0, 0, ""
        for setting in chain:
            if reason:
                yield setting, reason
                continue
            mean = means.get(setting)
            if mean is None:
                continue  # its trial failed, or is not due yet
            excess = self._excess(mean, base)
            beyond = beyond + 1 if excess > 0 else 0
            if mean.seconds / base.seconds > self.longest * (1 + _margin(mean, base)):
                reason = f"{setting} takes more than {self.longest:g} times as long"
                yield setting, reason
            elif beyond == _BEYOND or excess > _FAR_BEYOND:
                reason = f"{setting} exceeds the slowdown budget"
                yield setting, reason
            elif least is not None and mean.joules > least.joules * (1 + _margin(mean, least)):
                rises += 1
                if rises == RISES:
                    reason = f"energy rises from {setting} on"
                    yield setting, reason
            else:
                rises = 0
                if least is None or mean.joules < least.joules:
                    least = mean

    def _passed_over(
        self,
        study: Study,
        means: Mapping[Setting, _SettingMean],
        base: _SettingMean,
        out: Container[Setting],
    ) -> Iterator[tuple[Setting, str]]:
        """The settings of long knobs that are not beside the best one of every second setting."""
        done = self._done(study)
        for knob in _long_knobs(study.settings):
            if any(one not in out and (one, 0) not in done for one in knob[::2]):
                continue  # the coarse descent goes on
            kept = {
                number: means[one].joules
                for number, one in enumerate(knob)
                if number % 2 == 0 and one in means and self._excess(means[one], base) <= 0
            }
            most = min(kept.values(), default=0.0) * (1 + INDIFFERENCE)
            near = {number for number, joules in kept.items() if joules <= most}
            near.update(sorted(kept)[-1:])  # the next one may still keep the budget
            for number, one in enumerate(knob):
                if number % 2 and one not in means and near.isdisjoint((number - 1, number + 1)):
                    yield one, "not beside the best setting within the slowdown budget"

    def _excess(self, mean: _SettingMean, base: _SettingMean) -> float:
        """Relative time beyond the slowdown budget and noise; below 0 within it."""
        if self.max_slowdown is None:
            return -1.0
        allowed = (1 + self.max_slowdown) * (1 + _margin(mean, base, _BUDGET_NOISE))
        return mean.seconds / base.seconds / allowed - 1


class _SettingMean(NamedTuple):
    seconds: float
    joules: float
    trials: int


def _margin(one: _SettingMean, other: _SettingMean, noise: float = FIRST_NOISE) -> float:
    return _MARGIN * noise * sqrt(1 / one.trials + 1 / other.trials)


def _means(trials: Iterable[Trial]) -> dict[Setting, _SettingMean]:
    by_setting: dict[Setting, list[Trial]] = {}
    for trial in trials:
        by_setting.setdefault(trial.setting, []).append(trial)
    return {
        setting: _SettingMean(
            sum(trial.unit_seconds for trial in group) / len(group),
            sum(trial.unit_joules for trial in group) / len(group),
            len(group),
        )
        for setting, group in by_setting.items()
    }


def _descents(settings: Sequence[Setting]) -> Iterator[list[Setting]]:
    """The settings that differ in the power limit only, or in the clock only, from the highest."""
    for same in _POWERS, _CLOCKS:
        yield from (knob for knob in _knobs(settings, same) if len(knob) > 1)


_Same = Callable[[Setting], Hashable]
_POWERS: _Same = attrgetter("clock", "parameters")
_CLOCKS: _Same = attrgetter("power", "parameters")
"""The values that settings of one knob share."""


def _knobs(settings: Sequence[Setting], same: _Same) -> Collection[list[Setting]]:
    groups: dict[Hashable, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(same(setting), []).append(setting)
    return groups.values()


def _long_knobs(settings: Sequence[Setting]) -> list[list[Setting]]:
    """The descents whose coarse ones come first: of power limits if there are any, else clocks."""
    for same in _POWERS, _CLOCKS:
        found = [knob for knob in _knobs(settings, same) if len(knob) >= _COARSE_FROM]
        if found:
            return found
    return []


def _coarse_first(settings: Sequence[Setting]) -> list[Setting]:
    """Every second setting of long knobs and the settings of short ones, then the others."""
    fine = {one for knob in _long_knobs(settings) for one in knob[1::2]}
    return sorted(settings, key=fine.__contains__)
