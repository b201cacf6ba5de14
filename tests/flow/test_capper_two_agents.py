"""Two agents with directories of their own on one host: they share its one capper."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from testbed.capper_process import Gpu, finish, gpu_at, holding
from testbed.nvml_library import build, environment
from testbed.program import ENVIRONMENT, PROGRAM, options, wattspan
from testbed.waiting import eventually

from wattspan.capper.host_directory import HostDirectory
from wattspan.emulation.host import EmulatedHost, profile_named

ORIGINAL, CAP = 650_000, 500_000
pytestmark = pytest.mark.needs_cc


@dataclass
class RealHost:
    """A host whose driver is emulated, which no agent on it knows."""

    folder: Path
    gpu: Gpu
    variables: Mapping[str, str]
    stack: ExitStack
    directory: HostDirectory = field(init=False)

    def __post_init__(self) -> None:
        self.directory = HostDirectory(self.folder / "host")

    def settings(self, name: str) -> dict[str, object]:
        """The directories of one agent."""
        return {
            "agent.state_dir": self.folder / name / "state",
            "agent.run_dir": self.folder / name,
            "caps.host_dir": self.directory.path,
        }

    def start(self, name: str, *words: str, **settings: object) -> Program:
        chosen = self.settings(name) | {k.replace("__", "."): v for k, v in settings.items()}
        (self.folder / name).mkdir(exist_ok=True)
        program = Program(self, name, [*words, *options(chosen)])
        self.stack.callback(program.close)
        return program

    def ask(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """A command with the configuration of one agent."""
        return wattspan(*words, *options(self.settings(name)), **self.variables)


class Program:
    """One process of an agent, with its log."""

    def __init__(self, host: RealHost, name: str, words: list[str]) -> None:
        self.log = host.folder / f"{name}.log"
        self.socket = host.folder / name / "capper.sock"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*PROGRAM, *words],
                env={**ENVIRONMENT, **host.variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def said(self) -> str:
        return self.log.read_text()

    def says(self, text: str, within: float = 60.0) -> None:
        eventually(lambda: text in self.said, f"{text!r} in the log: {self.said}", within)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


@contextmanager
def real_host(library: Path) -> Iterator[RealHost]:
    with (
        tempfile.TemporaryDirectory(prefix="wattspan-", ignore_cleanup_errors=True) as folder,
        EmulatedHost(profile_named("one-socket-h100")) as emulated,
        gpu_at(emulated, ORIGINAL) as gpu,
        ExitStack() as stack,
    ):
        variables = environment(library, emulated.directory / "gpus")
        # This interpreter's own library may be in another place of that path.
        paths = [variables["LD_LIBRARY_PATH"], os.environ.get("LD_LIBRARY_PATH", "")]
        variables["LD_LIBRARY_PATH"] = ":".join(filter(None, paths))
        yield RealHost(Path(folder), gpu, variables, stack)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


def test_second_capper_is_refused_and_after_a_kill_restores_the_limits_of_the_first(
    library: Path,
) -> None:
    with real_host(library) as host:
        first = host.start("a", "capper")
        eventually(lambda: host.directory.address(), f"it serves: {first.said}")
        holder = holding(first.socket, host.gpu.key, CAP)
        assert host.gpu.limit == CAP
        second = host.start("b", "capper")
        assert second.process.wait(60) == 6
        assert f"Process {first.pid} is the capper of this host" in second.said
        assert str(first.socket) in second.said
        status = json.loads(host.ask("b", "caps", "status", "--json").stdout)
        assert status["pid"] == first.pid
        first.kill()
        finish(holder)
        assert host.gpu.limit == CAP  # no process has restored it yet
        third = host.start("b", "capper")
        eventually(lambda: host.gpu.limit == ORIGINAL, f"it is restored: {third.said}")
        address = eventually(lambda: host.directory.address(), "a capper serves")
        eventually(lambda: str(third.pid) in host.directory.holder_text, "it has the lock")
        eventually(
            lambda: (place := host.directory.address()) and place.path == third.socket,
            f"the link is replaced: {address}",
        )


def test_restore_of_another_agents_capper_needs_its_socket(library: Path) -> None:
    with real_host(library) as host:
        other = host.start("a", "capper")
        eventually(lambda: host.directory.address(), f"it serves: {other.said}")
        holder = holding(other.socket, host.gpu.key, CAP)
        words = ["caps", "restore", *options({"caps.host_dir": host.directory.path})]
        refused = wattspan(*words, **host.variables)
        assert (refused.returncode, refused.stdout) == (6, "")
        assert f"Capper: process {other.pid}" in refused.stderr
        assert f"--capper {other.socket}" in refused.stderr
        assert host.gpu.limit == CAP
        done = wattspan(*words, "--capper", str(other.socket), **host.variables)
        assert done.returncode == 0, done.stderr
        assert f"Capper: process {other.pid}" in done.stdout
        assert host.gpu.limit == ORIGINAL
        finish(holder)


AGENT = {
    "sources.rapl.enabled": "false",
    "spans.http": "",
    "exporters.prometheus.listen": "127.0.0.1:0",
    "autotune.mode": "apply",
    "autotune.apply_found": "true",
    "caps.capper": "true",
    "caps.users": "[]",
}


@pytest.mark.exhaustive
def test_second_agent_uses_the_capper_of_the_first_and_replaces_it_after_its_end(
    library: Path,
) -> None:
    with real_host(library) as host:
        first = host.start("a", "run", **AGENT)
        eventually(lambda: host.directory.address(), f"its capper serves: {first.said}")
        fixed = {"caps.budget_watts": 600, **AGENT}
        second = host.start("b", "run", **fixed)
        second.says(f"The capper of another agent of this host, on {first.socket}")
        second.says("the power budget of this agent's [caps] are not in force")
        words = ["doctor", "--set", "caps.budget_watts=600", "--set", "autotune.mode=apply"]
        told = host.ask("b", *words).stdout
        assert "the capper of another agent of this host" in told
        holder = holding(first.socket, host.gpu.key, CAP)
        first.process.send_signal(signal.SIGTERM)
        first.process.wait(60)
        finish(holder)
        second.says("does not answer; another one is started", within=120)
        eventually(
            lambda: (place := host.directory.address()) and place.path == second.socket,
            f"the link is replaced: {second.said}",
        )
        eventually(lambda: host.gpu.limit == 600_000, "the budget of the second agent")


@pytest.mark.exhaustive
def test_one_of_two_simultaneous_cappers_serves_each_time(library: Path) -> None:
    with real_host(library) as host:
        for turn in range(20):
            started = [host.start(f"{name}{turn}", "capper") for name in "ab"]
            eventually(
                lambda started=started: [one for one in started if one.process.poll() is not None],
                "one ends",
            )
            (winner,) = (one for one in started if one.process.poll() is None)
            eventually(
                lambda winner=winner: (
                    (place := host.directory.address()) and place.path == winner.socket
                ),
                f"the other serves: {winner.said}",
            )
            holder = holding(winner.socket, host.gpu.key, CAP)
            winner.kill()  # the limit stays, and the next winner restores it
            finish(holder)
            assert host.gpu.limit == CAP
        last = host.start("last", "capper")
        eventually(lambda: host.gpu.limit == ORIGINAL, f"it is restored: {last.said}")
