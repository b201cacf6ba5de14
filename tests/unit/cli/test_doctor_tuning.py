"""Findings of doctor on actuators, the capper, and limits left by an earlier capper."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import msgspec
import pytest
from testbed.fake_actuators import ENFORCED, KnobNvml
from testbed.fake_nvml import FakeGpu
from testbed.query_server import QueryServer

from wattspan.capper.host_directory import HostClaim
from wattspan.capper.journal import Journal, JournalEntry
from wattspan.capper.protocol import KnobRow, RefusalReason, RefusedReply, StateReply
from wattspan.cli.doctor import Finding, Severity
from wattspan.cli.doctor.sources import EmptyProcessDirectory
from wattspan.cli.doctor.tuning import examine_tuning
from wattspan.config import (
    AgentSettings,
    AutotuneSettings,
    CapsSettings,
    Config,
    FleetSettings,
    TunedJobSettings,
)
from wattspan.config.tables import FixedCapSettings
from wattspan.emulation.powercap_tree import LAYOUTS, PowercapTree
from wattspan.model import Domain, HwType, Knob, Provenance, TuningAccounts
from wattspan.model.settings import Table
from wattspan.ports import SourceContext
from wattspan.testing import ManualClock
from wattspan.tuning.declared_jobs import MissingJobs

W = 1000
GPU = "gpu:GPU-a"
BOOT = "4a6b1c52-0000-4000-8000-000000000000"
EVERYTHING = "0000003fffffffff"
POWER = "gpu_power NVIDIA H100 80GB HBM3 0"


class Host:
    """A host with one GPU, two packages, a boot, and a user with or without rights."""

    def __init__(self, folder: Path, *, rights: str = "0") -> None:
        self.folder, self.clock = folder, ManualClock()
        self.gpu = FakeGpu("GPU-a")
        self.gpu.limits[ENFORCED] = 700_000
        self.nvml: KnobNvml | None = KnobNvml(self.clock, self.gpu)
        self.root = folder / "root"
        (self.root / "proc/self").mkdir(parents=True)
        (self.root / "proc/self/status").write_text(f"CapEff:\t{rights}\n")
        (self.root / "proc/sys/kernel/random").mkdir(parents=True)
        (self.root / "proc/sys/kernel/random/boot_id").write_text(f"{BOOT}\n")
        self.sysfs = folder / "sys"
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.autotune, self.caps = AutotuneSettings(mode="advise"), CapsSettings()
        self.fleet = FleetSettings()
        self.host_dir = folder / "host"

    def told(self, *more: Domain) -> dict[str, Finding]:
        config = Config(
            agent=AgentSettings(run_dir=str(self.run_dir), state_dir=str(self.folder / "state")),
            autotune=self.autotune,
            caps=msgspec.structs.replace(self.caps, host_dir=str(self.host_dir)),
            fleet=self.fleet,
        )
        context = SourceContext(
            self.clock,
            EmptyProcessDirectory(),
            emulated=self.nvml is None,
            nvml=self.nvml,
            sysfs=self.sysfs,
        )
        board = Domain(GPU, HwType.GPU, "GPU a", "nvml", Provenance.MEASURED)
        found = examine_tuning(config, context, (board, *more), self.root)
        return {finding.what: finding for finding in found}

    def journal(self, *entries: JournalEntry, boot: str = BOOT) -> Path:
        directory = self.folder / "state" / "capper"
        directory.mkdir(parents=True, exist_ok=True)
        journal = Journal(directory, boot)
        journal.save({entry.key: entry for entry in entries})
        return journal.path


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@contextmanager
def answering(
    host: Host, answer: StateReply | RefusedReply, path: Path | None = None
) -> Iterator[None]:
    """A capper that says the same to everything, by default beside the host's agent."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path or host.run_dir / "capper.sock"))
        listener.listen()

        def answer_all() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as requests:
                for _ in requests:
                    connection.sendall(msgspec.json.encode(answer) + b"\n")

        thread = threading.Thread(target=answer_all)
        thread.start()
        yield
        thread.join()


def row(**changes: object) -> KnobRow:
    told: dict[str, object] = {
        "knob": Knob.GPU_POWER,
        "device": GPU,
        "name": "NVIDIA H100 80GB HBM3 0",
        "requested": 700 * W,
        "enforced": 700 * W,
    }
    return KnobRow(**(told | changes))  # type: ignore[arg-type]


