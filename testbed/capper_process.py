"""A real capper over an emulated host, with the test's queries of both."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from testbed.agent_on_host import Standing
from testbed.journals import journal_entries
from testbed.program import ENVIRONMENT, PROGRAM, options
from testbed.waiting import eventually
from wattspan.capper.protocol import CapperClient
from wattspan.clock import SystemClock
from wattspan.emulation.control import Closeable
from wattspan.emulation.host import EmulatedHost
from wattspan.model import CapKey, CapRow, Knob
from wattspan.ports import CapsError

HOLDER = """
import sys
from pathlib import Path
from wattspan.capper.protocol import CapperClient
from wattspan.clock import SystemClock
from wattspan.model import CapKey, Knob
client = CapperClient(Path(sys.argv[1]), SystemClock(), who="holder", timeout=20.0)
client.hold("job", {CapKey(Knob(sys.argv[2]), sys.argv[3]): int(sys.argv[4])}, "a test")
print("held", flush=True)
for line in sys.stdin:
    client.rows(renew=True)
    print("renewed", flush=True)
"""
"""Holds one cap, and renews it for each line of its input."""


class Gpu:
    """The emulated host's GPU, as anybody else on the host sees and sets it."""

    def __init__(self, host: EmulatedHost | Standing) -> None:
        self._nvml = host.nvml()
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByIndex(0)
        uuid = self._nvml.nvmlDeviceGetUUID(self._handle)
        self.key = CapKey(Knob.GPU_POWER, f"gpu:{uuid}")

    @property
    def limit(self) -> int:
        return int(self._nvml.nvmlDeviceGetPowerManagementLimit(self._handle))

    def set(self, milliwatts: int) -> None:
        self._nvml.nvmlDeviceSetPowerManagementLimit(self._handle, milliwatts)

    def close(self) -> None:
        self._nvml.nvmlShutdown()


@contextmanager
def gpu_at(host: EmulatedHost, milliwatts: int) -> Iterator[Gpu]:
    """The host's GPU, with its limit set before any other action."""
    gpu = Gpu(host)
    gpu.set(milliwatts)
    eventually(lambda: gpu.limit == milliwatts, "the limit before the test")
    yield gpu
    gpu.close()


def holding(socket: Path, key: CapKey, milliwatts: int) -> subprocess.Popen[str]:
    """Another process that holds a cap of the capper at ``socket``, once it does."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(socket), key.knob, key.device, str(milliwatts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    return holder


class CapperProcess(Closeable):
    """A `wattspan capper` that somebody ends. Directories are created unless given.

    ``handed`` are descriptors that it is to inherit under their own numbers.
    """

    def __init__(
        self,
        host: EmulatedHost,
        folder: Path,
        *,
        program: Sequence[str] = (*PROGRAM, "capper"),
        within: Sequence[str] = (),
        sockets: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        handed: Sequence[int] = (),
        **settings: object,
    ) -> None:
        self._temporary = None
        if sockets is None:  # a short name, as Unix sockets require
            self._temporary = tempfile.TemporaryDirectory(
                prefix="wattspan-", ignore_cleanup_errors=True
            )
            sockets = Path(self._temporary.name)
        self.host, self.folder, self.sockets = host, folder, sockets
        self.state_dir = folder / "state"
        chosen: Mapping[str, object] = {
            "agent.state_dir": self.state_dir,
            "agent.run_dir": sockets,
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        self.words = ["--emulated", str(host.directory), *options(chosen)]
        self._log = folder / "capper.stderr"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*within, *program, *self.words, *arguments],
                env={**ENVIRONMENT, **(environ or {})},
                pass_fds=handed,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def directory(self) -> Path:
        return self.state_dir / "capper-emulated"

    def journal(self) -> list[dict[str, Any]]:
        """Entries of the journal, if it exists."""
        return journal_entries(self.directory)

    def client(self, who: str = "test") -> CapperClient:
        return CapperClient(self.sockets / "capper.sock", SystemClock(), who=who, timeout=20.0)

    def ready(self) -> Self:
        """Itself, once it answers."""
        eventually(lambda: self.rows(), f"it answers: {self.said}")
        return self

    def rows(self) -> tuple[CapRow, ...]:
        client = self.client()
        try:
            return client.rows()
        except CapsError:
            assert self.process.poll() is None, self.said
            return ()
        finally:
            client.close()

    def row(self, key: CapKey) -> CapRow:
        return next(row for row in self.rows() if row.state.key == key)

    def holder(self, key: CapKey, milliwatts: int) -> subprocess.Popen[str]:
        """Another process that holds a cap, once it does."""
        return holding(self.sockets / "capper.sock", key, milliwatts)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.end(signal.SIGKILL)
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self._temporary is not None:
            self._temporary.cleanup()


def finish(holder: subprocess.Popen[str]) -> None:
    """Kill a lease holder in any state."""
    holder.kill()
    holder.wait(20)
    holder.stdin.close()
    holder.stdout.close()
