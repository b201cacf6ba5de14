"""Emulated hosts: their profiles by name, and a running one with its sysfs root and NVML."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from wattspan.clock import SystemClock
from wattspan.emulation.boards import H100, MI300X, EmulatedBoard, Kernel
from wattspan.emulation.control import COUNTERS_SOCKET, Closeable, ControlClient
from wattspan.emulation.gpu_file import AMD_GPUS, NVIDIA_GPUS
from wattspan.emulation.powercap_engine import CounterLaw, CpuLaw
from wattspan.emulation.powercap_tree import (
    LAYOUTS,
    NO_COUNTERS,
    CounterScope,
    EmulatedMeter,
    PowercapLayout,
)
from wattspan.emulation.workloads import (
    DECODE,
    LARGE_MODEL,
    PREFILL,
    TRAIN,
    GpuWork,
    RequestServing,
    SteadyLoad,
    Training,
)
from wattspan.model import MILLISECOND
from wattspan.ports import ConfigError, WattspanError
from wattspan.util.process import module_command

KERNELS: Mapping[str, Kernel] = {
    "train": TRAIN,
    "decode": DECODE,
    "prefill": PREFILL,
    "large-model": LARGE_MODEL,
}


@dataclass(frozen=True, slots=True)
class DemoJob:
    """A real process of the demo: its load of one CPU and its work on each GPU.

    Its CPU time is real; its GPU time exists on the emulated boards only. ``work`` is that of a
    job without a GPU, as fast as the CPUs of its socket.
    """

    name: str
    duty: float  # of one CPU, 0..1
    cpu: int | None = None  # pinned there, as training jobs are
    gpus: Mapping[int, GpuWork] = field(default_factory=dict)
    memory: int = 4 << 30  # bytes on each of its GPUs
    spans: Literal["", "steps", "requests"] = ""  # of the work on its first GPU
    work: GpuWork | None = None
    instance: int | None = None  # the number of its MIG instance, from 1


@dataclass(frozen=True, slots=True)
class HostProfile:
    """An emulated host: CPU counters or power meters with their law, boards, and a demo's jobs."""

    name: str
    about: str
    powercap: PowercapLayout
    law: CpuLaw = field(default_factory=CpuLaw)
    gpus: tuple[EmulatedBoard, ...] = ()
    jobs: tuple[DemoJob, ...] = ()
    meters: tuple[EmulatedMeter, ...] = ()
    instances: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Compute slices of the MIG instances, by the index of the GPU."""
    counters: CounterLaw | None = None  # performance counters of the jobs


_SERVER = CpuLaw(package_idle=62_000, package_active=11_000, dram_idle=7_000, dram_active=1_800)
_LAPTOP = CpuLaw(package_idle=3_000, package_active=6_000, dram_idle=800, dram_active=500)

_BATCH = CpuLaw(package_idle=55_000, package_active=150_000, dram_idle=7_000, dram_active=1_800)
"""Each of this machine's CPUs represents many of the emulated package's."""

_GRACE = CpuLaw(package_idle=65_000, package_active=60_000)
_GRACE_METERS = (
    EmulatedMeter("Grace Power Socket 0", CounterScope("package")),
    EmulatedMeter("CPU Power Socket 0", CounterScope("core")),
    EmulatedMeter("SysIO Power Socket 0", CounterScope("uncore")),
)

_TRAINER = DemoJob(
    "trainer",
    duty=0.25,
    cpu=0,
    gpus={0: Training(step=0.12, host=0.03, noise=0.03, seed=1, kernel=LARGE_MODEL)},
    memory=61 << 30,
    spans="steps",
)
_SERVER_JOB = DemoJob(
    "server",
    duty=0.12,
    cpu=1,
    gpus={1: RequestServing(rate=6.0, cost=0.06, burst=3.0, seed=2), 0: SteadyLoad(0.0)},
    memory=9 << 30,
    spans="requests",
)


def _mig_job(name: str, load: float, instance: int) -> DemoJob:
    """A job with a steady load of its MIG instance."""
    return DemoJob(name, duty=0.05, gpus={0: SteadyLoad(load)}, memory=6 << 30, instance=instance)


PROFILES: Mapping[str, HostProfile] = {
    profile.name: profile
    for profile in (
        HostProfile(
            "two-socket-h100",
            "two-socket server, memory counters, two H100-class GPUs",
            LAYOUTS["xeon-2s"],
            _SERVER,
            (H100, H100),
            (_TRAINER, _SERVER_JOB),
        ),
        HostProfile(
            "two-socket",
            "two-socket server, memory counters, performance counters, no GPU",
            LAYOUTS["xeon-2s"],
            _SERVER,
            jobs=(DemoJob("batch", 0.4, 0), DemoJob("web", 0.1, 1)),
            counters=CounterLaw(),
        ),
        HostProfile(
            "one-socket-h100",
            "one-socket server, memory counter, one H100-class GPU",
            LAYOUTS["xeon-1s"],
            _SERVER,
            (H100,),
            (_TRAINER,),
        ),
        HostProfile(
            "grace-hopper",
            "ARM superchip: power meters instead of CPU counters, one H100-class GPU",
            NO_COUNTERS,
            _GRACE,
            (H100,),
            (_TRAINER,),
            _GRACE_METERS,
        ),
        HostProfile(
            "four-h100",
            "two-socket server, memory counters, four H100-class GPUs, no jobs",
            LAYOUTS["xeon-2s"],
            _SERVER,
            (H100, H100, H100, H100),
        ),
        HostProfile(
            "eight-h100",
            "two-socket server, memory counters, eight H100-class GPUs of spread phases, no jobs",
            LAYOUTS["xeon-2s"],
            _SERVER,
            tuple(replace(H100, phase=n * 12_500_000) for n in range(8)),
        ),
        HostProfile(
            "mi300x-8",
            "two-socket server, memory counters, eight MI300X-class GPUs",
            LAYOUTS["xeon-2s"],
            _SERVER,
            (MI300X,) * 8,
            (_TRAINER, _SERVER_JOB),
        ),
        HostProfile(
            "h100-mi300x",
            "two-socket server, memory counters, one H100-class and one MI300X-class GPU",
            LAYOUTS["xeon-2s"],
            _SERVER,
            (H100, MI300X),
            (_TRAINER, _SERVER_JOB),
        ),
        HostProfile(
            "h100-mig",
            "one-socket server, one H100-class GPU in MIG instances of 3, 2, 1 and 1 slices",
            LAYOUTS["xeon-1s"],
            _SERVER,
            (H100,),
            (
                DemoJob(
                    "trainer",
                    duty=0.25,
                    cpu=0,
                    gpus={0: Training(step=0.12, host=0.03, noise=0.03, seed=1)},
                    memory=30 << 30,
                    spans="steps",
                    instance=1,
                ),
                _mig_job("tuner", 0.55, instance=2),
                _mig_job("notebook", 0.15, instance=3),
                _mig_job("resident", 0.0, instance=4),
            ),
            instances={0: (3, 2, 1, 1)},
        ),
        HostProfile(
            "laptop",
            "client processor with psys, core and uncore counters",
            LAYOUTS["client"],
            _LAPTOP,
            jobs=(DemoJob("browser", 0.2), DemoJob("compile", 0.4)),
        ),
        HostProfile(
            "batch",
            "one-socket server without a GPU, with a CPU-bound job that its power limit can slow",
            LAYOUTS["xeon-1s"],
            _BATCH,
            jobs=(DemoJob("cruncher", 0.9, 0, spans="steps", work=Training(0.1, 0.5, 0.02, 6)),),
        ),
    )
}


def profile_named(name: str) -> HostProfile:
    """The profile called ``name``; the error names those there are."""
    profile = PROFILES.get(name)
    if profile is None:
        raise ConfigError(
            f"There is no emulated host {name!r}. Choose one of: {', '.join(PROFILES)}."
        )
    return profile


# --------------------------------------------------------------------------------------------- host


_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - counters change a hundred times a second: no disk
_PREFIX = "wattspan-emulated-"
_STARTUP_GRACE = 10  # seconds; a younger directory may not be locked yet


class EmulatedHost(Closeable):
    """An emulated host that is running. Closing it ends its process and removes its files."""

    def __init__(self, profile: HostProfile, *, period: int = 10 * MILLISECOND) -> None:
        """Start it, and return when its counters can be read.

        Every ``period`` nanoseconds its CPU counters move. A shorter one costs more.
        """
        self.profile = profile
        self._period = int(period)
        self.directory, self._lock_fd = _make_directory()
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            (
                *self._engine_command(),
                *(profile.name, str(self.directory.absolute()), str(self._period)),
            ),
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C in a terminal reaches the whole process group; the owner alone decides.
            start_new_session=True,
            pass_fds=(self._lock_fd,),
        )
        self._client: ControlClient | None = None
        try:
            self._client = self._connected()
        except BaseException:
            self.close()
            raise

    def _connected(self) -> ControlClient:
        """A client of the engine, once the engine is ready."""
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        if not self._process.stdout.readline():
            raise WattspanError(
                f"The emulated host {self.profile.name!r} did not start; see its message above."
            )
        return ControlClient(self.directory)

    def _engine_command(self) -> tuple[str, ...]:
        return module_command("wattspan.emulation.engine")

    @property
    def sysfs(self) -> Path:
        """The directory in place of ``/sys``."""
        return self.directory / "sys"

    @property
    def counters(self) -> Path:
        """The socket in place of that of the helper for performance counters.

        It is there once jobs run, if the host has such counters.
        """
        return self.directory / COUNTERS_SOCKET

    @property
    def resolution(self) -> int:
        """The interval of its CPU counters' moves, in nanoseconds.

        However short their period: they follow this machine's CPU time, which the kernel charges to
        a process that keeps running only at its tick.
        """
        return max(self._period, SystemClock.tick())

    @property
    def lifeline(self) -> tuple[int, ...]:
        """The descriptors with which the host runs until every process that has them has ended.

        For the ``pass_fds`` of a process that needs the host after a kill of this one.
        """
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        return (self._process.stdin.fileno(),)

    def nvml(self) -> Any:
        """The object in place of the ``pynvml`` module; None if the host has no NVIDIA GPU."""
        if all(board.is_amd for board in self.profile.gpus):
            return None
        from wattspan.emulation.nvml import EmulatedNvml

        return EmulatedNvml(self.directory / NVIDIA_GPUS)

    def amdsmi(self) -> Any:
        """The object in place of the ``amdsmi`` module; None if the host has no AMD GPU."""
        if not any(board.is_amd for board in self.profile.gpus):
            return None
        from wattspan.emulation.amdsmi import EmulatedAmdSmi

        return EmulatedAmdSmi(self.directory / AMD_GPUS)

    def start_jobs(
        self, agent: Path | None = None, max_slowdown: float | None = None
    ) -> dict[str, int]:
        """Start the profile's jobs; their pids by name. They end with the host.

        They send spans of their work to the agent that listens at the Unix socket ``agent``. The
        training job declares itself with the budget ``max_slowdown``, if that is not None.
        """
        listener = {} if agent is None else {"agent": str(agent.absolute())}
        answer = self.ask(do="start-jobs", **listener, max_slowdown=max_slowdown)
        jobs: dict[str, int] = answer["jobs"]
        return jobs

    def ask(self, **question: object) -> dict[str, Any]:
        """Ask the engine: ``ask(do="truth")``."""
        assert self._client is not None  # noqa: S101 - it is there from the start on
        return self._client.ask(**question)

    def close(self) -> None:
        """End the process and remove its files. Idempotent."""
        if self._client is not None:
            self._client.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _make_directory() -> tuple[Path, int]:
    """A new directory, and a descriptor that locks it while any process has it open."""
    where = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    _remove_stale_hosts(where)
    try:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
        hold = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(hold, fcntl.LOCK_EX)
    except OSError as error:
        raise WattspanError(
            f"Cannot set up an emulated host in {where}: {error.strerror}. "
            "Make room there, or make it writable."
        ) from None
    return directory, hold


def _remove_stale_hosts(where: Path) -> None:
    """Remove the directories of hosts that were killed together with their owners."""
    for directory in where.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, locked, or gone
            hold = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
                age = SystemClock().now().wall / 1e9 - os.fstat(hold).st_mtime
                if age > _STARTUP_GRACE and os.fstat(hold).st_uid == os.geteuid():
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(hold)
