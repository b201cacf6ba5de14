"""The real ``GlobalPowerLimitOptimizer`` of Zeus on simulated boards.

A process of its own, in the environment of the example applications, because Zeus's optimizer needs
PyTorch; Zeus itself is that of the third-party clients. Zeus's calls of its monitor and of the
driver reach the simulated board; nothing else of it is replaced. The process reads one line of JSON
from standard input, with the runs of a declared training (:func:`on_boards`) or the names of plants
and the number of seeds (:func:`on_plants`), and prints a line of JSON for each run.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from testbed.apps import app_environment
from testbed.requirements import APPS, CLIENTS, ROOT
from testbed.tuned_host import DEFAULT, MINIMUM, Gpu
from testbed.tuner.cells import cells
from testbed.tuner.job import Job
from testbed.tuner.plants import Plant
from testbed.tuner.runner import Bench, Score, Terms, Watch

ZEUS = "Zeus 0.16"
_MILLI = 1000


# ------------------------------------------------------------------------------ in this process


def on_boards(
    factor: float, seconds: float, jobs: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Runs of ``seconds``, each with ``seed``, ``noise``, ``slope`` and ``step``; ratios."""
    return _runs({"factor": factor, "seconds": seconds, "runs": jobs})


def on_plants(names: Sequence[str], seeds: int, budget: float) -> dict[str, list[Score]]:
    """The scores of whole runs, by the names of the plants and by seed."""
    scores: dict[str, list[Score]] = {name: [] for name in names}
    for facts in _runs({"plants": list(names), "seeds": seeds, "budget": budget}):
        scores[facts["plant"]].append(Score(**facts))
    return scores


def _runs(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with subprocess.Popen(
        [str(APPS), "-m", "testbed.tuner.zeus_optimizer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=app_environment(PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore"),
    ) as process:
        assert process.stdout is not None
        process.stdin.write(json.dumps(plan) + "\n")
        process.stdin.close()
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)


# --------------------------------------------------------------------------- in the environment


class Board:
    """A board, as Zeus's monitor and as its list of GPUs.

    ``read`` returns seconds and joules so far, ``cap`` sets a limit; limits are in milliwatts.
    """

    def __init__(
        self,
        limits: tuple[int, int],
        read: Callable[[], tuple[float, float]],
        cap: Callable[[int], None],
    ) -> None:
        self.gpu_indices = [0]
        self._limits, self._read, self._cap = limits, read, cap
        self._windows: dict[str, tuple[float, float]] = {}

    def get_power_management_limit_constraints(self, _: int) -> tuple[int, int]:
        return self._limits

    def set_persistence_mode(self, _: int, **__: bool) -> None: ...

    def set_power_management_limit(self, _: int, milliwatts: int) -> None:
        self._cap(milliwatts)

    def begin_window(self, key: str) -> None:
        self._windows[key] = self._read()

    def end_window(self, key: str, **_: bool) -> SimpleNamespace:
        time, energy = self._windows.pop(key)
        now, spent = self._read()
        return SimpleNamespace(time=now - time, gpu_energy={0: spent - energy})


def _optimizer(board: Any, factor: float) -> Any:
    import zeus.device.gpu
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer, MaxSlowdownConstraint

    zeus.device.gpu._gpus = board
    return GlobalPowerLimitOptimizer(board, MaxSlowdownConstraint(factor=factor))


def _is_done(optimizer: Any) -> bool:
    from zeus.optimizer.power_limit import Done

    return isinstance(optimizer.state, Done)


def run_board(factor: float, seconds: float, job: dict[str, Any]) -> dict[str, Any]:
    """The truth of one run, the search included; ratios. At its end the job is killed."""
    gpu = Gpu("zeus", slope=job["slope"])
    time = energy = 0.0

    def cap(milliwatts: int) -> None:
        gpu.cap = milliwatts

    optimizer = _optimizer(Board((MINIMUM, DEFAULT), lambda: (time, energy), cap), factor)
    chance, done = random.Random(job["seed"]), 0.0
    while time < seconds:
        optimizer.on_step_begin()
        ideal = job["step"] * math.exp(chance.gauss(0.0, job["noise"]))
        took = ideal * gpu.slowdown
        time += took
        energy += took * gpu.power / _MILLI
        done += ideal
        optimizer.on_step_end()
    return {
        "seed": job["seed"],
        "slowdown": time / done - 1,
        "saving": 1 - energy / (gpu.draw / _MILLI * done),
        # A kill runs no exit handler, in which alone Zeus resets the limit.
        "restored": gpu.cap == DEFAULT,
    }


def run_plant(plant: Plant, seed: int, budget: float) -> Score:
    """A whole run, with the search at its beginning. Zeus knows of no floor but the hardware's."""
    bench = Bench(plant, seed, Terms(budget=budget))
    job, watch = Job(plant, bench.luck, seed), Watch()
    limits = round(plant.curve.least * _MILLI), round(plant.curve.original * _MILLI)
    board = Board(limits, lambda: (job.time, job.spent), lambda limit: job.set_cap(limit / _MILLI))
    optimizer = _optimizer(board, 1 + budget)
    while not job.done:
        optimizer.on_step_begin()
        if _is_done(optimizer):
            watch.commit = len(job.ends), job.time
            job.finish()
        else:
            job.run_units(1)
    return bench.score(ZEUS, job, watch)


def main() -> None:
    sys.path.extend(map(str, CLIENTS.parents[1].glob("lib/python3*/site-packages")))
    plan = json.loads(sys.stdin.readline())
    for job in plan.get("runs", ()):
        print(json.dumps(run_board(plan["factor"], plan["seconds"], job)), flush=True)
    plants = [cell.plant for cell in cells() if cell.plant.name in plan.get("plants", ())]
    for plant in plants:
        for seed in range(plan["seeds"]):
            print(json.dumps(run_plant(plant, seed, plan["budget"]).facts()), flush=True)
            # Each optimizer registers an exit handler, which keeps its board and job in memory.
            atexit._clear()
    os._exit(0)  # PyTorch expects its own handlers at the exit


if __name__ == "__main__":
    main()
