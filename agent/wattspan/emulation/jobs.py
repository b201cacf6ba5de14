"""The jobs of an emulated host: processes that are real, with work that is not.

They can be told to do something else while an agent looks on: to pause, to change their work, to
tell lies about it, to end, or to bear a neighbour on their board.
"""

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
from wattspan.emulation.workload import SpanDistortion
from wattspan.emulation.workloads import (
    GpuWork,
    RankWork,
    SteadyLoad,
    StepTiming,
    Training,
    WorkLog,
)
from wattspan.model import SECOND
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
        self._lies: dict[int, SpanDistortion] = {}
        self._neighbours = 0

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
            self._boards().attach(
                gpu, process.pid, work, memory=job.memory, until_exit=True, socket=socket
            )
        if job.work is not None:
            self._cpus.attach(process.pid, job.work, socket)
        return process.pid

    def neighbour(self, gpu: int, load: float) -> tuple[str, int]:
        """One more process on a board, that keeps ``load`` of it busy; its name and pid."""
        self._neighbours += 1
        name = f"neighbour-{self._neighbours}"
        work = SteadyLoad(load) if load else SteadyLoad(0.0)
        return name, self.start(DemoJob(name, 0.02, gpus={gpu: work}, memory=1 << 30), "")

    def steer(self, name: str, changes: Mapping[str, Any]) -> None:
        """Change a job's work from now on; LookupError or ValueError if it cannot be.

        ``paused``, ``kernel`` by name, any field of its ``Steps``, and what else its work lets
        be set; ``lie`` is what its spans say instead of the truth, as keywords of ``Lie``.
        """
        pid = self._pid(name)
        rest = dict(changes)
        if "lie" in rest:
            told = rest.pop("lie") or {}
            if "took" in told and told["took"] is not None:
                told = {**told, "took": round(told["took"] * SECOND)}
            self._lies[pid] = SpanDistortion(**told)
        if rest:
            place = self._place(name)
            change = _work_updater(rest)
            if place is None:
                self._cpus.change_work(pid, change)
            else:
                self._boards().change_work(place, pid, change)

    def end(self, name: str) -> None:
        """End a job, as a job ends that is done."""
        self._pid(name)
        process = self._processes.pop(name)
        assert process.stdin is not None  # noqa: S101 - it was asked for
        process.stdin.close()
        self._cpus.detach(process.pid)
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def lie(self, pid: int) -> SpanDistortion:
        return self._lies.get(pid, SpanDistortion())

    def deeds(self, pid: int, gpu: int | None) -> WorkLog:
        """What a process has finished, on a board or on the CPUs."""
        return self._cpus.deeds(pid) if gpu is None else self._boards().deeds(gpu, pid)

    def truth(self, name: str, since: int | None = None) -> dict[str, Any]:
        """All that is true of a job's work: its units, and what it would draw without a cap.

        The units themselves are told from number ``since`` on, if one is given.
        ``free`` is what the board draws then over a whole unit, in milliwatts: the mean of what
        it draws while the unit computes and while it does not. Where nobody can know: None.
        """
        job, pid, place = self._jobs[name], self._pid(name), self._place(name)
        facts: dict[str, Any] = {"pid": pid, "gpu": place}
        if place is not None:
            boards = self._boards()
            facts["free"] = free_power(boards.board(place), job.gpus[place])
            facts["energy"] = boards.truth(place).processes.get(pid, 0)
        return {**facts, **self.deeds(pid, place).told(since)}

    def close(self) -> None:
        """Jobs end when their input does."""
        for process in self._processes.values():
            assert process.stdin is not None  # noqa: S101 - it was asked for
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

    def _boards(self) -> EmulatedGpus:
        if self._gpus is None:
            raise ValueError("this host has no GPU")
        return self._gpus

    def _pid(self, name: str) -> int:
        if name not in self._processes:
            raise LookupError(f"there is no job {name!r}, only {', '.join(self._processes)}")
        return self._processes[name].pid

    def _place(self, name: str) -> int | None:
        return next(iter(self._jobs[name].gpus), None)


def free_power(board: EmulatedBoard, work: GpuWork) -> int | None:
    """What a board draws under its default limit over one whole step; None if not of steps."""
    if not isinstance(work, Training):
        return None
    busy = operate(board.silicon, [Demand(work.load, work.kernel)], board.limits[1]).power
    return round(work.of.host * board.silicon.idle + (1.0 - work.of.host) * busy)


def _work_updater(changes: Mapping[str, Any]) -> Callable[[GpuWork], GpuWork]:
    """What makes of one work the same with ``changes``; ValueError for what cannot be set."""

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
            own["of"] = replace(work.of, **steps)
        changed: GpuWork = replace(work, **own)  # type: ignore[type-var]
        return changed

    return change


def _kernel(name: str) -> Kernel:
    if name not in KERNELS:
        raise ValueError(f"there is no work {name!r}, only {', '.join(KERNELS)}")
    return KERNELS[name]
