"""Pipelines whose stages have measured or random times and energies."""

from __future__ import annotations

import gzip
import random
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from wattspan.tuning.pipeline.costs import ClockPoint, PipelineProfile
from wattspan.tuning.pipeline.dag import CostKey, InstructionKind, PipelineSchedule, scheduled
from wattspan.tuning.pipeline.files import read_profile
from wattspan.tuning.pipeline.frontier import PipelineModel
from wattspan.tuning.pipeline.plan import (
    RankClocks,
)

PROFILE = Path(__file__).resolve().parents[1] / "tests/fixtures/pipeline_profile.csv.gz"
BLOCKING_WATTS = 70.0  # of an A40, by Kareus's artifact
STAGES, MICROBATCHES = 8, 32
PLANNED = {0.01: (2.9, 7.9, 13.7), 0.05: (10.4, 13.3, 21.3), 0.2: (21.6, 21.9, 22.1)}
"""By slowdown: the savings in per cent that were computed before, for the same pipeline."""

SIZES = ((8, 32), (8, 128))
TIMES = 8  # iteration times of a frontier that are compared with the linear program


def measured_profile() -> PipelineProfile:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.csv"
        path.write_bytes(gzip.decompress(PROFILE.read_bytes()))
        return read_profile([path])[0]


def model_of(profile: PipelineProfile, microbatches: int) -> PipelineModel:
    dag = scheduled(PipelineSchedule.ONE_F_ONE_B, profile.stage_count, microbatches)
    return PipelineModel(dag, profile, BLOCKING_WATTS)


def small_case(number: int) -> list[float]:
    """The parts of the best saving that the search finds, for one simulated pipeline."""
    model = small_model(number)
    parts = []
    for slowdown, straggler in product((0.01, 0.05, 0.2), (False, True)):
        limit = RankClocks(model).fastest.seconds * (1 + slowdown)
        search = RankClocks(model, limit if straggler else 0.0)
        every = product(model.clocks, repeat=model.dag.rank_count)
        within = (one for one in map(search.evaluated, every) if one.seconds <= limit)
        best = search.fastest.joules - min(one.joules for one in within)
        found = search.fastest.joules - search.best(limit).joules
        parts.append(found / best if best > 1e-9 else 1.0)
    return parts


def small_model(number: int) -> PipelineModel:
    """A pipeline of unequal stages with simulated curves and 1 % noise."""
    chance = random.Random(number)
    stages = chance.choice((2, 3, 4))
    clocks = range(800, 1701, 180 if stages == 4 else 100)
    points = {}
    for stage in range(stages):
        base = chance.uniform(0.07, 0.13)
        for kind, passes in ((InstructionKind.FORWARD, 1), (InstructionKind.BACKWARD, 2)):
            bound = chance.uniform(0.5, 1.0)  # the part that scales with the clock
            points[CostKey(stage, kind)] = [
                _simulated_point(mhz, passes * base, bound, chance) for mhz in clocks
            ]
    schedule = chance.choice((PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B))
    dag = scheduled(schedule, stages, chance.choice((3, 5, 8)))
    return PipelineModel(dag, PipelineProfile(points), BLOCKING_WATTS)


def _simulated_point(mhz: int, base: float, bound: float, chance: random.Random) -> ClockPoint:
    seconds = base * (bound * 1700 / mhz + 1 - bound) * chance.uniform(0.99, 1.01)
    watts = (70 + 200 * (mhz / 1700) ** 2.5) * chance.uniform(0.99, 1.01)
    return ClockPoint(mhz, seconds, seconds * watts)
