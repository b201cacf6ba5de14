"""One step of the tuner: units become blocks, blocks pairs, and pairs estimates; then decide."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from wattspan.model import SECOND, Decision, DecisionReason, Move
from wattspan.tuning.decisions.blocks import (
    ENERGY_TIMEOUT,
    Block,
    LevelTime,
    SampleBuffer,
    empty_buffer,
    energy_at,
    set_level,
)
from wattspan.tuning.decisions.budget import SlowdownAccount
from wattspan.tuning.decisions.estimates import (
    MAX_REACH,
    MIN_DEVIATION,
    BlockRun,
    Estimates,
    LevelEstimate,
    Pair,
    Pairing,
)
from wattspan.tuning.decisions.phases import decide
from wattspan.tuning.decisions.rank_balancing import observe_steps
from wattspan.tuning.decisions.ranks import Lockstep, SynchronousStep
from wattspan.tuning.decisions.safety import (
    check_safety,
    compare_latency,
    learn_latency_limit,
    shifted_load,
)
from wattspan.tuning.decisions.search import (
    ProbePlan,
    SearchProgress,
    TunerPhase,
    TunerState,
    reach,
)
from wattspan.tuning.decisions.sequential_test import evidence
from wattspan.tuning.decisions.serving import add_requests, log_ratio, merged
from wattspan.tuning.decisions.tenants import follow
from wattspan.tuning.decisions.values import (
    CertifiedLevels,
    EnergyPoint,
    KnobRange,
    LevelLadder,
    Observation,
    TunerPolicy,
    WorkloadKind,
    WorkUnit,
)

_MAX_DRAWS = 240

TURN_TIME = SECOND // 4
"""Shortest time between the request of a setting and its read-back."""

_MUCH_LONGER = 1.5


def begin(
    policy: TunerPolicy,
    ranges: Sequence[KnobRange],
    *,
    now: int,
    remembered: CertifiedLevels | None = None,
    account: SlowdownAccount | None = None,
    searches: int = 0,
    tenants: Sequence[TunerState] = (),
) -> TunerState:
    """The state of a new tuner of one knob of one job's devices.

    ``account`` is the closed account of the run's earlier tuners: the budget is the run's, and
    so is the permitted error. ``searches`` of these tuners in a row had no result. ``tenants`` are
    new states of other jobs on the same devices, without tenants of their own.
    """
    ladder = LevelLadder.over(ranges)
    resume_level = ladder.level(remembered.level) if remembered is not None else ladder.top
    return TunerState(
        policy=policy,
        search=SearchProgress(
            ladder,
            ProbePlan(ladder.top, 1),
            previous_level=ladder.top,
            requested_at=now,
            resume_level=None if resume_level == ladder.top else resume_level,
            retries=searches,
        ),
        samples=empty_buffer(ladder.top, now),
        decision=Decision(
            Move.DECLINE, DecisionReason.NO_SIGNAL, "No unit of work was received yet."
        ),
        begun=now,
        last_unit_end=now,
        account=account or SlowdownAccount(),
        tenants=tuple(tenants),
        random_state=(policy.seed * 2654435761 + 40503) % 2**32 or 1,
    )


def step(state: TunerState, observation: Observation) -> tuple[TunerState, Decision]:
    """The next state and its decision."""
    state = observe(state, observation)
    guarded = check_safety(state, observation)
    state = guarded if guarded is not None else decide(state, observation)
    return state, state.decision


def observe(state: TunerState, observation: Observation) -> TunerState:
    """The state with the observation added to every tenant's, before the decision."""
    if not state.tenants:
        return _observe_units(state, observation)
    shared = zip(state.tenants, observation.tenants, strict=True)
    others = tuple(
        _observe_units(follow(one, state), replace(observation, units=units))
        for one, units in shared
    )
    return _observe_units(state, observation)._replace(tenants=others)


