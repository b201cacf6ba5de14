"""`wattspan run` under a service manager: its notifications, and the effects of a reload."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from testbed.blocking_source import BlockingSource
from testbed.fixtures import entered
from testbed.program import Running, alive, counters, descendants, fallen, lasting
from testbed.service_manager import ServiceManager
from testbed.waiting import eventually

ON_A_TERMINAL = """
import fcntl, os, sys, termios
master, terminal = os.openpty()
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
os.set_inheritable(master, True)
os.set_inheritable(terminal, True)
os.execvp(sys.argv[1], sys.argv[1:])
"""


manager = entered(lambda: ServiceManager(watchdog=2.0))


class Service(Running):
    """An agent of a service manager's, which serves at one port and reads one file."""

    def __init__(self, folder: Path, manager: ServiceManager, port: int, **more: object) -> None:
        self.manager, self.port = manager, port
        self.file = folder / "config.toml"
        self.configure(str(more.pop("text", "")))
        self._times = 0
        environ = {**manager.environ, **more.pop("environ", {})}  # type: ignore[dict-item]
        super().__init__(
            folder,
            "--config",
            str(self.file),
            environ=environ,
            agent__run_dir=str(folder / "r"),
            **{"exporters__prometheus__listen": f"127.0.0.1:{port}", **more},  # type: ignore[arg-type]
        )

    def configure(self, text: str) -> None:
        self.file.write_text(text)

    def ready(self) -> Service:
        """Itself, once it says so another time."""
        self._times += 1
        self.manager.hears("READY=1", self._times)
        return self

    def reload(self, text: str) -> None:
        """Give it another file, and wait until it is ready again."""
        self.configure(text)
        self.process.send_signal(signal.SIGHUP)
        self.ready()

    def metrics(self) -> str:
        """Current scrape."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    def energies(self) -> dict[str, float]:
        """The counters that outlive an agent: counters of energy and of unknown time."""
        return {
            name: value
            for name, value in counters(self.metrics()).items()
            if "_joules_total" in name or "_gap_seconds_total" in name
        }

    def measuring(self) -> Service:
        def host() -> bool:
            found = re.search(
                r"^hw_host_energy_joules_total\S* (\S+)$", self.metrics(), re.MULTILINE
            )
            return found is not None and float(found[1]) > 0

        eventually(host, "the first figure")
        return self

    def close(self) -> None:
        """End it in order, so that its children have ended too."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        super().close()

    def held(self) -> tuple[int, int]:
        """Its idle numbers of descriptors and threads: the fewest that a second of looks shows.

        a file being read and a finished request add one of each for a moment.
        """
        proc, pause, looks = Path(f"/proc/{self.process.pid}"), threading.Event(), []
        for _ in range(50):
            looks.append([len(list((proc / kind).iterdir())) for kind in ("fd", "task")])
            pause.wait(0.02)
        descriptors, threads = map(min, zip(*looks, strict=True))
        return descriptors, threads


# ----------------------------------------------------------------------------- ready and alive


def test_readiness_is_notified_once_after_metrics_respond(
    tmp_path: Path, manager: ServiceManager, free_port: Callable[[], int]
) -> None:
    with Service(tmp_path, manager, free_port()) as agent:
        agent.ready()
        assert "hw_energy_joules_total" in agent.metrics()  # no second try
        agent.measuring()
        assert re.fullmatch(
            rf"EMULATED: serving http://127.0.0.1:{agent.port}/metrics, .* and 1 more;"
            r" 4 energy counters of rapl\.",
            manager.status,
        )
        assert agent.end() == 0
        assert manager.count("READY=1") == 1
        assert manager.count("STOPPING=1") == 1
        assert manager.lines.index("STOPPING=1") > manager.lines.index("READY=1")


def test_child_process_does_not_notify_the_service_manager(
    tmp_path: Path, manager: ServiceManager, free_port: Callable[[], int]
) -> None:
    """The emulated host, and a capper of its own, have nothing to tell the service manager."""
    with Service(tmp_path, manager, free_port()) as agent:
        agent.ready()
        started = descendants(agent.process.pid)
        assert started
        for pid in started:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            assert not re.search(rb"NOTIFY_SOCKET|WATCHDOG_", environ)


