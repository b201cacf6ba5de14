"""The jobs of an emulated host: real processes with emulated work, which can be changed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from wattspan.emulation.boards import Demand, EmulatedBoard, Kernel, operate
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.powercap_engine import CpuJobs
from wattspan.emulation.profiles import KERNELS, DemoJob
from wattspan.emulation.workloads import (
    GpuWork,
    RankWork,
    StepTiming,
    Training,
    WorkLog,
)
from wattspan.util.child_process import module_command

_SETTABLE = frozenset(
    ("paused", "load", "rate", "cost", "burst", "crowding", "most", "spinning", "least_load")
)
_OF_STEPS = frozenset(field.name for field in fields(StepTiming))


class JobManager:
    """Starts jobs, steers them, ends them, and knows what they have done."""

    def __init__(
        self,
        directory: Path,
        gpus: EmulatedGpus | None,
        cpus: CpuJobs,
        socket_of_cpu: Sequence[int],
    ) -> None:
        self._directory, self._gpus, self._cpus = directory, gpus, cpus
        self._socket_of_cpu = socket_of_cpu
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._jobs: dict[str, DemoJob] = {}

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    def start(self, job: DemoJob, agent: str) -> int:
        """Start a process for a job; it sends spans to ``agent``, if that is not empty."""
        place = next(iter(job.gpus), None)
        arguments = [job.name, str(job.duty), *([] if job.cpu is None else ["--cpu", str(job.cpu)])]
        if job.spans and agent:
            arguments += ["--spans", job.spans, "--host", str(self._directory), "--agent", agent]
            arguments += [] if place is None else ["--gpu", str(place)]
            arguments += ["--service", job.service] if job.service else []
            first = job.gpus.get(place) if place is not None else None
            arguments += ["--rank", str(first.rank)] if isinstance(first, RankWork) else []
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            module_command("wattspan.emulation.workload", *arguments),
            stdin=subprocess.PIPE,
            cwd="/",
        )
        self._processes[job.name], self._jobs[job.name] = process, job
        socket = self._socket(job.cpu)
        for gpu, work in job.gpus.items():
            self._require_gpus().attach(
                gpu, process.pid, work, memory=job.memory, until_exit=True, socket=socket
            )
        if job.work is not None:
            self._cpus.attach(process.pid, job.work, socket)
        return process.pid

    def steer(self, name: str, changes: Mapping[str, Any]) -> None:
        """Change a job's work from now on; LookupError or ValueError if that is impossible.

        Changes: ``paused``, ``kernel`` by name, fields of ``StepTiming`` and of its own work.
        """
        pid, index = self._pid(name), self._gpu_index(name)
        change = _work_updater(changes)
        if index is None:
            self._cpus.change_work(pid, change)
        else:
            self._require_gpus().change_work(index, pid, change)

    def work_log(self, pid: int, gpu: int | None) -> WorkLog:
        """The finished work of a process, on a board or on the CPUs."""
        return self._cpus.work_log(pid) if gpu is None else self._require_gpus().work_log(gpu, pid)

    def truth(self, name: str, since: int | None = None) -> dict[str, Any]:
        """The truth about a job's work: its units, and the power of its board without a cap.

        The finished units themselves from number ``since`` on, if one is given. ``free`` is the
        mean power of the board over a whole unit in milliwatts; None if unknown.
        """
        job, pid, place = self._jobs[name], self._pid(name), self._gpu_index(name)
        facts: dict[str, Any] = {"pid": pid, "gpu": place}
        if place is not None:
            boards = self._require_gpus()
            facts["free"] = free_power(boards.board(place), job.gpus[place])
            facts["energy"] = boards.truth(place).processes.get(pid, 0)
        return {**facts, **self.work_log(pid, place).summary(since)}

    def close(self) -> None:
        """Jobs end when their input does."""
        for process in self._processes.values():
            assert process.stdin is not None  # noqa: S101 - it is a pipe
            process.stdin.close()
        for process in self._processes.values():
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _socket(self, cpu: int | None) -> int:
        sockets = self._socket_of_cpu
        return sockets[min(cpu or 0, len(sockets) - 1)] if sockets else 0

    def _require_gpus(self) -> EmulatedGpus:
        if self._gpus is None:
            raise ValueError("this host has no GPU")
        return self._gpus

    def _pid(self, name: str) -> int:
        if name not in self._processes:
            raise LookupError(f"there is no job {name!r}, only {', '.join(self._processes)}")
        return self._processes[name].pid

    def _gpu_index(self, name: str) -> int | None:
        return next(iter(self._jobs[name].gpus), None)


def free_power(board: EmulatedBoard, work: GpuWork) -> int | None:
    """Mean power of a board under its default limit over one step; None for work without steps."""
    if not isinstance(work, Training):
        return None
    busy = operate(board.silicon, [Demand(work.load, work.kernel)], board.limits[1]).power
    return round(work.timing.host * board.silicon.idle + (1.0 - work.timing.host) * busy)


def _work_updater(changes: Mapping[str, Any]) -> Callable[[GpuWork], GpuWork]:
    """A function that applies ``changes`` to work; ValueError for an impossible change."""

    def change(work: GpuWork) -> GpuWork:
        own: dict[str, Any] = {}
        steps: dict[str, Any] = {}
        for key, value in changes.items():
            if key == "kernel":
                own[key] = _kernel(value)
            elif key in _OF_STEPS and isinstance(work, Training | RankWork):
                steps[key] = value
            elif key in _SETTABLE and hasattr(work, key):
                own[key] = value
            else:
                raise ValueError(f"{key!r} of {type(work).__name__} cannot be changed")
        if steps and isinstance(work, Training | RankWork):
            own["timing"] = replace(work.timing, **steps)
        changed: GpuWork = replace(work, **own)  # type: ignore[type-var]
        return changed

    return change


def _kernel(name: str) -> Kernel:
    if name not in KERNELS:
        raise ValueError(f"there is no work {name!r}, only {', '.join(KERNELS)}")
    return KERNELS[name]
