"""`wattspan demo` as people try it: in a pipe, in a terminal, twice at once, and interrupted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import subprocess
import termios
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from testbed.program import (
    ENVIRONMENT,
    OPENMETRICS,
    PROGRAM,
    alive,
    descendants,
    emulated_hosts,
    wattspan,
)
from testbed.waiting import eventually

from wattspan.clock import SystemClock

pytestmark = pytest.mark.long

PROMPT = 40.0
"""Seconds after which an interrupted demo has not obeyed: it ends by itself after a minute."""


class Demo:
    """A demo whose standard output is a file, as far as it has come."""

    def __init__(self, folder: Path, *arguments: str, columns: int = 80) -> None:
        self._output = folder / "output"
        self._clock = SystemClock()
        self._began = self._clock.monotonic()
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*PROGRAM, "demo", *arguments],
                env={**ENVIRONMENT, "COLUMNS": str(columns)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def printed(self) -> str:
        return self._output.read_text()

    @property
    def seconds(self) -> float:
        return (self._clock.monotonic() - self._began) / 1e9

    def prints(self, text: str) -> str:
        """Everything printed, once ``text`` is in it."""

        def seen() -> str:
            printed = self.printed
            assert text in printed or self.process.poll() is None, printed
            return printed if text in printed else ""

        return eventually(seen, f"the demo prints {text!r}", within=60)

    def address(self) -> str:
        self.prints("/metrics\n")
        return re.findall(r"http://\S+/metrics", self.printed)[0]


@contextmanager
def demo(folder: Path, *arguments: str, columns: int = 80) -> Iterator[Demo]:
    folder.mkdir(exist_ok=True)
    one = Demo(folder, *arguments, columns=columns)
    try:
        yield one
    finally:
        with contextlib.suppress(ProcessLookupError):
            one.process.kill()
        one.process.wait()


def watts(printed: str, row: str) -> list[float]:
    """The figures in the columns of watts of the first row with ``row`` in it."""
    line = next((line for line in printed.splitlines() if re.search(rf"\b{row} ", line)), "")
    return [float(figure) for figure in re.findall(r"\d+\.\d\b(?!%| +k?J|\d)", line)]


def test_demo_in_a_pipe_prints_devices_groups_and_processes(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    with demo(tmp_path, "--listen", f"127.0.0.1:{free_port()}") as shown:
        printed = shown.prints("not listed: ")
        request = urllib.request.Request(shown.address(), headers={"Accept": OPENMETRICS})
        with urllib.request.urlopen(request, timeout=20) as answer:
            families = list(openmetrics(answer.read().decode()))
        (pid,) = re.findall(r"\btrainer \(pid (\d+)\)", printed)
        # On a machine with many processes it has to wait for a row: theirs are kept for a minute.
        eventually(
            lambda: max(watts(shown.printed, f"{pid} trainer"), default=0) > 100,
            "its trainer draws power",
            within=150,
        )
        shown.process.send_signal(signal.SIGINT)
        assert shown.process.wait(60) == 0
        assert shown.printed.endswith("Done. The emulated host and its files are removed.\n")
    for header in ("DEVICE", "GROUP", "PROCESS"):
        assert re.search(rf"^ *(PID )?{header} ", printed, re.MULTILINE)
    assert max(watts(printed, "package-0")) > 60
    assert max(watts(printed, "H100 80GB HBM3 0")) > 200
    assert "\x1b" not in printed
    assert all(len(line) <= 80 for line in printed.splitlines()[6:]), printed
    assert len(re.findall("EMULATED", printed)) == 2, "once at the start, once above the figures"
    rows = printed.partition("PROCESS")[2].partition("SPAN")[0].rstrip().splitlines()
    assert len(rows) <= 1 + 12 + 2, "the rows that matter"
    energies = {family.name for family in families}
    assert {"hw_energy_joules", "wattspan_group_energy_joules"} <= energies


def test_demo_labels_example_price_and_intensity(tmp_path: Path) -> None:
    """No reader can confuse it with a tariff."""
    with demo(tmp_path, "--listen", "127.0.0.1:0", "--profile", "laptop", "--no-tune") as shown:
        shown.prints(
            "Cost and carbon use example values: 0.30 Example and 400 g CO2e per kilowatt-hour."
        )
        address = shown.address()
        booked = "hw_host_energy_joules_total"
        eventually(lambda: scraped(address).get(booked, (0, {}))[0] > 1, "a joule is booked", 60)
        series = scraped(address)
    cost, labels = series["wattspan_host_cost_total"]
    assert cost > 0
    assert labels == {"currency": "Example", "origin": "constant", "provenance": "emulated"}
    price, labels = series["wattspan_energy_price_per_kwh"]
    assert (price, labels["currency"]) == (0.30, "Example")
    carbon, labels = series["wattspan_host_carbon_grams_total"]
    assert carbon > 0
    assert labels["provenance"] == "emulated"


def scraped(address: str) -> dict[str, tuple[float, dict[str, str]]]:
    """A series of each name: its value and its labels."""
    request = urllib.request.Request(address, headers={"Accept": OPENMETRICS})
    with urllib.request.urlopen(request, timeout=60) as answer:
        families = list(openmetrics(answer.read().decode()))
    samples = (sample for family in families for sample in family.samples)
    return {sample.name: (sample.value, sample.labels) for sample in samples}


def test_demo_ends_after_its_duration(tmp_path: Path) -> None:
    clock = SystemClock()
    began = clock.monotonic()
    done = wattspan("demo", "--duration", "3s", "--listen", "127.0.0.1:0")  # killed after a minute
    took = (clock.monotonic() - began) / 1e9
    # Another demo may have the default port of the span listener.
    errors = [line for line in done.stderr.splitlines() if "127.0.0.1:4318" not in line]
    assert (done.returncode, errors) == (0, [])
    assert took >= 3
    assert "DEVICE" in done.stdout, "however short, it shows something"


def test_two_demos_use_different_ports(tmp_path: Path, free_port: Callable[[], int]) -> None:
    listen = f"127.0.0.1:{free_port()}"
    with (
        demo(tmp_path / "one", "--listen", listen, "--profile", "laptop") as one,
        demo(tmp_path / "two", "--listen", listen, "--profile", "laptop") as two,
    ):
        addresses = {one.address(), two.address()}
        assert len(addresses) == 2
        assert f"http://{listen}/metrics" in addresses
        for shown in (one, two):
            with urllib.request.urlopen(shown.address(), timeout=20) as answer:
                assert answer.status == 200
            shown.process.send_signal(signal.SIGTERM)
            assert shown.process.wait(20) == 0, shown.printed


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", ["EMULATED", "The host is idle", "Running jobs"])
def test_interrupted_demo_exits_zero_and_cleans_up(tmp_path: Path, after: str) -> None:
    with demo(tmp_path, "--listen", "127.0.0.1:0", "--profile", "laptop") as shown:
        shown.prints(after)
        children = descendants(shown.process.pid)
        os.killpg(shown.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
        assert shown.process.wait(PROMPT) == 0, shown.printed
        eventually(lambda: not alive(children), "its processes are gone")
        assert "Traceback" not in shown.printed


@pytest.mark.exhaustive
def test_killed_demo_leaves_no_job_and_no_file(tmp_path: Path) -> None:
    with demo(tmp_path, "--listen", "127.0.0.1:0", "--profile", "laptop") as shown:
        shown.prints("Running jobs")
        children = descendants(shown.process.pid)
        assert len(children) == 3, "the host and its two jobs"
        mine = {
            host
            for host in emulated_hosts()
            if any(str(host) in _command_line(pid) for pid in children)
        }
        assert len(mine) == 1
        shown.process.kill()
        eventually(lambda: not alive(children), "its processes are gone")
        eventually(lambda: not mine & emulated_hosts(), "its files are gone")


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--profile", "mainframe"], 2, "There is no emulated host 'mainframe'. Choose one of: "),
        (["--listen", "nowhere"], 2, "--listen: Bad value for "),
        (["--listen", "192.0.2.1:9"], 4, "Cannot serve metrics on 192.0.2.1:9: this host has no"),
        (["--duration", "long"], 2, "Usage: "),
    ],
)
def test_invalid_option_is_rejected(arguments: list[str], code: int, sentence: str) -> None:
    done = wattspan("demo", *arguments)
    assert done.returncode == code
    assert done.stderr.removeprefix("wattspan: ").startswith(sentence)
    assert "Traceback" not in done.stderr


def test_demo_ends_quietly_when_its_reader_exits(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "demo", "--profile", "laptop", "--listen", "127.0.0.1:0"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    said = process.stderr.read()
    process.stderr.close()
    process.wait(30)
    assert "Traceback" not in said
    assert "internal error" not in said


# ------------------------------------------------------------------------------- in a terminal


class Terminal:
    """A terminal with the demo in it."""

    def __init__(self, *arguments: str) -> None:
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, 100))
        self.before = termios.tcgetattr(theirs)
        environment = {k: v for k, v in ENVIRONMENT.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [*PROGRAM, "demo", "--listen", "127.0.0.1:0", *arguments],
            env={**environment, "TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # Only of its controlling terminal does a process get Ctrl-C and hang-ups.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._theirs = theirs  # held open, so that its settings can be asked for afterwards
        os.set_blocking(self.ours, False)
        self.seen = bytearray()

    def shows(self, text: bytes, within: float = 60.0) -> None:
        def look() -> bool:
            with contextlib.suppress(OSError):
                while read := os.read(self.ours, 65536):
                    self.seen.extend(read)
            return text in self.seen

        eventually(look, f"the terminal shows {text!r}", within=within)

    @property
    def restored(self) -> bool:
        return termios.tcgetattr(self._theirs) == self.before

    def hang_up(self) -> None:
        """Close the window."""
        if self.ours >= 0:
            os.close(self.ours)
            self.ours = -1

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.hang_up()
        os.close(self._theirs)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    one = Terminal("--profile", "laptop")
    yield one
    one.close()


def test_demo_in_a_terminal_draws_until_q_and_restores_the_screen(terminal: Terminal) -> None:
    terminal.shows(b"\x1b[?1049h")
    terminal.shows(b"EMULATED HOST")
    terminal.shows(b"The host is idle for a few seconds")
    terminal.shows(b"Running jobs: browser (pid ")
    terminal.shows(b"compile")
    assert not terminal.restored, "keys are read one by one"
    os.write(terminal.ours, b"q")
    terminal.shows(b"\x1b[?1049l")
    terminal.shows(b"Done. The emulated host and its files are removed.")
    assert terminal.process.wait(20) == 0
    assert terminal.restored


@pytest.mark.parametrize("how", ["key", pytest.param("signal", marks=pytest.mark.exhaustive)])
def test_ctrl_c_ends_the_demo_with_success(terminal: Terminal, how: str) -> None:
    terminal.shows(b"EMULATED HOST")
    if how == "key":
        os.write(terminal.ours, b"\x03")
    else:
        terminal.process.send_signal(signal.SIGINT)
    terminal.shows(b"Done. The emulated host")
    assert terminal.process.wait(20) == 0
    assert terminal.restored
    assert b"Traceback" not in terminal.seen


@pytest.mark.exhaustive
def test_closed_terminal_ends_the_demo(terminal: Terminal) -> None:
    terminal.shows(b"EMULATED HOST")
    children = descendants(terminal.process.pid)
    terminal.hang_up()
    terminal.process.wait(20)  # with any exit code: the reader is gone
    eventually(lambda: not alive(children), "its processes are gone")


@pytest.mark.exhaustive
def test_demo_shows_what_a_training_step_and_a_token_cost(tmp_path: Path) -> None:
    step = re.compile(r"^train_step +trainer +\d+ .* ([\d.]+) +J +\d+ ms", re.MULTILINE)
    chat = re.compile(r"^chat +server .* [\d.]+ m?J$", re.MULTILINE)
    with demo(tmp_path, "--plain", columns=120) as shown:
        shown.prints("J/token")
        assert "J/call" in shown.printed
        eventually(lambda: chat.search(shown.printed), "what a token costs", within=60)
        found = eventually(lambda: step.findall(shown.printed), "what a step costs", within=60)
    assert 40 < float(found[-1]) < 90, "0.12 s on a board that draws up to 655 W"


# --------------------------------------------------------------------------------------- tuning


@pytest.mark.exhaustive
def test_demo_tunes_its_trainer_and_names_it(tmp_path: Path) -> None:
    with demo(tmp_path, "--plain", "--listen", "127.0.0.1:0", columns=200) as shown:
        shown.prints("The agent tunes trainer: ")
        shown.prints("The job declares itself and asks for 10%.")
        shown.prints("Running jobs")
        eventually(lambda: cappers(shown.process.pid), "it has started a capper")
        shown.prints("TUNING")
        shown.prints("trainer/train_step")
        shown.prints('Declared as "trainer": limited.')
        children = descendants(shown.process.pid)
        shown.process.kill()
        eventually(lambda: not alive(children), "its processes are gone, the capper too")


@pytest.mark.exhaustive
def test_demo_lowers_the_energy_of_steps_within_minutes(tmp_path: Path) -> None:
    """Output of the demo; the benchmark checks exact values."""
    with demo(tmp_path, "--plain", "--listen", "127.0.0.1:0", "--profile", "one-socket-h100") as it:
        row = re.compile(r"^trainer/train_step +holding .*% +(-?[\d.]+)% *$", re.MULTILINE)

        def cheaper() -> bool:
            return any(float(saving) > 2.5 for saving in row.findall(it.printed))

        eventually(cheaper, "a setting saves energy", within=400)
        it.process.send_signal(signal.SIGINT)
        assert it.process.wait(30) == 0, it.printed
        assert "Traceback" not in it.printed


@pytest.mark.exhaustive
def test_untuned_demo_starts_no_capper(tmp_path: Path) -> None:
    arguments = ("--plain", "--no-tune", "--listen", "127.0.0.1:0")
    with demo(tmp_path, *arguments, "--profile", "one-socket-h100") as shown:
        printed = shown.prints("not listed: ")
        assert not cappers(shown.process.pid)
        assert "The agent tunes" not in printed
        assert "TUNING" not in printed


def cappers(pid: int) -> list[int]:
    """The cappers that a process has started."""
    return [one for one in descendants(pid) if "\0capper\0" in _command_line(one)]