def with_source(
    source: BlockingSource, folder: Path, manager: ServiceManager, port: int
) -> Service:
    """An agent whose poller ``source`` can block."""
    settings = {"sources__blocking__gate": source.gate}
    return Service(folder, manager, port, environ=source.environ, **settings)


def test_hung_poller_stops_watchdog_notifications(
    tmp_path: Path, manager: ServiceManager, free_port: Callable[[], int]
) -> None:
    source = BlockingSource(tmp_path)
    with with_source(source, tmp_path, manager, free_port()) as agent:
        agent.ready()
        seen = manager.count("WATCHDOG=1")
        manager.hears("WATCHDOG=1", seen + 2)
        source.block()
        eventually(lambda: hanging(agent), "the poller hangs")

        def silent() -> bool:  # a sign may have been on its way when it began to hang
            seen = manager.count("WATCHDOG=1")
            threading.Event().wait(1.5)  # three signs of life, had there been any
            return manager.count("WATCHDOG=1") == seen

        eventually(silent, "no sign of life any more")
        seen = manager.count("WATCHDOG=1")
        assert "hw_energy_joules_total" in agent.metrics()
        source.release()
        manager.hears("WATCHDOG=1", seen + 1)
        assert agent.end() == 0


def test_reload_while_a_part_hangs_ends_the_process_for_another_one(
    tmp_path: Path, manager: ServiceManager, free_port: Callable[[], int]
) -> None:
    source = BlockingSource(tmp_path)
    with with_source(source, tmp_path, manager, free_port()) as agent:
        agent.ready()
        source.block()
        eventually(lambda: hanging(agent), "the poller hangs")
        agent.configure("[processes]\ntop = 7\n")
        agent.process.send_signal(signal.SIGHUP)
        assert agent.process.wait(60) == 1
        assert "cannot restart because a part of it hangs" in agent.said
        assert "Traceback" not in agent.said


def hanging(agent: Service) -> bool:
    """True if one of its threads waits for a writer of the pipe."""
    calls = []
    for task in Path(f"/proc/{agent.process.pid}/task").iterdir():
        try:
            calls.append((task / "wchan").read_text())
        except OSError:
            continue
    return any("wait_for_partner" in call or "fifo_open" in call for call in calls)


# ------------------------------------------------------------------------------------- reloads


def test_reload_applies_changes_and_keeps_totals(
    tmp_path: Path, manager: ServiceManager, free_port: Callable[[], int]
) -> None:
    with Service(tmp_path, manager, free_port()) as agent:
        agent.ready().measuring()
        # Not the rows of processes: one that is displaced and listed again begins at zero.
        host, before, held = descendants(agent.process.pid), lasting(agent.energies()), agent.held()
        for turn in range(3):
            agent.reload(f"[processes]\ntop = {turn + 1}\n")
            after = agent.energies()
            assert fallen(before, after) == {}
            before = lasting(after)
        eventually(lambda: fallen(agent.energies(), before), "energy goes on")
        eventually(lambda: agent.held() == held, f"it holds what it held: {held}")
        assert descendants(agent.process.pid) == host  # the emulated one, in the same process
        assert not any("gap_seconds" in name and value for name, value in after.items())
        assert manager.count("RELOADING=1") == 3
        assert [line for line in manager.lines if line.startswith("MONOTONIC_USEC=")]
        assert agent.end() == 0


def test_totals_survive_a_reload_without_a_store(
    tmp_path: Path, manager: ServiceManager, free_port: Callable[[], int]
) -> None:
    with Service(tmp_path, manager, free_port(), store__enabled="false") as agent:
        agent.ready().measuring()
        before = agent.energies()
        agent.reload("[processes]\ntop = 3\n")
        assert fallen(before, agent.energies()) == {}
        assert sum(before.values()) > 0


