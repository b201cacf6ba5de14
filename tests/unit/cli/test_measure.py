"""`wattspan measure`: running a command, and reporting its energy."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from testbed.query_server import FAR
from testbed.waiting import receive_instead_of_main

from wattspan.cli import cli, measure
from wattspan.cli.measure import ChildExit, CommandNotExecutableError, CommandNotFoundError
from wattspan.cli.measure.results import (
    CommandRun,
    EnergySum,
    MeanAndDeviation,
    MeasurementResult,
    result_lines,
)
from wattspan.clock import SystemClock
from wattspan.model import SECOND, Consumer
from wattspan.sdk import AgentUnavailableError
from wattspan.sdk.client import Device, Energy, Measurement
from wattspan.testing import ManualClock


def run(*command: str, period: int = 3600 * SECOND, **told: Any) -> ChildExit:
    nothing = {"on_start": lambda _: None, "on_period": lambda *_: None}
    return measure.run_child(command, SystemClock(), period=period, **(nothing | told))


def python(script: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", script)


# --------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("code", [0, 1, 42, 255])
def test_exit_code_is_the_commands(code: int) -> None:
    ended = run(*python(f"raise SystemExit({code})"))
    assert ended.code == code
    assert not ended.interrupted


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_signal_of_the_command_becomes_128_plus_its_number(number: int) -> None:
    ended = run(*python(f"import os; os.kill(os.getpid(), {int(number)})"))
    assert ended.code == 128 + number


def test_run_has_start_end_and_cpu_time() -> None:
    before = SystemClock().monotonic()
    ended = run(*python("while __import__('time').process_time() < 0.05: pass"))
    assert before <= ended.start < ended.end <= SystemClock().monotonic()
    assert 0.05 <= ended.cpu_seconds <= (ended.end - ended.start) / 1e9 + 0.05


def test_identity_of_the_command_is_readable_until_it_is_reaped() -> None:
    seen: list[Consumer] = []

    def on_start(consumer: Consumer) -> None:
        os.waitid(os.P_PID, consumer.pid, os.WEXITED | os.WNOWAIT)
        seen.append(measure.process_identity(consumer.pid))

    assert run("true", on_start=on_start).consumer == seen[0]


def test_meanwhile_is_called_until_the_end(tmp_path: Path) -> None:
    calls: list[int] = []

    def on_period(whom: Consumer, start: int) -> None:
        calls.append(start)
        if len(calls) == 3:
            (tmp_path / "enough").touch()

    wait = f"while [ ! -e {tmp_path}/enough ]; do sleep 0.01; done"
    ended = run("sh", "-c", wait, period=SECOND // 100, on_period=on_period)
    assert calls[:3] == [ended.start] * 3


def test_error_in_meanwhile_is_raised_after_the_command(tmp_path: Path) -> None:
    def on_period(consumer: Consumer, start: int) -> None:
        (tmp_path / "failed").touch()
        raise ValueError

    wait = f"while [ ! -e {tmp_path}/failed ]; do sleep 0.01; done; touch {tmp_path}/done"
    with pytest.raises(ValueError):  # noqa: PT011 - our own
        run("sh", "-c", wait, period=SECOND // 100, on_period=on_period)
    assert (tmp_path / "done").exists()


def test_slow_registration_does_not_lengthen_the_run() -> None:
    clock = SystemClock()
    told: list[int] = []

    def on_start(consumer: Consumer) -> None:
        os.waitid(os.P_PID, consumer.pid, os.WEXITED | os.WNOWAIT)
        clock.sleep_until(clock.monotonic() + SECOND // 2)
        told.append(clock.monotonic())

    assert run("true", on_start=on_start).end < told[0]


def test_missing_or_unexecutable_command_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(CommandNotFoundError, match="Cannot run 'nonesuch': no such file") as error:
        run("nonesuch")
    assert error.value.exit_code == 127
    plain = tmp_path / "plain"
    plain.write_text("no program")
    with pytest.raises(CommandNotExecutableError, match="permission denied") as denied:
        run(str(plain))
    assert denied.value.exit_code == 126
    plain.chmod(0o755)
    with pytest.raises(CommandNotExecutableError, match="exec format error"):
        run(str(plain))
    with pytest.raises(CommandNotExecutableError, match="null byte"):
        run("a\0b")


# --------------------------------------------------------------------------------- long commands


class Pieces:
    """A meter that records its calls and returns 1 W; settled up to a given time."""

    about, note = "a fake", ""

    def __init__(self, settled: int = FAR) -> None:
        self.settled = settled
        self.asked: list[tuple[int, int]] = []

    def watch(self, consumer: Consumer) -> None:
        pass

    def read(self, consumer: Consumer, start: int, end: int, wait: float) -> Measurement:
        self.asked.append((start, end))
        return spent((end - start) / 1e9, complete=end <= self.settled)


def spent(seconds: float, *, complete: bool = True, gpu: float | None = None) -> Measurement:
    cpu = Energy({"cpu": seconds}, {"cpu": 0.5}, 1.0)
    devices = (
        Device("package-0", "cpu", "package-0", seconds, 0.5, 1.0, "measured"),
        Device("GPU-0", "gpu", "GPU 0", gpu, gpu, 1.0, "measured"),
    )
    how = {"cpu": "measured", "gpu": "measured"}
    return Measurement(seconds, cpu, cpu, cpu, devices, how, False, complete, "testhost")


def test_long_run_is_read_in_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, meter = ManualClock(), Pieces()
    start = clock.monotonic()

    def long(
        command: object, clock: ManualClock, *, on_start: Any, on_period: Any, period: int
    ) -> ChildExit:
        for _ in range(3):
            clock.advance(ns=period)
            on_period(Consumer(5, 5), start)
        clock.advance(1)
        return ChildExit(Consumer(5, 5), start, clock.monotonic(), 0, 0.5, False)

    monkeypatch.setattr(measure, "run_child", long)
    result = measure.measure(["sleep"], 1, meter, clock)
    edges = [
        start,
        start + 6 * SECOND,
        start + 16 * SECOND,
        start + 26 * SECOND,
        start + 31 * SECOND,
    ]
    assert meter.asked == list(itertools.pairwise(edges))
    assert result.last.command.joules == {"cpu": pytest.approx(31.0)}
    assert result.last.command.uncertainty == {"cpu": 0.5}
    assert result.last.coverage == 1.0

    # a piece that has not settled is asked about with the next
    meter = Pieces(settled=start)
    clock = ManualClock()
    measure.measure(["sleep"], 1, meter, clock)
    assert {begin for begin, _ in meter.asked} == {start}


def test_interrupt_while_waiting_keeps_the_known_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(Pieces):
        def read(self, consumer: Consumer, start: int, end: int, wait: float) -> Measurement:
            if wait:
                raise KeyboardInterrupt
            return super().read(consumer, start, end, wait)

    clock, meter = ManualClock(), Impatient()
    ended = ChildExit(Consumer(5, 5), clock.monotonic(), clock.advance(1).mono, 4, 0.5, False)
    monkeypatch.setattr(measure, "run_child", lambda *_, **__: ended)
    result = measure.measure(["sleep"], 5, meter, clock)
    assert len(result.runs) == 1
    assert result.last.command.joules == {"cpu": 1.0}


def test_lost_agent_costs_the_figures_only() -> None:
    class Gone(Pieces):
        def read(self, consumer: Consumer, start: int, end: int, wait: float) -> Measurement:
            raise AgentUnavailableError("No wattspan agent answers.")

    result = measure.measure(["sh", "-c", "exit 5"], 2, Gone(), SystemClock())
    assert [one.code for one in result.runs] == [5, 5]
    assert result.last.coverage == 0.0
    text = "\n".join(result_lines(result))
    assert "is not known" in text
    assert text.count("No wattspan agent answers.") == 1
    assert result.plain()["mean"]["command_joules"]["total"] is None


def test_figures_before_the_loss_of_the_agent_are_shown() -> None:
    one = a_run(spent(3.0, gpu=1.0))
    one.miss(SECOND, "No wattspan agent answers.")
    text = shown(one, notes=(one.trouble,))
    assert "Only 75.0% of the time" in text
    assert "≥ 3.00 J" in text
    assert "≥ 3.00 J" not in shown(a_run(spent(3.0, gpu=1.0)))
    assert "No wattspan agent answers." in text
    facts = one.plain()
    assert facts["command"]["certainty"] == {"cpu": "lower_bound"}
    assert {device["certainty"] for device in facts["devices"]} == {"lower_bound"}
    whole = a_run(spent(3.0, gpu=1.0)).plain()
    assert whole["command"]["certainty"] == {"cpu": "known"}
    assert {device["certainty"] for device in whole["devices"]} == {"known"}


@pytest.mark.parametrize("later", [True, False])
def test_device_that_a_restarted_agent_does_not_list_bounds_its_figures(later: bool) -> None:
    both = spent(2.0, gpu=5.0)
    energy = Energy({"cpu": 2.0, "gpu": 5.0}, {}, 1.0)
    both = both._replace(joules=energy, host=energy)
    alone = Energy({"cpu": 2.0}, {}, 1.0)
    without = both._replace(
        joules=alone, host=alone, devices=both.devices[:1], provenance={"cpu": "measured"}
    )
    run = a_run(both, without) if later else a_run(without, both)
    for sums in (run.command, run.host):
        assert sums.plain()["certainty"] == {"cpu": "known", "gpu": "lower_bound"}
    assert run.devices.certainty("GPU-0") == "lower_bound"
    assert run.devices.certainty("package-0") == "known"


def test_signal_before_the_start_reaches_the_command() -> None:
    class Hurried(SystemClock):
        def monotonic(self) -> int:
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL and not self.sent:
                self.sent = True
                signal.raise_signal(signal.SIGTERM)
            return super().monotonic()

        sent = False

    ended = measure.run_child(
        ["sleep", "1000"],
        Hurried(),
        on_start=lambda _: None,
        on_period=lambda *_: None,
        period=3600 * SECOND,
    )
    assert ended.code == 128 + signal.SIGTERM
    assert ended.interrupted


def test_signal_that_interrupts_no_wait_reaches_the_command_within_the_period() -> None:
    ended = run("sleep", "20", on_start=lambda _: receive_instead_of_main(signal.SIGTERM))
    assert ended.code == 128 + signal.SIGTERM
    assert ended.interrupted


def test_command_that_may_not_be_signalled_is_measured_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, number: int) -> None:  # as the kernel for a command of sudo
        (tmp_path / "refused").touch()
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    wait = f"while [ ! -e {tmp_path}/refused ]; do sleep 0.01; done; exit 3"
    ended = run("sh", "-c", wait, on_start=lambda _: receive_instead_of_main(signal.SIGTERM))
    assert (ended.code, ended.interrupted) == (3, True)


# ------------------------------------------------------------------------------------- the table


def a_run(*pieces: Measurement, **facts: Any) -> CommandRun:
    one = CommandRun(seconds=sum(piece.seconds for piece in pieces), cpu_seconds=0.25, **facts)
    for piece in pieces:
        one.add(piece)
    return one


def shown(*runs: CommandRun, notes: tuple[str, ...] = ()) -> str:
    return "\n".join(result_lines(MeasurementResult(["train", "a b"], runs, "a fake", notes)))


def test_table_shows_energy_uncertainty_power_and_provenance() -> None:
    text = shown(a_run(spent(2.0, gpu=50.0)))
    assert "Energy of `train 'a b'` on testhost:" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["cpu", "2.00", "J", "500", "mJ", "1.0", "W", "measured"] in rows
    assert ["gpu", "GPU", "0", "50.0", "J", "50.0", "J", "25.0", "W", "measured"] in rows
    assert "2.000 s elapsed, 0.250 s of CPU time" in text
    assert "EMULATED" not in text
    assert "stdev" not in text


def test_several_runs_show_mean_and_deviation() -> None:
    text = shown(a_run(spent(1.0)), a_run(spent(3.0), code=5))
    rows = [line.split() for line in text.splitlines()]
    assert ["cpu", "2.00", "J", "±70.7%", "500", "mJ", "1.0", "W", "measured"] in rows
    assert "2.000 s (±70.7%) elapsed, 0.250 s (±0.0%) of CPU time; means of 2 runs" in text
    assert "exit code 5" in text


def test_unknown_energy_is_a_dash() -> None:
    rows = [line.split() for line in shown(a_run(spent(2.0))).splitlines()]
    assert ["gpu", "GPU", "0", "-", "-", "-", "W", "measured"] in rows
    assert ["gpu", "-", "-", "-", "W", "measured"] in rows  # the command's
    assert rows.count(["together", "-", "-", "-", "W"]) == 2  # a sum is known if its parts are


def test_emulated_host_is_labelled() -> None:
    emulated = spent(1.0)._replace(emulated=True, provenance={"cpu": "emulated"})
    assert "EMULATED HOST: no figure is of real hardware" in shown(a_run(emulated))


def test_unmeasured_time_is_noted() -> None:
    half = Energy({"cpu": 1.0}, {}, 0.5)
    partial = spent(2.0, complete=False)._replace(joules=half)
    text = shown(a_run(partial), notes=("A note.",))
    assert "Only 50.0% of the time was measured" in text
    assert "had not settled" in text
    assert "A note." in text


def test_command_cannot_command_the_terminal() -> None:
    text = "\n".join(
        result_lines(MeasurementResult(["\x1b[31m" + "x" * 200], [a_run(spent(1.0))], "a fake"))
    )
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_undecodable_arguments_are_shown() -> None:
    result = MeasurementResult([os.fsdecode(b"\xff")], [a_run(spent(1.0))], "a fake")
    assert json.dumps(result.plain(), ensure_ascii=False).encode()
    assert "`'?'`" in "\n".join(result_lines(result))


def test_mean_is_unknown_unless_all_values_are_known() -> None:
    assert MeanAndDeviation.of([1.0, 3.0]) == MeanAndDeviation(2.0, pytest.approx(2**0.5))
    assert MeanAndDeviation.of([1.0]) == MeanAndDeviation(1.0, None)
    assert (
        MeanAndDeviation.of([1.0, None]) == MeanAndDeviation.of([]) == MeanAndDeviation(None, None)
    )


def test_consecutive_periods_add_up_with_the_largest_uncertainty() -> None:
    whole = EnergySum()
    whole.include(Energy({"cpu": 1.0}, {"cpu": 0.3}, 1.0), 2.0)
    whole.include(Energy({"cpu": 2.0, "gpu": 5.0}, {"cpu": 0.1, "gpu": 1.0}, 0.5), 2.0)
    assert whole.joules == {"cpu": 3.0, "gpu": 5.0}
    assert whole.uncertainty == {"cpu": 0.3, "gpu": 1.0}
    assert whole.coverage(4.0) == 0.75


@pytest.mark.parametrize("first", [True, False])
def test_sum_with_a_period_of_unknown_energy_is_a_lower_bound(first: bool) -> None:
    whole = EnergySum()
    periods = [
        Energy({"cpu": 1.0}, {}, 0.0, unknown=["gpu"]),
        Energy({"cpu": 1.0, "gpu": 5.0}, {}, 1.0),
    ]
    for period in periods if first else reversed(periods):
        whole.include(period, 10.0)
    assert whole.plain()["certainty"] == {"cpu": "known", "gpu": "lower_bound"}
    never = EnergySum()
    never.include(periods[0], 10.0)
    assert never.plain()["certainty"] == {"cpu": "known", "gpu": "unknown"}


def test_idle_energy_is_shown_or_noted_as_unknown() -> None:
    told = spent(10.0, gpu=5.0)
    known = tuple(device._replace(idle=2.0) for device in told.devices)
    rows = [line.split() for line in shown(a_run(told._replace(devices=known))).splitlines()]
    assert ["of", "these", "idle", "4.00", "J"] in rows
    lost = told.devices[1]._replace(joules=None, coverage=0.0)
    rows = [x.split() for x in shown(a_run(told._replace(devices=(known[0], lost)))).splitlines()]
    assert ["of", "these", "idle", "≥", "2.00", "J"] in rows
    half = (known[0], told.devices[1])
    table = shown(a_run(told._replace(devices=half)))
    assert "of these idle" not in table
    assert "Idle power of GPU 0 is unknown (baseline_unknown)" in table


# ------------------------------------------------------------------------------------- warnings


def test_spans_that_are_off_for_the_measurement_are_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(tmp_path))
    config = tmp_path / "config.toml"
    config.write_text('[autotune]\nmode = "advise"\n')
    done = CliRunner().invoke(cli, ["measure", "--config", str(config), "--", "true"])
    assert "decline" not in done.stderr
    config.write_text('[autotune]\nmode = "advise"\n[spans]\nenabled = false\n')
    done = CliRunner().invoke(cli, ["measure", "--config", str(config), "--", "true"])
    assert "the tuner will decline every job" in done.stderr
