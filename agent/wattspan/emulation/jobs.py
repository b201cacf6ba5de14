"""The jobs of an emulated host: real processes with emulated work.

Run as ``python -m wattspan.emulation.jobs SETTINGS``, where SETTINGS is a :class:`JobSettings` in
JSON, a job keeps one CPU busy to a given degree until its standard input ends. Its CPU time is
real, and so, by the emulated law, its energy is known.

Its emulated work is inside the emulated host. The process asks for its finished units and sends
each training step and each request as a span, in OTLP/JSON over the agent's Unix socket, as any
program in any language could.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from wattspan.clock import SystemClock
from wattspan.emulation.control import ControlClient
from wattspan.emulation.workloads import CompletedUnit, GpuWork, WorkLog
from wattspan.model import MILLISECOND, Instant
from wattspan.ports import WattspanError
from wattspan.sdk.jobs import JobDeclaration, declare
from wattspan.util.process import module_command
from wattspan.util.unix_sockets import unix_request

if TYPE_CHECKING:
    from wattspan.emulation.gpus import HostGpus
    from wattspan.emulation.host import DemoJob
    from wattspan.emulation.powercap_engine import CpuJobs

MODEL = "emulated-70b"
STEP, WORK = "train_step", "samples"  # span of a training step, and the attribute with its work
PERIOD = 40 * MILLISECOND
_MAX_QUEUED = 1000  # spans that wait for an agent
_SEND_INTERVAL = 0.5  # seconds
_SEND_TIMEOUT = 10.0  # seconds, as that of OTLP's exporters
_DRIFT = MILLISECOND  # between the two clocks, before the one is set by the other again


class JobSettings(msgspec.Struct, frozen=True):
    """The arguments of a job's process."""

    name: str
    duty: float  # of one CPU, 0 to 1
    cpu: int | None = None  # the one to run on
    spans: str = ""  # "steps", "requests" or none
    gpu: int | None = None  # None: its work is on the CPU
    host: str = ""  # the directory of the emulated host
    agent: str = ""  # the agent's socket for spans
    max_slowdown: float | None = (
        None  # the budget that a job of steps declares; None: no declaration
    )


class JobManager:
    """Starts, changes and ends jobs, and reports their finished work."""

    def __init__(
        self,
        directory: Path,
        gpus: HostGpus,
        cpus: CpuJobs,
        socket_of_cpu: Sequence[int],
    ) -> None:
        self._directory, self._gpus, self._cpus = directory, gpus, cpus
        self._socket_of_cpu = socket_of_cpu
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._jobs: dict[str, DemoJob] = {}
        self.sockets: dict[int, int] = {}
        """The socket whose CPUs each job uses, by its pid."""

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    def start(self, job: DemoJob, agent: str, max_slowdown: float | None = None) -> None:
        """Start a process for a job; it sends spans to ``agent``, if that is not empty.

        A job of steps declares itself with the budget ``max_slowdown``, if that is not None.
        """
        settings = JobSettings(
            job.name,
            job.duty,
            job.cpu,
            job.spans if agent else "",
            next(iter(job.gpus), None),
            str(self._directory),
            agent,
            max_slowdown,
        )
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            module_command("wattspan.emulation.jobs", msgspec.json.encode(settings).decode()),
            stdin=subprocess.PIPE,
            cwd="/",
        )
        self._processes[job.name], self._jobs[job.name] = process, job
        socket = self._socket_of_cpu[min(job.cpu or 0, len(self._socket_of_cpu) - 1)]
        self.sockets = {**self.sockets, process.pid: socket}
        for gpu, work in job.gpus.items():
            boards, index = self._gpus.of(gpu)
            boards.attach(
                index,
                process.pid,
                work,
                memory=job.memory,
                until_exit=True,
                socket=socket,
                instance=job.instance,
            )
        if job.work is not None:
            self._cpus.attach(process.pid, job.work, socket)

    def change(self, name: str, changes: Mapping[str, Any]) -> None:
        """Change fields of a job's work; LookupError or TypeError if that is impossible."""
        pid, gpu = self._place(name)

        def change(work: GpuWork) -> GpuWork:
            changed: GpuWork = replace(work, **changes)  # type: ignore[type-var]
            return changed

        if gpu is None:
            self._cpus.change_work(pid, change)
        else:
            boards, index = self._gpus.of(gpu)
            boards.change_work(index, pid, change)

    def work_log(self, pid: int, gpu: int | None) -> WorkLog:
        """The finished work of a process, on a board or on the CPUs."""
        if gpu is None:
            return self._cpus.work_log(pid)
        boards, index = self._gpus.of(gpu)
        return boards.work_log(index, pid)

    def finished(self, name: str, since: int | None = None) -> dict[str, Any]:
        """The totals of a job's finished units, and the units from number ``since`` on."""
        pid, gpu = self._place(name)
        return {"pid": pid, "gpu": gpu, **self.work_log(pid, gpu).summary(since)}

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

    def _place(self, name: str) -> tuple[int, int | None]:
        """The pid of a job and the GPU of its work, None for the CPU."""
        if name not in self._processes:
            raise LookupError(f"there is no job {name!r}, only {', '.join(self._processes)}")
        return self._processes[name].pid, next(iter(self._jobs[name].gpus), None)


