"""The `wattspan` program as people and service managers run it: a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from testbed.waiting import eventually
from wattspan.cli import cli
from wattspan.emulation.control import Closeable

PROGRAM = [sys.executable, "-c", "from wattspan.cli import main; main()"]
OURS = ("WATTSPAN_", "COVERAGE_")  # variables of build servers and coverage
_HOST_DIRECTORY = tempfile.TemporaryDirectory(prefix="wattspan-host-", ignore_cleanup_errors=True)
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(OURS)} | {
    "WATTSPAN_CONFIG": os.devnull,
    # Cappers of tests neither find nor exclude those of this machine.
    "WATTSPAN_CAPS_HOST_DIR": f"{_HOST_DIRECTORY.name}/capper",
}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
SHARED_MEMORY = Path("/dev/shm")

UNPRIVILEGED = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
"""Keep the user and drop all capabilities."""


def on_a_disk_of(size: str, folder: Path) -> list[str]:
    """Runs a command that sees a disk of its own at ``folder``. Needs root.

    The mount is private to the command; others reach it by ``/proc/PID/root``.
    """
    folder.mkdir(exist_ok=True)
    script = (
        'mount --make-rprivate / && mount -t tmpfs -o "size=$1" small "$2" && shift 2 && exec "$@"'
    )
    return ["unshare", "--mount", "sh", "-c", script, "sh", size, str(folder)]


def with_read_only(folder: Path) -> list[str]:
    """Runs a command without write access to ``folder`` for any user. Needs root.

    Like a disk that the kernel made read-only after an error.
    """
    script = (
        'mount --make-rprivate / && mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"'
        ' && shift && exec "$@"'
    )
    return ["unshare", "--mount", "sh", "-c", script, "sh", str(folder)]


def wattspan(
    *arguments: str, within: Sequence[str] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run the program to its end; ``within`` is the command that runs it."""
    return subprocess.run(
        [*within, *PROGRAM, *arguments],
        env={**ENVIRONMENT, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def output_of(*command: object, timeout: float, environ: Mapping[str, str] | None = None) -> str:
    """The output of a command, which must succeed; ``environ`` is by default that of the tests."""
    done = subprocess.run(
        list(map(str, command)),
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_process(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the program to its end within this process, which starts nothing."""
    done = CliRunner().invoke(cli, arguments, env={"WATTSPAN_CONFIG": os.devnull, **environ})
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def options(settings: Mapping[str, object]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


class Running(Closeable):
    """A `wattspan run` that somebody ends. Its standard error goes to a file of the test."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        emulate: str | None = "laptop",
        within: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        """Start it; its state directory is ``folder / "state"`` unless set otherwise.

        Its sockets have a separate directory with a short name, as Unix sockets require.
        Dots in the names of settings are written as two underscores.
        """
        self.state_dir = folder / "state"
        self._sockets = tempfile.TemporaryDirectory(prefix="wattspan-", ignore_cleanup_errors=True)
        self.run_dir = Path(self._sockets.name)
        chosen: dict[str, object] = {
            "agent.state_dir": self.state_dir,
            "agent.run_dir": self.run_dir,
            "spans.http": "127.0.0.1:0",
            "exporters.prometheus.listen": "127.0.0.1:0",
        }
        chosen |= {key.replace("__", "."): value for key, value in settings.items()}
        self._log = folder / "stderr"
        words = [*(("--emulate", emulate) if emulate else ()), *options(chosen), *arguments]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*within, *PROGRAM, "run", *words],
                env={**ENVIRONMENT, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def address(self) -> str:
        """Address of the metrics, once the program logs it."""
        return self._served(r"Serving (http\S+)\n")

    def spans_address(self) -> str:
        """Address of the OTLP receiver over TCP: an OTLP/HTTP endpoint, without its path."""
        return self._served(r"Serving (http://\S+)/v1/traces\n")

    def _served(self, line: str) -> str:
        def told() -> str:
            found = re.search(line, self.said)
            if found is None and self.process.poll() is not None:
                raise AssertionError(f"it ended with {self.process.returncode}: {self.said}")
            return found[1] if found else ""

        return eventually(told, f"the program logs {line!r}")

    def scrape(self, accept: str = OPENMETRICS) -> str:
        request = urllib.request.Request(self.address(), headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return str(answer.read().decode())

    def totals(self) -> dict[str, float]:
        """Every counter that is served now, by name and labels."""
        return counters(self.scrape("text/plain"))

    def energy(self) -> float:
        """Joules of the host's cover so far."""
        found = re.search(r"^hw_host_energy_joules_total\S* (\S+)$", self.scrape(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    def measuring(self) -> Self:
        """Itself, once it has measured something."""
        eventually(lambda: self.energy() > 0, "the first figure")
        return self

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._sockets.cleanup()


def counters(scrape: str) -> dict[str, float]:
    """The counters in Prometheus text, by name and labels; those of energy and time only rise."""
    return {
        f"{sample.name}{json.dumps(sample.labels, sort_keys=True)}": sample.value
        for family in text_string_to_metric_families(scrape)
        if family.type == "counter"
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def lasting(totals: Mapping[str, float]) -> dict[str, float]:
    """The energies that go on in every next life of an agent, on another emulated host as well.

    Another host is another boot: the energy of processes of an earlier run is not listed.
    """
    return {
        name: value
        for name, value in totals.items()
        if "_joules_total" in name and not name.startswith("wattspan_process_")
    }


def fallen(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, tuple[float, ...]]:
    """The counters that are lower after than before, by their values; all should be steady."""
    return {
        name: (value, after[name])
        for name, value in before.items()
        if name in after and after[name] < value
    }


def emulated_hosts() -> frozenset[Path]:
    """The directories of all emulated hosts on this machine."""
    return frozenset(SHARED_MEMORY.glob("wattspan-emulated-*"))


def descendants(pid: int) -> frozenset[int]:
    """The processes that ``pid`` started, and those that they did."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            after_name = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(stat.parent.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found.add(child)
            waiting.append(child)
    return frozenset(found)


def host_of(pid: int) -> Path:
    """The directory of the emulated host that a process has started."""
    for one in descendants(pid):
        words = Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")
        if b"wattspan.emulation.engine" in words:
            return Path(words[words.index(b"wattspan.emulation.engine") + 2].decode())
    raise AssertionError(f"process {pid} has started no emulated host")


def alive(pids: frozenset[int]) -> frozenset[int]:
    """Those that still run; a zombie does not."""
    return frozenset(pid for pid in pids if _state(pid) not in {"", "Z", "X"})


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def fill(path: Path) -> None:
    """Take every byte that is left on a disk of a few."""
    with path.open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(512)):
            pass
