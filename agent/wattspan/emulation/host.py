"""An emulated host: its process, sysfs root, NVML, jobs and true energies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from wattspan.clock import SystemClock
from wattspan.emulation.control import Closeable, ControlClient
from wattspan.emulation.gpu_file import AMD_GPUS, NVIDIA_GPUS
from wattspan.emulation.profiles import HostProfile
from wattspan.model import MILLISECOND
from wattspan.ports import WattspanError
from wattspan.util.process import module_command

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
