"""The process of an emulated host: it owns the physics and the truth.

Run as ``python -m wattspan.emulation.engine PROFILE DIRECTORY [PERIOD]``, the period being that of
the CPU counters in nanoseconds. It is a separate process so that its cost is not the agent's, and
so that an agent that is killed leaves nothing behind: when its standard input ends, it ends, and
removes its directory. The agent's capper keeps that input open, because it restores the limits of
the boards after a kill of the agent. Clients ask at a Unix socket in that directory, in JSON, one
line for each request and answer::

    {"do": "truth"}                  ->  {"zones": {...}, "gpus": [...]}
    {"do": "truth", "at": [MONO...]} ->  {"at": [{"zones": {...}, "gpus": [...]}, ...]}
    {"do": "work", "job": NAME, "since": 0}  ->  {"units": 9, "took": NS, "ideal": NS, ...}
    {"do": "steer", "job": NAME, "paused": true, ...}
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wattspan.clock import SystemClock
from wattspan.emulation.control import COUNTERS_SOCKET, SOCKET_NAME
from wattspan.emulation.gpus import HostGpus
from wattspan.emulation.host import KERNELS, HostProfile, profile_named
from wattspan.emulation.jobs import JobManager, set_process_name
from wattspan.emulation.powercap_engine import (
    CounterLaw,
    CpuJobs,
    JobCounters,
    PowercapEngine,
    PowercapRunner,
    on_sockets,
    open_cpu_load,
)
from wattspan.emulation.powercap_tree import PowercapTree, PowerMeters
from wattspan.emulation.workloads import GpuWork, SteadyLoad, Training
from wattspan.model import MILLISECOND
from wattspan.ports import WattspanError
from wattspan.processes.counters_server import CountersServer
from wattspan.util.unix_sockets import peer_credentials

GPU_STEP = 0.02  # seconds; the boards' own periods are 100 ms
PERIOD = 10 * MILLISECOND  # of the CPU counters, by default
_OF_CLIENT = {"attach", "load", "finished"}  # questions about a process, the client's by default


class HostEngine(socketserver.ThreadingUnixStreamServer):
    """Physics in threads, jobs in processes, and a thread for each client."""

    tree_type: type[PowercapTree] = PowercapTree
    counters_type: type[PowercapEngine] = PowercapEngine
    daemon_threads = True
    block_on_close = False

    def __init__(self, profile: HostProfile, directory: Path, period: int = PERIOD) -> None:
        self._profile, self._directory = profile, directory
        self._clock = SystemClock()
        cpus = CpuJobs()
        tree = self.tree_type(directory / "sys", profile.powercap)
        load = on_sockets(open_cpu_load(), tree.socket_of_cpu)
        counters = self.counters_type(tree, profile.law, self._clock, load)
        self._meters = PowerMeters(directory / "sys", profile.meters)

        def step(at: int, speeds: Sequence[float]) -> None:
            cpus.step(at, speeds)
            self._meters.step(at, counters.picojoules)

        self._runner = PowercapRunner(counters, self._clock, period=period, also=step)
        self._runner.start()
        self._speeds = lambda: counters.speeds
        self._gpus = HostGpus(directory, profile.gpus, self._clock, self._speeds)
        for index, slices in profile.instances.items():
            boards, place = self._gpus.of(index)
            boards.divide(place, slices)
        self._gpus.start(GPU_STEP)
        self._jobs = JobManager(directory, self._gpus, cpus, tree.socket_of_cpu)
        self._counters: CountersServer | None = None  # once there are jobs
        self._answers: Mapping[str, Callable[..., dict[str, Any]]] = {
            "truth": self._truth,
            "start-jobs": self._start_jobs,
            "attach": self._attach,
            "load": self._load,
            "finished": self._finished,
            "work": lambda job, since=None: self._jobs.finished(job, since),
            "steer": self._steer,
        }
        super().__init__(str(directory / SOCKET_NAME), _ClientHandler)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.1,), name="emulated-control", daemon=True
        )
        self._thread.start()

    def answer(self, pid: int, line: str) -> dict[str, Any]:
        """The answer to one request of the process ``pid``. No request ends the host."""
        try:
            question = {**json.loads(line)}
            do = question.pop("do")
            if do in _OF_CLIENT:
                question.setdefault("pid", pid)
            return self._answers[do](**question)
        except (LookupError, TypeError, ValueError, WattspanError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _start_jobs(self, agent: str = "", max_slowdown: float | None = None) -> dict[str, Any]:
        for job in self._profile.jobs:
            self._jobs.start(job, agent, max_slowdown)
        if self._profile.counters is not None and self._counters is None:
            self._counters = self._counting(self._profile.counters)
        return {"jobs": self._jobs.pids}

    def _counting(self, law: CounterLaw) -> CountersServer:
        """The jobs' performance counters, read by the protocol of the helper for real ones."""

        def opened() -> JobCounters:
            return JobCounters(law, lambda: self._jobs.sockets, self._speeds)

        server = CountersServer(self._directory / COUNTERS_SOCKET, {0, os.geteuid()}, opened)
        threading.Thread(
            target=server.serve_forever, args=(0.1,), name="emulated-counters", daemon=True
        ).start()
        return server

    def _attach(
        self,
        pid: int,
        gpu: int,
        load: float,
        kernel: str = "train",
        steps: dict[str, Any] | None = None,
        instance: int | None = None,
    ) -> dict[str, Any]:
        work: GpuWork = SteadyLoad(load, KERNELS[kernel])
        if steps is not None:
            work = Training(**steps, load=load, kernel=KERNELS[kernel])
        boards, index = self._gpus.of(gpu)
        boards.attach(index, pid, work, until_exit=True, instance=instance)
        return {"done": "attach"}

    def _load(self, pid: int, gpu: int, load: float) -> dict[str, Any]:
        boards, index = self._gpus.of(gpu)
        boards.set_load(index, pid, load)
        return {"done": "load"}

    def _finished(self, pid: int, gpu: int | None, since: int) -> dict[str, Any]:
        return self._jobs.work_log(pid, gpu).summary(since)

    def _steer(self, job: str, **changes: Any) -> dict[str, Any]:
        if "kernel" in changes:
            changes["kernel"] = KERNELS[changes["kernel"]]
        self._jobs.change(job, changes)
        return {"done": "steer"}

    def _truth(self, at: Sequence[int] | None = None) -> dict[str, Any]:
        """The energy at each time in ``at``, or now, in microjoules: of zones, GPUs, processes."""
        times = [self._clock.monotonic()] if at is None else at
        zones = self._runner.spent_at(times)
        places = sorted(self._gpus.places.items())
        spent = [boards.spent_at(index, times) for _, (boards, index) in places]
        moments = [
            {"zones": zones[place], "gpus": [asdict(board[place]) for board in spent]}
            for place in range(len(times))
        ]
        return moments[0] if at is None else {"at": moments}

    def close(self) -> None:
        """Close the socket, end the jobs, then stop the physics."""
        self.shutdown()
        self._thread.join()
        self.server_close()
        if self._counters is not None:
            self._counters.shutdown()
            self._counters.server_close()
        self._jobs.close()
        self._gpus.close()
        self._runner.stop()
        self._meters.close()


class _ClientHandler(socketserver.StreamRequestHandler):
    server: HostEngine

    def handle(self) -> None:
        pid = peer_credentials(self.request).pid or 0
        for line in self.rfile:
            answer = self.server.answer(pid, line.decode(errors="replace"))
            try:
                self.wfile.write(json.dumps(answer).encode() + b"\n")
            except OSError:
                return  # the client left without waiting for the answer


def main(arguments: list[str], engine_type: type[HostEngine] = HostEngine) -> None:
    """Run until standard input ends."""
    set_process_name("emulated-host")
    # A service manager asks all processes of a service to end; this one's owner needs it until
    # its own end. (A handler, not SIG_IGN, which the jobs would inherit.)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    profile, directory = profile_named(arguments[0]), Path(arguments[1])
    period = int(arguments[2]) if len(arguments) > 2 else PERIOD
    try:
        with closing(engine_type(profile, directory, period)):
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            sys.stdin.read()
    except BrokenPipeError:
        pass  # the owner died during the start
    except OSError as error:
        sys.exit(f"wattspan: Cannot emulate a host in {directory}: {error.strerror or error}.")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