def _observe_units(state: TunerState, observation: Observation) -> TunerState:
    level = _enforced_level(state, observation)
    samples = state.samples
    last = samples.periods[-1]
    if last.level is not None and last.level != state.level:
        samples = set_level(samples, None, state.search.requested_at)
        last = samples.periods[-1]
    if level != last.level or observation.since > last.since:
        samples = set_level(samples, level, max(observation.since, state.search.requested_at))
    blocks: list[Block] = []
    times: list[LevelTime] = []
    steps: Sequence[SynchronousStep] = ()
    if state.policy.kind is WorkloadKind.REQUESTS:
        state = learn_latency_limit(state, observation)
        samples, blocks, times = _add_request_units(state, samples, observation)
    elif observation.units or observation.energy or samples.waiting:
        state, units, steps = _synchronized_units(state, observation.units)
        samples, blocks, times = add_units(
            samples, state.policy, units, observation.energy, observation.now
        )
    if samples is not state.samples:
        latest = max(state.last_unit_end, samples.last_end if observation.units else 0)
        state = observe_steps(state._replace(samples=samples, last_unit_end=latest), steps)
    if observation.energy and not state.latency.measured:
        state = _measure_latency(state, observation.energy)
    if observation.draw and level == state.top and len(state.estimates.draws) < _MAX_DRAWS:
        draws = (*state.estimates.draws, max(observation.draw.values()))
        state = state._replace(estimates=replace(state.estimates, draws=draws))
    account = state.account
    between = min(state.level, state.search.previous_level)
    for time in times:
        charged = time.level if time.level is not None else between
        held = state.phase is TunerPhase.HOLD and charged == state.search.candidate
        account = account.add_time(time, charged, state.top, held=held)
    for block in blocks:
        account = account.add_energy(block, state.top)
    if account is not state.account:
        state = state._replace(account=account)
    for block in blocks:
        state = _update_estimates(state, block)
    return state


def _measure_latency(state: TunerState, points: Sequence[EnergyPoint]) -> TunerState:
    """Use the measured latency of caps as the settling time, once it is known.

    Comparisons that were made with a much shorter one are dropped.
    """
    latency = state.latency.add(points)
    state = state._replace(latency=latency)
    settle = latency.settled_after - TURN_TIME
    if not latency.measured or settle <= state.policy.settle_time:
        return state
    if settle > _MUCH_LONGER * state.policy.settle_time:
        state = state._replace(estimates=replace(state.estimates, levels={}))
        state = state.knowing(pairing=Pairing(), judged_pairs=0)
    return state._replace(policy=replace(state.policy, settle_time=settle))


def _synchronized_units(
    state: TunerState, units: Sequence[WorkUnit]
) -> tuple[TunerState, Sequence[WorkUnit], Sequence[SynchronousStep]]:
    """The units of several ranks as steps of the job; those of one rank unchanged."""
    if state.lockstep is None:
        if all(unit.rank == units[0].rank for unit in units):
            return state, units, ()
        state = state._replace(lockstep=Lockstep())
    lockstep, steps = (state.lockstep or Lockstep()).add(units)
    return state._replace(lockstep=lockstep), [one.unit for one in steps], steps


def _enforced_level(state: TunerState, observation: Observation) -> int | None:
    """The requested level, once it is in force; None until then.

    The previous level does not count after the request: the time of the change, between request
    and read-back, is unknown.
    """
    level = state.level
    if not observation.in_force and level == state.top:
        return level
    return level if state.ladder.is_in_force(level, observation.in_force) else None


def _update_estimates(state: TunerState, block: Block) -> TunerState:
    estimates = with_block(state.estimates, block, state.top)
    screening = state.phase is TunerPhase.SCREEN
    level_shift, before = state.evidence.level_shift, state.evidence.pairing
    if state.phase is TunerPhase.HOLD and block.level == state.search.candidate:
        if block.arrived:
            level_shift = shifted_load(level_shift, state, block)
        else:
            level_shift = level_shift.add(block, estimates.deviation(1 / block.units))
    pairing, pair = add_block(before, block, state.top, reach=reach(state), screening=screening)
    state = state._replace(estimates=estimates).knowing(level_shift=level_shift, pairing=pairing)
    if block.arrived:
        state = compare_latency(state, block)
        ended = pairing.compared and (not before.compared or pairing.middle is not before.middle)
        if ended:
            state = state.knowing(unmatched=0 if pair is not None else state.evidence.unmatched + 1)
    return _compare(state, pair) if pair is not None else state