# ------------------------------------------------------------------------- the process of a job


class SpanSender:
    """Sends finished units of work as spans to the agent at a Unix socket.

    Spans wait while the agent is not reachable, up to a limit.
    """

    def __init__(self, path: str, service: str, kind: str) -> None:
        self._path, self._service, self._kind = path, service, kind
        self._draw = random.Random(5)  # noqa: S311
        self._offset: int | None = None
        self.waiting: deque[dict[str, object]] = deque(maxlen=_MAX_QUEUED)

    def add(self, units: Sequence[CompletedUnit], now: Instant) -> None:
        """Queue a span for each unit.

        Their Unix times follow a step of the clock; a drift of less than a millisecond is ignored,
        so that adjacent spans stay adjacent.
        """
        offset = now.wall - now.mono
        if self._offset is None or abs(offset - self._offset) > _DRIFT:
            self._offset = offset
        for unit in units:
            name, attributes = self._described(unit)
            self.waiting.append(
                {
                    "traceId": os.urandom(16).hex(),
                    "spanId": os.urandom(8).hex(),
                    "name": name,
                    "kind": 1,
                    "startTimeUnixNano": str(unit.began + self._offset),
                    "endTimeUnixNano": str(unit.ended + self._offset),
                    "attributes": [otlp_attribute(key, value) for key, value in attributes.items()],
                }
            )

    def send(self) -> None:
        """Send the waiting spans; they wait on if the agent does not accept them."""
        if not self.waiting:
            return
        resource = {"attributes": [otlp_attribute("service.name", self._service)]}
        scopes = [{"scope": {"name": "wattspan.demo"}, "spans": list(self.waiting)}]
        body = json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]})
        headers = {"Content-Type": "application/json"}
        with contextlib.suppress(OSError):
            status, _ = unix_request(
                self._path, "POST", "/v1/traces", body, headers, patience=_SEND_TIMEOUT
            )
            if status == HTTPStatus.OK:
                self.waiting.clear()

    def _described(self, unit: CompletedUnit) -> tuple[str, dict[str, int | str]]:
        if self._kind == "steps":
            return STEP, {WORK: unit.work}
        return "chat", {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": MODEL,
            "gen_ai.usage.input_tokens": self._draw.randint(200, 1800),
            "gen_ai.usage.output_tokens": self._draw.randint(120, 280),
        }


def otlp_attribute(key: str, value: int | float | str) -> dict[str, object]:
    """An attribute of a span or a resource in OTLP/JSON."""
    if isinstance(value, float):
        return {"key": key, "value": {"doubleValue": value}}
    kind = "intValue" if isinstance(value, int) else "stringValue"
    return {"key": key, "value": {kind: str(value)}}


def set_process_name(name: str) -> None:
    """Set the process's name in the kernel, up to 15 bytes."""
    Path("/proc/self/comm").write_text(name[:15])


def _report(settings: JobSettings, clock: SystemClock) -> None:
    """Send this process's newly finished units to the agent, for as long as the host runs."""
    sender = SpanSender(settings.agent, settings.name, settings.spans)
    declaration = _declaration(settings)
    pause = threading.Event()
    # An error shows that the host ends, and this process with it.
    with contextlib.suppress(WattspanError), ControlClient(Path(settings.host)) as host:
        seen = 0
        while not pause.wait(_SEND_INTERVAL):
            answer = host.ask(do="finished", gpu=settings.gpu, since=seen)
            seen = answer["units"]
            sender.add([CompletedUnit(*unit) for unit in answer["finished"]], clock.now())
            sender.send()
            if declaration is not None:
                declaration.renew()


def _declaration(settings: JobSettings) -> JobDeclaration | None:
    """The declaration of a job of steps, if it is to make one."""
    if settings.max_slowdown is None or settings.spans != "steps":
        return None
    return declare(
        name=settings.name,
        service=settings.name,
        span=STEP,
        work=WORK,
        max_slowdown=settings.max_slowdown,
        directories=(str(Path(settings.agent).parent),),
    )


def _work(duty: float, clock: SystemClock) -> None:
    """Keep the CPU busy for ``duty`` of every period until standard input ends."""
    start = clock.monotonic()
    while True:
        work_until = start + round(duty * PERIOD)
        total = 0
        while clock.monotonic() < work_until:
            for i in range(500):
                total += i * i
        start += PERIOD
        rest = max(0, start - clock.monotonic()) / 1e9
        if select.select([0], [], [], rest)[0] and not os.read(0, 4096):
            return


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=JobSettings)
    set_process_name(settings.name)
    if settings.cpu is not None and settings.cpu in os.sched_getaffinity(0):
        os.sched_setaffinity(0, {settings.cpu})
    clock = SystemClock()
    if settings.spans:
        threading.Thread(target=_report, args=(settings, clock), daemon=True).start()
    _work(settings.duty, clock)


if __name__ == "__main__":
    main()