def state(*rows: KnobRow) -> StateReply:
    return StateReply(rows=list(rows), lease=10**10, pid=4711)


# -------------------------------------------------------------------------------------- tuning


def test_disabled_tuning_names_its_setting(host: Host) -> None:
    host.autotune = AutotuneSettings()
    finding = host.told()["tuning"]
    assert (finding.mark, finding.detail) == (Severity.NOTE, 'off: [autotune] mode = "off"')
    assert 'mode = "advise"' in finding.remedy


def test_enabled_tuning_is_listed(host: Host) -> None:
    host.autotune = AutotuneSettings(
        mode="apply", job=(TunedJobSettings(service="trainer", span="step"),)
    )
    finding = host.told()["tuning"]
    assert (finding.mark, finding.detail) == (Severity.OK, "apply, 5% slower at most, for trainer")


@pytest.mark.parametrize(("found", "mark"), [(True, Severity.OK), (False, Severity.WARN)])
def test_applying_to_no_job_is_warned_of(found: bool, mark: Severity, host: Host) -> None:
    host.autotune = AutotuneSettings(mode="apply", apply_found=found)
    assert host.told()["tuning"].mark is mark


# --------------------------------------------------------------------------------------- knobs


def test_actuator_is_listed_with_its_range(host: Host) -> None:
    finding = host.told()[POWER]
    assert finding == Finding(Severity.OK, POWER, "700 W now, 200 W at least, 700 W at most")


def test_mig_instance_has_no_knob_of_its_own(host: Host) -> None:
    instance = Domain(
        "gpu:MIG-1", HwType.GPU, "1g.10gb 1", "nvml", Provenance.ESTIMATED, False, parent=GPU
    )
    assert host.told(instance) == host.told()


def test_device_of_a_sensor_has_no_knob_with_the_reason(host: Host) -> None:
    card = Domain("hwmon:xe/card", HwType.GPU, "card", "hwmon", Provenance.MEASURED)
    found = host.told(card)
    assert found["gpu_power"].detail == (
        "Cannot set the gpu_power of card: a sensor measures it, and no library or file of its"
        " driver sets it."
    )
    assert POWER in found


def test_tuning_checks_write_nothing(host: Host) -> None:
    host.told()
    assert host.nvml is not None
    assert [call for call in host.nvml.calls if "Set" in call] == []
    assert not (host.folder / "state").exists()


def test_externally_set_limit_is_listed(host: Host) -> None:
    host.gpu.limits[ENFORCED] = 500_000
    assert host.told()[POWER].detail.endswith("500 W enforced")


def test_knob_that_was_not_chosen_is_only_noted(host: Host) -> None:
    finding = host.told()["gpu_clock NVIDIA H100 80GB HBM3 0"]
    assert finding.mark is Severity.NOTE
    assert finding.detail.endswith("not in [autotune] knobs")


@pytest.mark.parametrize(("mode", "mark"), [("off", Severity.NOTE), ("advise", Severity.WARN)])
def test_missing_actuator_is_a_finding_if_configured(mode: str, mark: Severity, host: Host) -> None:
    host.nvml = None
    host.autotune = AutotuneSettings(mode=mode)  # type: ignore[arg-type]
    found = host.told()
    assert found["gpu_power"].mark is mark
    assert found["gpu_clock"].mark is Severity.NOTE
    assert found["cpu_power"].detail == "no CPU package here has a long-term power limit"


def test_unreadable_actuator_is_reported_with_the_cause(host: Host) -> None:
    host.nvml.errors["nvmlDeviceGetPowerManagementLimit"] = 3  # NVML_ERROR_NOT_SUPPORTED
    finding = host.told()["gpu_power"]
    assert finding.mark is Severity.WARN
    assert "NVIDIA H100" in finding.detail


def test_cpu_packages_are_listed(host: Host) -> None:
    tree = PowercapTree(host.sysfs, LAYOUTS["xeon-2s"], cpus=2)
    try:
        host.autotune = AutotuneSettings(mode="advise", knobs=(Knob.CPU_POWER,))
        found = host.told()
    finally:
        tree.close()
    assert found["cpu_power package-0"].mark is Severity.OK
    assert "W at most" in found["cpu_power package-1"].detail


