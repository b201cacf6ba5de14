"""The process of an emulated host: it owns the physics and the truth.

Run as ``python -m wattspan.emulation.engine PROFILE DIRECTORY [PERIOD]``, the period being that of
the CPU counters in nanoseconds. It is a separate process so that its cost is not the agent's, and
so that an agent that is killed leaves nothing behind: when its standard input ends, it ends, and
removes its directory. Requests and answers are JSON, one line each::

    {"do": "truth"}                  ->  {"zones": {...}, "gpus": [...]}
    {"do": "truth", "at": [MONO...]} ->  {"at": [{"zones": {...}, "gpus": [...]}, ...]}
    {"do": "work", "job": NAME, "since": 0}  ->  {"units": 9, "took": NS, "ideal": NS, ...}
    {"do": "steer", "job": NAME, "paused": true, ...}

Its owner uses standard input and output; clients, with fewer requests, use ``control``.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wattspan.clock import SystemClock
from wattspan.emulation.control import ControlServer
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.jobs import JobManager
from wattspan.emulation.powercap_engine import (
    CpuJobs,
    PowercapEngine,
    PowercapRunner,
    on_sockets,
    open_cpu_load,
)
from wattspan.emulation.powercap_tree import LAYOUTS, PowercapTree
from wattspan.emulation.profiles import KERNELS, HostProfile, profile_named
from wattspan.emulation.workload import set_process_name
from wattspan.emulation.workloads import SteadyLoad, StepTiming, Training
from wattspan.model import MILLISECOND
from wattspan.ports import WattspanError

GPU_STEP = 0.02  # seconds; the boards' own periods are 100 ms
PERIOD = 10 * MILLISECOND  # of the CPU counters, by default


CLIENT_QUESTIONS = frozenset({"truth", "attach", "load", "finished", "start-jobs", "work", "steer"})
"""Guests are processes of the same user. They may not break hardware, nor act for another."""


class HostEngine:
    """Physics in threads, jobs in processes, and a conversation with the owner."""

    tree_type: type[PowercapTree] = PowercapTree
    counters_type: type[PowercapEngine] = PowercapEngine

    def __init__(self, profile: HostProfile, directory: Path, period: int = PERIOD) -> None:
        self._profile = profile
        self._directory = directory
        clock = SystemClock()
        self._runner: PowercapRunner | None = None
        self._gpus: EmulatedGpus | None = None
        cpus = CpuJobs()
        sockets: Sequence[int] = ()
        hosts: Callable[[], Sequence[float]] = tuple
        if profile.powercap is not None:
            tree = self.tree_type(directory / "sys", LAYOUTS[profile.powercap])
            sockets = tree.socket_of_cpu
            load = on_sockets(open_cpu_load(), sockets)
            counters = self.counters_type(tree, profile.law, clock, load)
            self._runner = PowercapRunner(counters, clock, period=period, also=cpus.step)
            self._runner.start()
            hosts = lambda: counters.speeds  # noqa: E731
        if profile.gpus:
            self._gpus = EmulatedGpus(directory / "gpus", profile.gpus, clock, hosts)
            self._gpus.start(GPU_STEP)
        self._jobs = JobManager(directory, self._gpus, cpus, sockets)
        self._control = ControlServer(directory, self.answer_client)

    def answer(self, line: str) -> dict[str, Any]:
        """The answer to one request. No request ends the host."""
        try:
            return self._answer(json.loads(line))
        except (LookupError, TypeError, ValueError, WattspanError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def answer_client(self, pid: int, line: str) -> dict[str, Any]:
        """The answer to a guest: about jobs and the truth, and for himself a board's time."""
        try:
            question = json.loads(line)
            if question["do"] not in CLIENT_QUESTIONS:
                return {"error": f"not for guests: {question['do']}"}
            return self._answer({**question, "pid": pid})
        except (LookupError, TypeError, ValueError, WattspanError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        match question:
            case {"do": "truth", "at": list(times)}:
                return {"at": self._truth_at([int(time) for time in times])}
            case {"do": "truth"}:
                return self._truth()
            case {"do": "start-jobs"}:
                for job in self._profile.jobs:
                    self._jobs.start(job, str(question.get("agent", "")))
                return {"jobs": self._jobs.pids}
            case {
                "do": "attach",
                "gpu": int(gpu),
                "pid": int(pid),
                "load": float() | int() as load,
            }:
                kernel, steps = question.get("kernel", "train"), question.get("steps")
                return self._attach(gpu, pid, load, kernel, steps)
            case {"do": "load", "gpu": int(gpu), "pid": int(pid), "load": float() | int() as load}:
                self._require_gpus().set_load(gpu, pid, load)
                return {"done": "load"}
            case {
                "do": "finished",
                "gpu": int() | None as gpu,
                "pid": int(pid),
                "since": int(since),
            }:
                return self._jobs.work_log(pid, gpu).summary(since)
            case {"do": "work", "job": str(name)}:
                return self._jobs.truth(name, question.get("since"))
            case {"do": "steer", "job": str(name), **changes}:
                changes.pop("pid", None)  # the guest's own, which steers nothing
                self._jobs.steer(name, changes)
                return {"done": "steer"}
        return {"error": f"not understood: {question}"}

    def _attach(
        self, gpu: int, pid: int, load: float, kernel: str, steps: dict[str, Any] | None
    ) -> dict[str, Any]:
        work = SteadyLoad(load, KERNELS[kernel])
        training = None if steps is None else Training(StepTiming(**steps), load, KERNELS[kernel])
        self._require_gpus().attach(gpu, pid, training or work, until_exit=True)
        return {"done": "attach"}

    def _require_gpus(self) -> EmulatedGpus:
        if self._gpus is None:
            raise ValueError("this host has no GPU")
        return self._gpus

    def _truth_at(self, times: Sequence[int]) -> list[dict[str, Any]]:
        zones = [{} for _ in times] if self._runner is None else self._runner.spent_at(times)
        boards = (
            []
            if self._gpus is None
            else [self._gpus.spent_at(index, times) for index in range(len(self._gpus))]
        )
        return [
            {
                "zones": zones[place],
                "gpus": [
                    {"energy": board[place].energy, "processes": board[place].processes}
                    for board in boards
                ],
            }
            for place in range(len(times))
        ]

    def _truth(self) -> dict[str, Any]:
        gpus = []
        for index in range(len(self._gpus) if self._gpus is not None else 0):
            assert self._gpus is not None  # noqa: S101 - just counted
            truth = self._gpus.truth(index)
            gpus.append(
                {
                    "uuid": self._gpus.uuid(index),
                    "energy": truth.energy,
                    "idle": truth.idle,
                    "processes": dict(truth.processes),
                }
            )
        packages: dict[str, int] = {}
        if self._runner is not None:
            self._runner.between_steps(lambda engine: packages.update(engine.energies()))
        return {"zones": packages, "gpus": gpus}

    def close(self) -> None:
        """Close the control socket, end the jobs, then stop the physics."""
        self._control.close()
        self._jobs.close()
        if self._gpus is not None:
            self._gpus.close()
        if self._runner is not None:
            self._runner.stop()


def main(arguments: list[str], engine_type: type[HostEngine] = HostEngine) -> None:
    """Live until standard input ends."""
    set_process_name("emulated-host")
    # A service manager asks all processes of a service to end; this one's owner needs it until
    # its own end. (A handler, not SIG_IGN, which the jobs would inherit.)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    profile, directory = profile_named(arguments[0]), Path(arguments[1])
    period = int(arguments[2]) if len(arguments) > 2 else PERIOD
    try:
        engine = engine_type(profile, directory, period)
        try:
            _write_line({"ready": True})
            for line in sys.stdin:
                _write_line(engine.answer(line))
        finally:
            engine.close()
    except BrokenPipeError:
        pass  # the owner died with a question on its lips
    except OSError as error:
        sys.exit(f"wattspan: Cannot emulate a host in {directory}: {error.strerror or error}.")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _write_line(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