def _compare(state: TunerState, pair: Pair) -> TunerState:
    cusum = state.evidence.cusum
    expected_side_ratio = state.estimates.deviation(2 * pair.weight)
    if abs(pair.side_ratio) > max(0.04, 4 * expected_side_ratio):
        # The job changed between the two sides, so that settings cannot be compared.
        return state.knowing(cusum=replace(cusum, inconclusive=True))
    if pair.level == state.held:
        usual = state.estimates.at(pair.level).time
        ratio = pair.span if state.estimates.at(pair.level).misleading else pair.busy
        mean = usual.mean if usual.n >= 4 else 0.8 * state.budget
        cusum = cusum.add(ratio, mean, state.budget, state.estimates.spread(pair.weight))
    estimates, account = with_pair(state.estimates, pair), state.account
    if pair.power is not None:
        time = pair.span if estimates.at(pair.level).misleading else pair.busy
        account = account.add_comparison(pair.level, time, pair.power)
    return state._replace(estimates=estimates, account=account).knowing(cusum=cusum)


def _add_request_units(
    state: TunerState, samples: SampleBuffer, observation: Observation
) -> tuple[SampleBuffer, list[Block], list[LevelTime]]:
    """As add_units, for requests."""
    waiting = list(samples.waiting)
    times: list[LevelTime] = []
    if state.latency_limit is not None:
        samples = samples._replace(served_to=samples.served_to or observation.now)
        interval = state.account.elapsed / max(state.account.units, 1)
        samples, finished, times = add_requests(
            samples, state.policy, observation.units, observation.now, state.latency_limit, interval
        )
        waiting += finished
    samples, blocks = add_energy(samples, waiting, observation.energy, observation.now)
    return samples, blocks, times


# ---------------------------------------------------------------------------- units to blocks

_PAUSED = -1.0
"""Marks the energy of a block with a pause, whose energy is not the work's."""

_MAX_POINTS = 512


def add_units(
    samples: SampleBuffer,
    policy: TunerPolicy,
    units: Sequence[WorkUnit],
    points: Sequence[EnergyPoint],
    now: int,
) -> tuple[SampleBuffer, list[Block], list[LevelTime]]:
    """Add units and energy; returns finished blocks and the elapsed times too."""
    times: list[LevelTime] = []
    waiting = list(samples.waiting)
    if units:
        samples = _run(samples, policy, units, waiting, times)
    samples, blocks = add_energy(samples, waiting, points, now)
    return samples, blocks, times


def add_energy(
    samples: SampleBuffer, waiting: list[Block], points: Sequence[EnergyPoint], now: int
) -> tuple[SampleBuffer, list[Block]]:
    """Add energy; returns the waiting blocks whose energy is known, or timed out, too."""
    if points:
        samples = samples._replace(points=_thinned(samples.points + tuple(points)))
    if not waiting:
        return _drop_used_points(samples) if points else samples, []
    blocks: list[Block] = []
    for block in waiting:
        ready = _with_energy(block, samples.points)
        if ready is None and now - block.end <= ENERGY_TIMEOUT:
            break
        blocks.append(ready or block)
    return _drop_used_points(samples._replace(waiting=tuple(waiting[len(blocks) :]))), blocks