# -------------------------------------------------------------------------------------- capper


def test_responding_capper_is_listed_with_its_leases(host: Host) -> None:
    with answering(host, state(row(holder="trainer/step"))):
        found = host.told()
    assert found["capper"].mark is Severity.OK
    assert found["capper"].detail.endswith("(pid 4711); 1 cap is held")
    assert found[POWER].detail.endswith("held by trainer/step")


def test_write_failure_is_reported_with_the_capper_message(host: Host) -> None:
    with answering(host, state(row(usable=False, trouble="the register is locked"))):
        finding = host.told()[POWER]
    assert finding.mark is Severity.WARN
    assert finding.detail.endswith("the register is locked")


@pytest.mark.parametrize(
    ("imposed", "mark"),
    [
        (CapsSettings(), Severity.NOTE),
        (CapsSettings(fixed=(FixedCapSettings(device="0", watts=400),)), Severity.WARN),
        (CapsSettings(fixed=(FixedCapSettings(device="7", watts=400),)), Severity.NOTE),
        (CapsSettings(budget_watts=900), Severity.WARN),
    ],
)
def test_write_failure_of_an_imposed_limit_is_a_warning_without_a_tuned_knob(
    imposed: CapsSettings, mark: Severity, host: Host
) -> None:
    host.autotune, host.caps = AutotuneSettings(knobs=(Knob.GPU_CLOCK,)), imposed
    with answering(host, state(row(usable=False, trouble="It is read-only."))):
        finding = host.told()[POWER]
    assert finding.mark is mark
    assert "It is read-only." in finding.detail


def test_limit_that_somebody_else_set_is_warned_of(host: Host) -> None:
    with answering(host, state(row(foreign=True))):
        finding = host.told()[POWER]
    assert finding.mark is Severity.WARN
    assert "another program has set it" in finding.detail


def test_unauthorized_user_is_reported(host: Host) -> None:
    refused = RefusedReply(reason=RefusalReason.NOT_ALLOWED, sentence="User 1000 may not ask.")
    with answering(host, refused):
        finding = host.told()["capper"]
    assert finding.mark is Severity.WARN
    assert "User 1000 may not ask." in finding.detail
    assert "[caps] users" in finding.remedy


def test_stopped_capper_is_a_warning_with_the_restart_command(
    host: Host,
) -> None:
    host.caps = CapsSettings(budget_watts=1500)
    units = host.root / "run/systemd/system"
    units.mkdir(parents=True)
    (units / "wattspan-capper.socket").touch()
    suspended = msgspec.structs.replace(state(row()), suspended=True)
    with answering(host, suspended):
        finding = host.told()["capper"]
    assert finding.mark is Severity.WARN
    assert "(pid 4711); `wattspan caps restore` has restored" in finding.detail
    assert "no budget or fixed cap is in force" in finding.detail
    assert "`systemctl restart wattspan-capper` as root" in finding.remedy


def test_stopped_capper_without_units_names_its_starter(host: Host) -> None:
    suspended = msgspec.structs.replace(state(), suspended=True)
    with answering(host, suspended):
        finding = host.told()["capper"]
    assert (finding.mark, "systemctl" in finding.remedy) == (Severity.WARN, False)
    assert "or the agent that started it" in finding.remedy


def test_missing_capper_is_no_finding_if_unneeded(host: Host) -> None:
    finding = host.told()["capper"]
    assert (finding.mark, finding.remedy) == (Severity.NOTE, "")


