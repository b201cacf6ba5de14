"""`wattspan doctor --acceptance`: each test of a host, on counters, loads and limits made here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from wattspan.cli import cli
from wattspan.cli.doctor import Finding, Severity, note, warning
from wattspan.cli.doctor.acceptance import (
    hypervisor_name,
    kernel_version,
    limit_checks,
    report,
)
from wattspan.cli.doctor.acceptance.checks import (
    IDLE,
    LOADS,
    SENSORS,
    SOURCES,
    STEPS,
    Check,
    device_labels,
    diagnosis,
)
from wattspan.cli.doctor.acceptance.counters import CounterTests, Periods
from wattspan.cli.doctor.acceptance.loads import LoadResult, load_checks, run_loads
from wattspan.clock import SystemClock
from wattspan.model import (
    MILLISECOND,
    SECOND,
    CapKey,
    Consumer,
    Domain,
    Failure,
    GpuStatus,
    HwType,
    Knob,
    KnobState,
    Microjoules,
    Provenance,
    Reading,
    Trouble,
)
from wattspan.ports import ActuatorError, Batch, CounterSource, SourceError
from wattspan.sdk.client import Energy, Measurement
from wattspan.testing import ManualClock

CPU = Domain("cpu:0", HwType.CPU, "package-0 of host-of-alice", "moving", Provenance.MEASURED)
GPU = Domain("gpu:GPU-1234", HwType.GPU, "NVIDIA H100 0", "moving", Provenance.MEASURED)


@dataclass
class Board:
    """A device whose counter moves in steps; ``watts`` while it is closed and while it is open."""

    domain: Domain
    watts: tuple[float, float] = (50.0, 50.0)
    step: int = 100 * MILLISECOND
    energy: float = 0.0
    at: int = 0
    utilisation: float = 0.0
    integrated: float = 1.0  # of the counter's energy
    disagrees: bool | None = False
    late: int = 0  # the time from opening to the first reading

    def move(self, now: int, *, opened: bool) -> Microjoules:
        whole = now // self.step * self.step
        if self.at and whole > self.at:
            self.energy += self.watts[opened] * (whole - self.at) / 1000
        self.at = max(self.at, whole)
        return Microjoules(round(self.energy))


@dataclass
class Host:
    """Boards of one source; it is open while ``users`` is not 0."""

    boards: list[Board]
    clock: ManualClock = field(default_factory=ManualClock)
    users: int = 0
    opened: int = 0
    failures: tuple[Failure, ...] = ()
    lost: str = ""  # a board without readings
    paced: bool = False

    def open(self, name: str) -> CounterSource | Finding:
        if name != "moving":
            return note("nothing to read", f"no {name} here")
        self.read()
        self.users += 1
        self.opened += 1
        return PacedBoards(self) if self.paced else Source(self)

    def read(self) -> Batch:
        now = self.clock.now()
        return Batch(
            tuple(board.domain for board in self.boards),
            tuple(
                Reading(board.domain.id, now, board.move(now.mono, opened=self.users > 0))
                for board in self.boards
                if board.domain.id != self.lost
            ),
            self.failures,
            gpus=tuple(
                GpuStatus(
                    board.domain.id,
                    now,
                    utilisation=board.utilisation,
                    integrated_energy=Microjoules(round(board.energy * board.integrated)),
                    counter_energy=Microjoules(round(board.energy)),
                    energy_disagrees=board.disagrees,
                    energy_basis="counter",
                    model="H100",
                    driver="580.1",
                )
                for board in self.boards
                if board.domain.hw_type is HwType.GPU
            ),
        )

    def tests(self, *names: str) -> tuple[CounterTests, list[Check]]:
        told: list[int] = []
        tests = CounterTests(self.open, names or ("moving", "rapl"), self.clock, told.append)
        checks = tests.run()
        periods = Periods()
        assert sum(told) >= periods.idle + periods.open + periods.steps
        return tests, checks


@dataclass
class Source:
    host: Host
    name: str = "moving"

    def read(self) -> Batch:
        return self.host.read()

    def close(self) -> None:
        self.host.read()
        self.host.users -= 1


@dataclass
class PacedBoards(Source):
    """A source whose thread samples at a pace, between reads too."""

    interval: int = SECOND

    def __post_init__(self) -> None:
        self.began = self.sampled = self.host.clock.monotonic()

    def pace(self, interval: int) -> None:
        self.interval = interval
        self.sampled = self.host.clock.monotonic() - interval

    def integrates_power(self) -> bool:
        return False

    def read(self) -> Batch:
        now, readings = self.host.clock.now(), []
        while self.sampled + self.interval <= now.mono:
            self.sampled += self.interval
            at = now.before(now.mono - self.sampled)
            readings += [
                Reading(board.domain.id, at, board.move(at.mono, opened=True))
                for board in self.host.boards
                if at.mono - self.began >= board.late
            ]
        return Batch(tuple(board.domain for board in self.host.boards), tuple(readings))


def only(checks: Iterable[Check], test: str, device: str = "") -> Check:
    (found,) = [one for one in checks if one.test == test and one.device.startswith(device)]
    return found


# ----------------------------------------------------------------------------------- counters


def test_idle_power_is_told_without_and_with_open_sources() -> None:
    host = Host([Board(CPU, watts=(40.0, 40.5)), Board(GPU, watts=(70.0, 70.5))])
    _, checks = host.tests()
    cpu, gpu = only(checks, IDLE, "cpu 0"), only(checks, IDLE, "gpu 0")
    assert cpu.figures["closed_watts"] == pytest.approx(40.0, rel=0.01)
    assert cpu.figures["open_watts"] == pytest.approx(40.5, rel=0.01)
    assert gpu.figures["open_watts"] == pytest.approx(70.5, rel=0.01)
    assert (cpu.finding.mark, gpu.finding.mark) == (Severity.OK, Severity.OK)
    assert host.users == 0


def test_board_that_the_agent_wakes_is_a_warning() -> None:
    _, checks = Host([Board(GPU, watts=(35.0, 70.0))]).tests()
    found = only(checks, IDLE)
    assert found.finding.mark is Severity.WARN
    assert "raises" in found.finding.detail


def test_busy_board_is_not_blamed_on_the_agent() -> None:
    _, checks = Host([Board(GPU, watts=(35.0, 300.0), utilisation=0.9)]).tests()
    assert only(checks, IDLE).finding.mark is Severity.OK


def test_power_of_a_closed_board_without_a_counter_is_unknown() -> None:
    derived = replace(GPU, provenance=Provenance.DERIVED)
    _, checks = Host([Board(derived)]).tests()
    found = only(checks, IDLE)
    assert found.finding.mark is Severity.NOTE
    assert found.figures["closed_watts"] is None


def test_estimate_is_not_tested() -> None:
    model = replace(CPU, provenance=Provenance.ESTIMATED)
    _, checks = Host([Board(model)]).tests("moving")
    assert checks == []


def test_steps_of_each_counter_are_measured() -> None:
    host = Host([Board(CPU, step=MILLISECOND), Board(GPU, step=100 * MILLISECOND)])
    _, checks = host.tests()
    cpu, gpu = only(checks, STEPS, "cpu 0"), only(checks, STEPS, "gpu 0")
    assert cpu.figures["step_ms"] == pytest.approx(1.0)
    assert gpu.figures["step_ms"] == pytest.approx(100.0)
    assert gpu.figures["phase_ms"] == pytest.approx(0.0, abs=0.3)
    assert gpu.figures["least_microjoules"] == 5_000_000
    assert {cpu.finding.mark, gpu.finding.mark} == {Severity.OK}


def test_counter_that_stands_still_fails() -> None:
    _, checks = Host([Board(CPU, step=3600 * SECOND)]).tests()
    assert only(checks, STEPS).finding.mark is Severity.FAIL
    assert diagnosis(checks, emulated=False).readable == 0


@pytest.mark.parametrize(("disagrees", "mark"), [(True, Severity.WARN), (False, Severity.OK)])
def test_sensor_is_compared_with_the_counter(disagrees: bool, mark: Severity) -> None:
    _, checks = Host([Board(GPU, integrated=0.5, disagrees=disagrees)]).tests()
    found = only(checks, SENSORS)
    assert found.figures["sensor_by_counter"] == pytest.approx(0.5, abs=0.01)
    assert found.finding.mark is mark


def test_host_without_counters_is_told_at_once() -> None:
    host = Host([])
    tests = CounterTests(host.open, ("rapl",), host.clock, lambda _: None)
    before = host.clock.monotonic()
    with pytest.raises(SourceError, match="No energy counter"):
        tests.run()
    assert host.clock.monotonic() == before


def test_source_without_figures_is_told_without_its_reason() -> None:
    trouble = Failure("moving", "/srv/alice/x", Trouble.DENIED, "it is of alice", "Ask root.")
    host = Host([Board(CPU), Board(GPU)], failures=(trouble,), lost=GPU.id)
    _, checks = host.tests("moving", "rapl")
    opened, denied = only(checks, SOURCES, "rapl"), only(checks, SOURCES, "moving")
    assert opened.finding == note("rapl: nothing to read", "no rapl here")
    assert opened.plain()["figures"] == {"opened": False}
    assert denied.finding.mark is Severity.FAIL
    assert denied.finding.remedy == "Ask root."
    assert denied.plain()["figures"] == {"opened": True, "trouble": Trouble.DENIED}
    assert "alice" not in json.dumps([one.plain() for one in checks])
    assert only(checks, IDLE, "cpu 0").figures["closed_watts"] == pytest.approx(50.0, rel=0.01)


@pytest.mark.parametrize("calls", ["read", "late read", "pace", "close"])
def test_source_that_raises_is_a_failure_beside_the_others(calls: str) -> None:
    class Raising(PacedBoards):
        """A plugin at fault, at a rest or at a fine pace."""

        def read(self) -> Batch:
            fine = self.interval < SECOND
            if calls == "read" or (calls == "late read" and fine):
                raise ValueError("the bus of alice")
            return super().read()

        def pace(self, interval: int) -> None:
            super().pace(interval)
            if calls == "pace":
                raise ValueError("no such pace")

        def close(self) -> None:
            super().close()
            if calls == "close":
                raise OSError("no such handle")

    other = Host([Board(CPU)])
    bad = Host([Board(replace(GPU, source="bad"))], clock=other.clock)
    sources = {"moving": lambda: other.open("moving"), "bad": lambda: Raising(bad)}
    tests = CounterTests(lambda name: sources[name](), [*sources], other.clock, lambda _: None)
    checks = tests.run()
    assert only(checks, IDLE, "cpu 0").finding.mark is Severity.OK
    assert only(checks, STEPS, "cpu 0").finding.mark is Severity.OK
    failed = [one for one in checks if one.test == SOURCES]
    if "read" in calls:
        (found,) = failed
        assert found.finding.mark is Severity.FAIL
        assert "it raised ValueError" in found.finding.detail
        assert found.plain()["figures"] == {"opened": True, "trouble": Trouble.MALFORMED}
    else:
        assert failed == []
    assert "alice" not in json.dumps([one.plain() for one in checks])


def test_slow_board_beside_a_fast_one_has_its_power_while_closed() -> None:
    host = Host([Board(CPU), Board(GPU, late=1500 * MILLISECOND)], paced=True)
    _, checks = host.tests("moving")
    for device in ("cpu 0", "gpu 0"):
        found = only(checks, IDLE, device).figures
        assert found["closed_watts"] == pytest.approx(50.0, rel=0.01)


def test_steps_of_a_board_that_waited_for_its_turn_are_its_own() -> None:
    first = Host([Board(CPU)], paced=True)
    hosts = {"first": first, "second": Host([Board(GPU)], clock=first.clock, paced=True)}
    tests = CounterTests(
        lambda name: hosts[name].open("moving"), [*hosts], first.clock, lambda _: None
    )
    checks = tests.run()
    for device in ("cpu 0", "gpu 0"):
        found = only(checks, STEPS, device).figures
        assert found["step_ms_most"] == found["step_ms_least"] == pytest.approx(100.0)


# -------------------------------------------------------------------------------------- loads


def measured(energy: dict[str, float], host: float = 100.0) -> Measurement:
    return Measurement(
        20.0,
        Energy(energy, dict.fromkeys(energy, 0.001), 1.0),
        Energy(energy, {}, 1.0),
        Energy({"cpu": host}, {}, 1.0),
        (),
        {"cpu": "measured"},
        emulated=False,
        complete=True,
        host_name="host-of-alice",
    )


def results(*energies: dict[str, float]) -> list[LoadResult]:
    """Of a full and a half load of 20 s."""
    used = zip((1.0, 0.5), (20.0, 10.0), energies, strict=True)
    return [LoadResult(duty, seconds, measured(energy)) for duty, seconds, energy in used]


class Recorder:
    """A client that notes the consumers that it is asked about."""

    about = note = ""

    def __init__(self) -> None:
        self.watched: list[Consumer] = []
        self.read_later: list[Consumer] = []

    def watch(self, consumer: Consumer) -> None:
        self.watched.append(consumer)

    def read(self, consumer: Consumer, start: int, end: int, wait: float) -> Measurement:
        self.read_later.append(consumer)
        assert end > start
        return measured({"cpu": 1.0})


def test_loads_are_two_processes_that_work_and_end() -> None:
    client = Recorder()
    found = run_loads(client, SystemClock(), lambda _: None, 200 * MILLISECOND)
    assert [one.duty for one in found] == [1.0, 0.5]
    assert all(one.cpu_seconds > 0 for one in found)
    assert client.watched == client.read_later
    assert len(set(client.watched)) == 2
    assert not [one for one in client.watched if Path(f"/proc/{one.pid}").exists()]


@pytest.mark.parametrize(
    ("energies", "mark"),
    [
        ((40.0, 20.0), Severity.OK),
        ((40.0, 23.0), Severity.OK),
        ((40.0, 50.0), Severity.WARN),
        ((200.0, 100.0), Severity.FAIL),
    ],
)
def test_loads_of_equal_work_have_equal_costs(
    energies: tuple[float, float], mark: Severity
) -> None:
    *_, both = load_checks(results(*({"cpu": one} for one in energies)))
    assert both.finding.mark is mark


def test_loads_with_large_errors_are_not_judged() -> None:
    uncertain = Energy({"cpu": 30.0}, {"cpu": 30.0}, 1.0)
    found = [one._replace(measured=one.measured._replace(joules=uncertain))
             for one in results({"cpu": 1.0}, {"cpu": 1.0})]  # fmt: skip
    *_, both = load_checks(found)
    assert both.finding.mark is Severity.NOTE
    assert "not judged" in both.finding.detail


def test_loads_without_a_cpu_counter_have_no_energy() -> None:
    checks = list(load_checks(results({}, {})))
    assert [one.finding.mark for one in checks] == [Severity.NOTE, Severity.NOTE]
    assert checks[0].figures["joules"] is None


# ------------------------------------------------------------------------- limits and report


def test_limits_are_read_and_their_faults_told() -> None:
    key = CapKey(Knob.GPU_POWER, GPU.id)
    states = [
        KnobState(key, "NVIDIA H100 0", minimum=200_000, requested=700_000),
        KnobState(replace_device(key, "gpu:GPU-5678"), "NVIDIA H100 1"),
        ActuatorError("No limit of /srv/alice/x can be read. Ask root.", Trouble.DENIED),
    ]
    left = [warning("limits left", "at /srv/alice/state")]
    checks = list(limit_checks(states, left, device_labels([GPU])))
    assert [one.device for one in checks] == ["gpu_power gpu 0", "gpu_power 1", "limit 2", "left"]
    assert [one.finding.mark for one in checks] == [
        Severity.OK,
        Severity.NOTE,
        Severity.NOTE,
        Severity.WARN,
    ]
    assert checks[0].figures["requested"] == 700_000


def replace_device(key: CapKey, device: str) -> CapKey:
    return CapKey(key.knob, device)


def test_report_names_no_person_host_file_or_serial_number(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("model name\t: AMD EPYC 9654\nflags\t: fpu\n")
    tests, checks = Host([Board(CPU), Board(GPU)]).tests()
    checks += load_checks(results({"cpu": 40.0}, {"cpu": 20.0}))
    error = ActuatorError("No limit of /srv/alice/x can be read. Ask root.", Trouble.DENIED)
    checks += limit_checks([error], [warning("left", "/srv/alice/state")], tests.labels)
    text = json.dumps(report(checks, tests.gpus.values(), tmp_path))
    document = json.loads(text)
    assert document["cpu"] == "AMD EPYC 9654"
    assert document["gpus"] == [{"model": "H100", "driver": "580.1"}]
    assert {one["test"] for one in document["checks"]} >= {IDLE, STEPS, SENSORS, LOADS}
    assert not [word for word in ("alice", "1234", "/srv", GPU.id) if word in text]


def test_report_has_no_text_of_a_kernel_or_a_firmware() -> None:
    assert kernel_version("6.18.44-alice-lab7") == "6.18.44"
    assert kernel_version("alice") == "other"
    assert hypervisor_name("Amazon EC2") == "Amazon"
    assert hypervisor_name("lab of alice") == "other"
    assert hypervisor_name("") == ""


def test_output_without_acceptance_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["doctor", "--output", str(tmp_path / "report.json")])
    assert done.exit_code == 2
    assert "--acceptance" in done.output