def _run(
    samples: SampleBuffer,
    policy: TunerPolicy,
    units: Sequence[WorkUnit],
    waiting: list[Block],
    times: list[LevelTime],
) -> SampleBuffer:
    periods = list(samples.periods)
    level, since, number = periods[0]
    until = periods[1].since if len(periods) > 1 else None
    settled = since + policy.settle_time
    energy: float | None = None
    start = end = n = busy = span = 0
    work = squares = 0.0
    if samples.incomplete is not None:
        _, start, end, n, work, busy, span, squares, energy, *_ = samples.incomplete
    skipped, last_end, completed = samples.skipped, samples.last_end, samples.completed
    elapsed, elapsed_units = samples.elapsed, samples.elapsed_units
    wanted, lasting = policy.block_units, policy.block_time
    for unit in units:
        begun, ended, amount, _, _ = unit
        while until is not None and begun >= until:
            if 2 * n >= wanted and level is not None:
                waiting.append(
                    Block(level, start, end, n, work, busy, span, squares, energy, number)
                )
            times.append(LevelTime(level, elapsed, elapsed_units))
            del periods[0]
            level, since, number = periods[0]
            until = periods[1].since if len(periods) > 1 else None
            settled = since + policy.settle_time
            n = work = busy = span = skipped = completed = elapsed = elapsed_units = 0
            squares, energy = 0.0, None
        took = ended - begun
        gap = begun - last_end
        if gap <= 0:  # overlaps the previous unit
            more = max(ended - last_end, 0)
        elif gap * 2 <= took:
            more = took + gap
        else:
            more = took
        elapsed += more
        elapsed_units += 1
        if begun < settled or (until is not None and ended > until):
            last_end = max(last_end, ended)
            continue
        if skipped < policy.settle_units:
            skipped += 1
            last_end = max(last_end, ended)
            continue
        if n == 0:
            if gap >= 0 and gap * 2 <= took and last_end >= settled:
                start = last_end  # the gap before the unit belongs to the work
            else:
                start, more = begun, took
        elif gap * 2 > took:
            energy = _PAUSED
        last_end = end = max(last_end, ended)
        n += 1
        work += amount
        busy += took
        span += more
        per = took / amount
        squares += per * per
        if n >= wanted and ended - start >= lasting:
            if level is not None:
                waiting.append(
                    Block(level, start, end, n, work, busy, span, squares, energy, number)
                )
            completed += 1
            n = busy = span = 0
            work = squares = 0.0
            energy = None
            times.append(LevelTime(level, elapsed, elapsed_units))
            elapsed = elapsed_units = 0
    return samples._replace(
        periods=tuple(periods),
        incomplete=Block(level or 0, start, end, n, work, busy, span, squares, energy, number)
        if n
        else None,
        skipped=skipped,
        last_end=last_end,
        elapsed=elapsed,
        elapsed_units=elapsed_units,
        completed=completed,
    )


def _with_energy(block: Block, points: tuple[EnergyPoint, ...]) -> Block | None:
    """The block with its energy; None if that is not known yet."""
    if block.energy is not None:
        return block._replace(energy=None)
    if not points or points[-1].at < block.end:
        return None
    if points[0].at > block.start:
        return block
    energy = energy_at(points, block.end) - energy_at(points, block.start)
    return block._replace(energy=energy if energy > 0 else None)


def _thinned(points: tuple[EnergyPoint, ...]) -> tuple[EnergyPoint, ...]:
    """At most ``_MAX_POINTS``: every other point of the older half is dropped."""
    if len(points) <= _MAX_POINTS:
        return points
    half = len(points) // 2
    return points[:half:2] + points[half:]


def _drop_used_points(samples: SampleBuffer) -> SampleBuffer:
    """Drop the points that no block needs any more."""
    points = samples.points
    if len(points) < 64:
        return samples
    oldest = min(
        [one.start for one in (*samples.waiting, *samples.windows)]
        + [samples.incomplete.start if samples.incomplete is not None else samples.last_end]
    )
    first = bisect_left(points, (oldest, -1)) - 1
    return samples._replace(points=points[first:]) if first > 16 else samples


# ---------------------------------------------------------------------------- blocks to pairs

_MAX_DISTANCE = 12
"""Largest distance of compared blocks, relative to their length."""


def add_block(
    pairing: Pairing, block: Block, top: int, *, reach: int, screening: bool
) -> tuple[Pairing, Pair | None]:
    """Add a block; returns the comparison that it completes, if any, too.

    ``reach`` blocks on each side are used. While ``screening``, a capped run is compared with the
    two uncapped ones around it, otherwise an uncapped run with two capped ones; no block is used
    twice.
    """
    present, alone = pairing.present, BlockRun((block,), (block,), 1)
    if present is None or not _near(present.tail[-1], block):
        return Pairing(present=alone), None
    if present.tail[-1].period == block.period:
        head = (*present.head, block) if present.count < MAX_REACH else present.head
        tail = (*present.tail[1 - MAX_REACH :], block)
        present = BlockRun(head, tail, present.count + 1)
        pairing = replace(pairing, present=present)
    else:
        pairing = Pairing(pairing.middle, present, alone)
    return _completed_pair(pairing, top, reach, screening=screening)


def _near(one: Block, other: Block) -> bool:
    return other.start - one.end <= _MAX_DISTANCE * (one.end - one.start)