@pytest.mark.parametrize(
    "settings",
    [
        {"autotune": AutotuneSettings(mode="apply", apply_found=True)},
        {"caps": CapsSettings(budget_watts=500)},
        {"caps": CapsSettings(budget_file="/run/ceiling.toml")},
        {"fleet": FleetSettings(endpoints=("http://etcd",))},
    ],
)
def test_capper_that_is_needed_and_not_there_is_warned_of(
    settings: dict[str, Table], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    vars(host).update(settings)
    finding = host.told()["capper"]
    assert finding.mark is Severity.WARN
    assert "CAP_SYS_ADMIN is missing" in finding.detail
    assert "`wattspan capper` as root" in finding.remedy


def test_capper_started_by_the_agent_is_no_finding(tmp_path: Path) -> None:
    host = Host(tmp_path, rights=EVERYTHING)
    host.autotune = AutotuneSettings(mode="apply", apply_found=True)
    finding = host.told()["capper"]
    assert finding.mark is Severity.OK
    assert "the agent starts one" in finding.detail


@pytest.mark.parametrize(("user", "rights"), [(1000, "0"), (0, EVERYTHING)])
def test_missing_capper_names_the_systemd_unit_if_installed(
    user: int, rights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    host = Host(tmp_path, rights=rights)
    host.caps = CapsSettings(budget_watts=500)
    units = host.root / "run/systemd/system"
    units.mkdir(parents=True)
    (units / "wattspan-capper.socket").touch()
    finding = host.told()["capper"]
    assert finding.mark is Severity.WARN
    assert "`systemctl enable --now wattspan-capper.socket` as root" in finding.remedy
    assert "the agent starts one" not in finding.detail


def test_emulated_capper_is_started_by_the_agent_despite_units(tmp_path: Path) -> None:
    host = Host(tmp_path, rights=EVERYTHING)
    host.nvml = None
    host.caps = CapsSettings(budget_watts=500)
    units = host.root / "run/systemd/system"
    units.mkdir(parents=True)
    (units / "wattspan-capper.socket").touch()
    assert "the agent starts one" in host.told()["capper"].detail


def test_socket_that_was_left_behind_is_not_taken_for_a_capper(host: Host) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(host.run_dir / "capper.sock"))
    finding = host.told()["capper"]
    assert "no process listens" in finding.detail


@contextmanager
def another_agents_capper(
    host: Host, answer: StateReply | RefusedReply | None = None
) -> Iterator[Path]:
    """The host's capper, of an agent with another run directory; silent without an ``answer``."""
    path = host.folder / "other.sock"
    claim = HostClaim(host.host_dir)
    claim.publish(path, host.folder / "journal")
    with answering(host, answer, path) if answer is not None else nullcontext():
        yield path
    claim.release()


def test_capper_of_another_agent_is_found_and_named(host: Host) -> None:
    with another_agents_capper(host, state(row())) as path:
        finding = host.told()["capper"]
    assert finding.mark is Severity.OK
    assert finding.detail.startswith(
        f"answers at {path} (pid 4711), the capper of another agent of this host; 0 caps"
    )


def test_limits_that_another_agents_capper_does_not_impose_are_warned_of(host: Host) -> None:
    host.caps = CapsSettings(budget_watts=500)
    with another_agents_capper(host, state(row())):
        finding = host.told()["capper"]
    assert finding.mark is Severity.WARN
    assert "the power budget of this configuration are not in force" in finding.detail
    assert "Put them into the configuration of that agent" in finding.remedy


def test_refusal_by_another_agents_capper_names_its_configuration(host: Host) -> None:
    refused = RefusedReply(reason=RefusalReason.NOT_ALLOWED, sentence="User 1000 may not ask.")
    with another_agents_capper(host, refused):
        finding = host.told()["capper"]
    assert finding.mark is Severity.WARN
    assert "in the configuration of that agent" in finding.remedy


def test_silent_capper_of_another_agent_is_named_with_its_process(host: Host) -> None:
    host.autotune = AutotuneSettings(mode="apply", apply_found=True)
    with another_agents_capper(host) as path:
        finding = host.told()["capper"]
    assert finding.mark is Severity.WARN
    assert f"Process {os.getpid()} is the capper of this host, answers on {path}" in finding.remedy


def test_host_directory_that_others_can_write_is_a_warning(host: Host) -> None:
    assert "host directory" not in host.told()
    host.host_dir.mkdir()
    host.host_dir.chmod(0o777)
    finding = host.told()["host directory"]
    assert finding.mark is Severity.WARN
    assert "can be written by other users" in finding.detail


# --------------------------------------------------------------------------------- left behind

ENTRY = JournalEntry(
    knob=Knob.GPU_POWER, device=GPU, name="GPU a", original=700 * W, value=560 * W, written=True
)


def test_journal_without_a_capper_fails_with_the_remedy(host: Host) -> None:
    host.journal(ENTRY)
    finding = host.told()["left behind"]
    assert finding.mark is Severity.FAIL
    assert "gpu_power of GPU a" in finding.detail
    assert "`wattspan caps restore`" in finding.remedy


def test_imposed_limit_without_a_capper_is_a_warning_of_its_own(host: Host) -> None:
    host.journal(msgspec.structs.replace(ENTRY, imposed=560 * W))
    told = host.told()
    assert "left behind" not in told
    finding = told["imposed limits"]
    assert finding.mark is Severity.WARN
    assert "gpu_power of GPU a" in finding.detail
    assert "lift" in finding.remedy


def test_journal_of_an_emulated_host_is_left_behind_as_well(host: Host) -> None:
    host.journal(ENTRY, boot=f"{BOOT} one")
    assert "gpu_power of GPU a" in host.told()["left behind"].detail


@pytest.mark.parametrize("caps", [CapsSettings(), CapsSettings(budget_watts=500)])
def test_limits_left_by_a_capper_are_a_finding(caps: CapsSettings, tmp_path: Path) -> None:
    host = Host(tmp_path, rights=EVERYTHING)
    host.caps = caps
    host.journal(ENTRY)
    finding = host.told()["capper"]
    assert finding.mark is Severity.WARN
    assert "has ended without restoring" in finding.detail
    assert "needed" not in finding.detail


def test_journal_under_a_capper_is_its_own_affair(host: Host) -> None:
    host.journal(ENTRY)
    with answering(host, state()):
        assert "left behind" not in host.told()


def test_journal_of_another_boot_is_no_finding(host: Host) -> None:
    host.journal(ENTRY, boot="another-boot")
    assert "left behind" not in host.told()


def test_empty_journal_is_no_finding(host: Host) -> None:
    host.journal()
    assert "left behind" not in host.told()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"entries": 3}', '{"entries": [{}]}'])