def test_invalid_reload_reports_every_error_and_changes_nothing(
    tmp_path: Path, manager: ServiceManager, free_port: Callable[[], int]
) -> None:
    with Service(tmp_path, manager, free_port()) as agent:
        agent.ready().measuring()
        address = re.search(r"serving [^;]*", manager.status)
        agent.reload('[processes]\ntoop = 1\n[agent]\nhistory = "soon"\n')
        assert "Not reloaded: " in agent.said
        assert "did you mean 'top'?" in agent.said
        assert "agent.history" in agent.said
        assert manager.status.startswith("Not reloaded (1 more in the log): ")
        assert address is not None
        assert address[0] in manager.status  # the very same listeners
        eventually(
            lambda: 'wattspan_source_up{source="configuration"' in agent.metrics(),
            "it is a metric that a configuration was refused",
        )
        agent.reload("")
        assert not manager.status.startswith("Not reloaded")
        assert "Reloaded; no change requires" in agent.said
        eventually(
            lambda: 'source="configuration"' not in agent.metrics(), "the metric goes with it"
        )


def test_failed_reload_falls_back_to_the_previous_configuration(
    tmp_path: Path, manager: ServiceManager, free_port: Callable[[], int]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with Service(tmp_path, manager, free_port()) as agent:
            agent.ready().measuring()
            before = agent.energies()
            port = taken.getsockname()[1]
            agent.reload(
                f'[spans]\nforward = "nonsense://{port}"\n'
                '[exporters.otlp]\nendpoint = "nonsense"\nmetrics = ["hw.nothing"]\n'
            )
            assert manager.status.startswith("Not reloaded (2 more in the log): ")
            assert "Reloading" not in agent.said, "the old one has gone on all the time"
            agent.reload(f'[exporters.otlp]\nendpoint = ""\n[spans]\ngrpc = "127.0.0.1:{port}"\n')
            assert "Not reloaded: Cannot receive" in manager.status
            assert "The previous configuration stays in force." in agent.said
            assert fallen(before, agent.energies()) == {}
            assert agent.process.poll() is None


def test_reload_without_counters_falls_back_and_keeps_totals(
    tmp_path: Path, manager: ServiceManager, free_port: Callable[[], int]
) -> None:
    text = '[store]\nenabled = false\n[emulation]\nprofile = "laptop"\n'
    blind = "[sources.rapl]\nenabled = false\n[sources.nvml]\nenabled = false\n"
    with Service(tmp_path, manager, free_port(), emulate=None, text=text) as agent:
        agent.ready().measuring()
        before = agent.energies()
        agent.reload(text.replace("laptop", "two-socket-h100") + blind)
        assert manager.status.startswith("Not reloaded: No energy counter")
        assert sum(before.values()) > 0
        assert fallen(before, agent.energies()) == {}


def test_reload_replaces_the_emulated_host(
    tmp_path: Path, manager: ServiceManager, free_port: Callable[[], int]
) -> None:
    profile = '[emulation]\nprofile = "{}"\n'
    agent = Service(tmp_path, manager, free_port(), emulate=None, text=profile.format("laptop"))
    with agent:
        agent.ready().measuring()
        before = descendants(agent.process.pid)
        agent.reload(profile.format("two-socket-h100"))
        agent.measuring()
        assert "nvml" in manager.status
        assert not alive(before)  # its engine has ended
        agent.reload(profile.format("no-such-host"))
        assert manager.status.startswith("Not reloaded: ")
        assert "nvml" in manager.status
        assert agent.end() == 0


def test_sighup_on_a_terminal_ends_the_agent(tmp_path: Path) -> None:
    with Running(tmp_path, within=[sys.executable, "-c", ON_A_TERMINAL]) as agent:
        agent.address()
        assert agent.end(signal.SIGHUP) == 0
        assert "Reload" not in agent.said


def test_sighup_without_terminal_or_manager_reloads(tmp_path: Path) -> None:
    """As in a container, where only an explicit signal occurs."""
    with Running(tmp_path) as agent:
        agent.address()
        agent.process.send_signal(signal.SIGHUP)
        eventually(lambda: "Reloaded; no change requires" in agent.said, "it reloads")
        assert agent.end() == 0


def test_sigterm_during_reloads_ends_the_agent(
    tmp_path: Path, manager: ServiceManager, free_port: Callable[[], int]
) -> None:
    with Service(tmp_path, manager, free_port()) as agent:
        agent.ready()
        agent.configure("[processes]\ntop = 3\n")
        agent.process.send_signal(signal.SIGHUP)
        manager.hears("RELOADING=1")
        assert agent.end() == 0
        assert "Traceback" not in agent.said