def _completed_pair(
    pairing: Pairing, top: int, reach: int, *, screening: bool
) -> tuple[Pairing, Pair | None]:
    before, middle, present = pairing.before, pairing.middle, pairing.present
    if pairing.compared or before is None or middle is None or present is None:
        return pairing, None
    level, around = middle.head[0].level, present.head[0].level
    if before.head[0].level != around or (level == top) == (around == top):
        return pairing, None
    if (around == top) is not screening or present.count < reach:
        return pairing, None
    # The blocks of the run before that the previous comparison has not used.
    first = before.tail[-min(reach, max(1, before.count // 2)) :]
    flank = first + present.head[:reach]
    rest = min(middle.count - len(middle.head), MAX_REACH)
    core = middle.head + middle.tail[len(middle.tail) - rest :]
    capped, free = (core, flank) if screening else (flank, core)
    if core[0].arrived:
        pair = _load_pair(capped, free)
        return replace(pairing, compared=True), pair
    pair = _pair(capped, free)
    side_ratio = math.log(_rates(present.head[:reach])[0] / _rates(first)[0])
    return replace(pairing, compared=True), pair._replace(side_ratio=side_ratio)


def _load_pair(capped: Sequence[Block], free: Sequence[Block]) -> Pair | None:
    """A pair of requests; None if the loads differ."""
    ratio = log_ratio(merged(free), merged(capped))
    if ratio is None:
        return None
    return _pair(capped, free)._replace(busy=ratio, span=ratio)


def _pair(capped: Sequence[Block], free: Sequence[Block]) -> Pair:
    busy1, span1, power1, units1 = _rates(capped)
    busy0, span0, power0, units0 = _rates(free)
    power = None if power1 is None or power0 is None else math.log(power1 / power0)
    return Pair(
        capped[0].level,
        max(capped[-1].end, free[-1].end),
        math.log(busy1 / busy0),
        math.log(span1 / span0),
        power,
        1 / units1 + 1 / units0,
    )


def _rates(blocks: Sequence[Block]) -> tuple[float, float, float | None, int]:
    """Busy time and span per work, mean power if known, and the number of units."""
    work = math.fsum([one.work for one in blocks])
    busy = sum([one.busy for one in blocks]) / work
    span = sum([one.span for one in blocks]) / work
    known = [one for one in blocks if one.energy is not None]
    power = None
    if known:
        lasted = sum([one.end - one.start for one in known])
        power = math.fsum([one.energy or 0.0 for one in known]) / lasted
    return busy, span, power, sum([one.units for one in blocks])


# ------------------------------------------------------------------------- pairs to estimates

_MAX_PAIRS = 400
"""Pairs of a level that are kept, the latest ones."""

_MAX_DURATION_MISMATCH = 0.004
"""Difference of the log ratios of span and busy time above which the span is used."""


def with_block(known: Estimates, block: Block, top: int) -> Estimates:
    """Add the noise and power of an uncapped block."""
    if block.level != top or block.units < 2:
        return known
    mean = block.busy / block.work if block.work else 0.0
    per = block.squares / block.units
    # With unequal work, the mean of times per work differs from the time per work of all.
    variance = max(per / (mean * mean) - 1, 0.0)
    part = 1 / min(known.blocks + 1, 30)
    # One outlier in a block must not dominate: its variance is limited.
    if known.blocks >= 3:
        variance = min(variance, 4 * known.variance + MIN_DEVIATION**2)
    power, energies = known.power, known.energies
    if block.energy is not None:
        energies += 1
        watts = block.energy * 1e6 / (block.end - block.start)
        power += (watts - power) / min(energies, 30)
    return replace(
        known,
        power=power,
        variance=known.variance + part * (variance - known.variance),
        blocks=known.blocks + 1,
        energies=energies,
    )


def with_pair(known: Estimates, pair: Pair) -> Estimates:
    level = known.at(pair.level)
    pairs = (*level.pairs[-_MAX_PAIRS + 1 :], pair)
    expected = known.deviation(pair.weight)
    busy = [one.busy for one in pairs]
    between = evidence([one.span - one.busy for one in pairs], MIN_DEVIATION)
    misleading = (
        between.mean > 0.01 if between.n < 3 else between.likely(-3.0) > _MAX_DURATION_MISMATCH
    )
    time = evidence([one.span for one in pairs] if misleading else busy, expected)
    powers = [one.power for one in pairs if one.power is not None]
    new = LevelEstimate(pairs, time, evidence(powers, expected / 2), misleading)
    return replace(known, levels={**known.levels, pair.level: new})