def test_invalid_journal_is_not_removed(text: str, host: Host) -> None:
    path = host.journal(ENTRY)
    path.write_text(text)
    finding = host.told()["left behind"]
    assert finding.mark is Severity.WARN
    assert path.read_text() == text


def test_setting_that_matches_no_device_is_a_finding(host: Host) -> None:
    host.caps = CapsSettings(fixed=(FixedCapSettings(device="7", watts=400),))
    finding = host.told()["settings"]
    assert finding.mark is Severity.WARN
    assert '[[caps.fixed]] device = "7" matches nothing' in finding.detail
    host.caps = CapsSettings(fixed=(FixedCapSettings(device="0", watts=400),))
    assert "settings" not in host.told()


def test_device_that_the_budget_cannot_limit_is_a_finding(host: Host) -> None:
    host.caps = CapsSettings(budget_watts=900)
    laptop = Domain("gpu:GPU-b", HwType.GPU, "RTX 4070 Laptop", "nvml", Provenance.MEASURED)
    dram = Domain("rapl:dram", HwType.MEMORY, "dram", "rapl", Provenance.MEASURED)
    told = host.told(laptop, dram)
    assert told["power budget"].detail.startswith("it does not limit RTX 4070 Laptop: ")
    assert "reserve_watts" in told["power budget"].remedy
    assert "power budget" not in host.told(dram)


def test_package_that_shows_no_limit_is_one_that_the_budget_cannot_limit(host: Host) -> None:
    package = Domain("rapl:package-0", HwType.CPU, "package-0", "rapl", Provenance.MEASURED)
    host.caps = CapsSettings(budget_watts=900)
    with closing(PowercapTree(host.sysfs, LAYOUTS["client"], cpus=1)):
        assert "power budget" not in host.told(package)
        for limit in host.sysfs.glob("class/powercap/intel-rapl:0/constraint_*_power_limit_uw"):
            limit.write_text("0\n")
        assert "does not limit package-0" in host.told(package)["power budget"].detail


def test_job_without_units_in_the_running_agent_is_a_finding(host: Host) -> None:
    host.autotune = AutotuneSettings(mode="advise", job=(TunedJobSettings(service="trainer"),))
    assert "tuned job" not in host.told()  # no agent answers
    missing = MissingJobs(host.autotune, host.clock.now(), lambda sentence: None)
    rows = tuple(missing.rows((), (), host.clock.now()))
    with QueryServer(host.run_dir, tuning=lambda: TuningAccounts("advise", rows)):
        finding = host.told()["tuned job"]
    assert finding.mark is Severity.WARN
    assert finding.detail.startswith('trainer/*: No span of the service "trainer" was received')
