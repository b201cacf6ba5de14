"""The real ``GlobalPowerLimitOptimizer`` of Zeus on simulated boards, for ``declared_training``.

A process of its own, in the environment of the example applications, because Zeus's optimizer needs
PyTorch; Zeus itself is that of the third-party clients. Reads one line of JSON from standard input:
the ``factor`` of the slowdown, the ``seconds`` of a run and its ``runs``, each with ``seed``,
``noise``, ``slope`` and ``step``. Prints a line of JSON for each run. Zeus's calls of its monitor
and of the driver reach the simulated board; nothing else of it is replaced.
"""

from __future__ import annotations

import json
import math
import random
import sys
from types import SimpleNamespace
from typing import Any

from support.requirements import CLIENTS
from support.tuned_host import DEFAULT, MINIMUM, Gpu


class SimulatedBoard:
    """A board, as Zeus's monitor and as its list of GPUs. Seconds and joules."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.gpu_indices = [0]
        self.time = self.energy = 0.0
        self._windows: dict[str, tuple[float, float]] = {}

    def work(self, seconds: float) -> None:
        """Work that takes so many seconds without a cap."""
        took = seconds * self.gpu.slowdown
        self.time += took
        self.energy += took * self.gpu.power / 1000

    def get_power_management_limit_constraints(self, _: int) -> tuple[int, int]:
        return MINIMUM, DEFAULT

    def set_persistence_mode(self, _: int, **__: bool) -> None: ...

    def set_power_management_limit(self, _: int, milliwatts: int) -> None:
        self.gpu.cap = milliwatts

    def begin_window(self, key: str) -> None:
        self._windows[key] = self.time, self.energy

    def end_window(self, key: str, **_: bool) -> SimpleNamespace:
        time, energy = self._windows.pop(key)
        return SimpleNamespace(time=self.time - time, gpu_energy={0: self.energy - energy})


def run(factor: float, seconds: float, job: dict[str, Any]) -> dict[str, Any]:
    """The truth of one run, the search included; ratios. At its end the job is killed."""
    import zeus.device.gpu
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer, MaxSlowdownConstraint

    gpu = Gpu("zeus", slope=job["slope"])
    board: Any = SimulatedBoard(gpu)
    zeus.device.gpu._gpus = board  # noqa: SLF001 - get_gpus() returns it
    optimizer = GlobalPowerLimitOptimizer(board, MaxSlowdownConstraint(factor=factor))
    chance, done = random.Random(job["seed"]), 0.0
    while board.time < seconds:
        optimizer.on_step_begin()
        ideal = job["step"] * math.exp(chance.gauss(0.0, job["noise"]))
        board.work(ideal)
        done += ideal
        optimizer.on_step_end()
    return {
        "seed": job["seed"],
        "slowdown": board.time / done - 1,
        "saving": 1 - board.energy / (gpu.draw / 1000 * done),
        # A kill runs no exit handler, in which alone Zeus resets the limit.
        "restored": gpu.cap == DEFAULT,
    }


def main() -> None:
    sys.path.extend(map(str, CLIENTS.parents[1].glob("lib/python3*/site-packages")))
    plan = json.loads(sys.stdin.readline())
    for job in plan["runs"]:
        print(json.dumps(run(plan["factor"], plan["seconds"], job)), flush=True)


if __name__ == "__main__":
    main()
