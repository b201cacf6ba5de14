import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from testbed.exporting import serving
from testbed.kubelet import Kubelet, encode_claims
from testbed.query_server import QueryServer
from testbed.snapshots import busy_host
from testbed.top_view import document

from wattspan.cli.doctor import (
    NO_COUNTER_ADVICE,
    Diagnosis,
    Finding,
    Severity,
    render,
)
from wattspan.cli.doctor.host import (
    allowed_owners,
    container,
    examine_agent,
    examine_configuration,
    examine_counters,
    examine_directories,
    examine_division,
    examine_host,
    examine_pods,
    hypervisor,
    other_writers,
)
from wattspan.cli.doctor.network import examine_ports
from wattspan.cli.doctor.sources import examine_sources, use_all_sockets
from wattspan.cli.formatting import text_lines
from wattspan.config import AgentSettings, Config, StoreSettings
from wattspan.config.loading import DEFAULT_PATH
from wattspan.config.settings import ProcessesSettings
from wattspan.model import (
    Domain,
    Failure,
    HwType,
    Instant,
    Microjoules,
    Provenance,
    Reading,
    Trouble,
)
from wattspan.model.settings import Listen, Size, Table
from wattspan.plugins import BrokenPlugin, Plugins
from wattspan.ports import Batch, CounterSource, SourceContext, SourceError, SourcePlugin
from wattspan.testing import FakeDirectory, ManualClock, ReplaySource
from wattspan_exporters.prometheus import plugin


def report(*findings: Finding, width: int = 80, readable: int = 1) -> list[str]:
    diagnosis = Diagnosis({"Things": list(findings)}, readable)
    return text_lines(render(diagnosis, name_width=width // 3), width)


# ------------------------------------------------------------------------------------ the report


def test_doctor_report_has_a_marked_line_per_finding() -> None:
    assert report(
        Finding(Severity.OK, "alpha", "fine"), Finding(Severity.FAIL, "b", "bad", "Mend it.")
    )[:4] == [
        "Things",
        "  ok    alpha  fine",
        "  FAIL  b      bad",
        "               -> Mend it.",
    ]


def test_report_folds_a_long_name_on_a_terminal_only() -> None:
    path = "/sys/class/powercap/intel-rapl:0/intel-rapl:0:0/energy_uj"
    diagnosis = Diagnosis({"T": [Finding(Severity.FAIL, path, "permission denied")]}, 1)
    assert text_lines(render(diagnosis))[1] == f"  FAIL  {path}  permission denied"
    folded = text_lines(render(diagnosis, name_width=30), 80)
    assert folded[1] == f"  FAIL  {path[:30]}  permission denied"
    assert folded[2] == f"        {path[30:]}"


def test_report_wraps_long_details_in_their_column() -> None:
    lines = report(Finding(Severity.WARN, "x", "word " * 30, "remedy " * 20), width=60)
    assert max(map(len, lines)) <= 60
    assert lines[2].startswith(" " * 11 + "word")
    assert next(line for line in lines if "->" in line).startswith(" " * 11 + "-> remedy")


def test_report_cannot_command_the_terminal() -> None:
    assert "\x1b" not in "".join(report(Finding(Severity.WARN, "a\x1b[2J", "\x1b[1m", "\x1b")))


def test_report_ends_with_counts_and_with_advice_if_no_counter_is_readable() -> None:
    assert report(Finding(Severity.OK, "a"))[-1] == "1 counter can be read; nothing to do."
    summary = " ".join(report(Finding(Severity.WARN, "a"), readable=0))
    assert "0 counters can be read; 1 to look at." in summary
    assert NO_COUNTER_ADVICE in summary


def test_diagnosis_as_json_facts() -> None:
    diagnosis = Diagnosis({"S": [Finding(Severity.FAIL, "a", "b", "c")]}, 2)
    assert diagnosis.plain() == {
        "readable_counters": 2,
        "worst": "fail",
        "sections": [
            {
                "title": "S",
                "findings": [{"mark": "fail", "what": "a", "detail": "b", "remedy": "c"}],
            }
        ],
    }


# ------------------------------------------------------------------------------------ the host


def test_hypervisor_is_found_by_the_flag_of_the_cpus(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("flags\t\t: fpu hypervisor sse\n")
    assert hypervisor(tmp_path) == "unknown hypervisor"
    (tmp_path / "sys/class/dmi/id").mkdir(parents=True)
    (tmp_path / "sys/class/dmi/id/sys_vendor").write_text("QEMU\n")
    assert hypervisor(tmp_path) == "QEMU"


def test_bare_metal_is_not_a_virtual_machine(tmp_path: Path) -> None:
    assert (hypervisor(tmp_path), container(tmp_path)) == ("", "")


def test_container_is_found_by_the_files_of_its_runtime(tmp_path: Path) -> None:
    (tmp_path / ".dockerenv").touch()
    assert container(tmp_path) == "docker"
    (tmp_path / "run/systemd").mkdir(parents=True)
    (tmp_path / "run/systemd/container").write_text("podman\n")
    assert container(tmp_path) == "podman"


def test_missing_powercap_is_a_warning_with_a_remedy(tmp_path: Path) -> None:
    (finding,) = [f for f in tuple(examine_host(tmp_path)) if f.what == "powercap"]
    assert (finding.mark, "intel_rapl_msr" in finding.remedy) == (Severity.WARN, True)
    (tmp_path / "sys/class/powercap").mkdir(parents=True)
    (finding,) = [f for f in tuple(examine_host(tmp_path)) if f.what == "powercap"]
    assert finding.mark is Severity.OK


def install_units(root: Path) -> None:
    units = root / "run/systemd/system"
    units.mkdir(parents=True)
    (units / "wattspan-capper.socket").touch()


def test_root_is_warned_that_the_service_may_read_less(tmp_path: Path) -> None:
    install_units(tmp_path)
    (finding,) = [f for f in tuple(examine_host(tmp_path, euid=0)) if f.what == "service"]
    assert finding.mark is Severity.NOTE
    assert "reads as user wattspan" in finding.detail
    assert "`sudo -u wattspan wattspan doctor`" in finding.remedy


def test_other_users_and_hosts_without_the_service_get_no_service_finding(tmp_path: Path) -> None:
    assert "service" not in [f.what for f in tuple(examine_host(tmp_path, euid=0))]
    install_units(tmp_path)
    assert "service" not in [f.what for f in tuple(examine_host(tmp_path, euid=1000))]


# ------------------------------------------------------------------------------ a running agent


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    """A configuration whose agent has its sockets in ``tmp_path``."""
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(tmp_path))
    return Config(agent=AgentSettings(run_dir=str(tmp_path)))


def test_agent_that_does_not_run_is_a_note(agents: Config) -> None:
    (finding,) = examine_agent(agents)
    assert (finding.mark, finding.what) == (Severity.NOTE, "running agent")
    assert "No wattspan agent answers" in finding.detail


def test_agent_that_answers_elsewhere_is_a_warning_with_the_remedy(agents: Config) -> None:
    with serving() as agent:
        listen = Listen(f"127.0.0.1:{agent.port}")
        (finding,) = examine_agent(replace(agents, exporters={"p": plugin.settings(listen=listen)}))
    assert finding.mark is Severity.WARN
    assert finding.detail.endswith(f", but a program answers as an agent at {listen}")
    assert "another [agent] run_dir" in finding.remedy


def test_agent_findings_show_version_uptime_and_failing_sources(
    agents: Config, tmp_path: Path
) -> None:
    with QueryServer(tmp_path):
        about, source, division = examine_agent(agents)
    assert about.detail.startswith("wattspan 1.2.3, up 4m 12s, ")
    assert about.mark is Severity.WARN  # another release
    assert source.mark is Severity.WARN
    assert "Give the service CAP_DAC_READ_SEARCH" in source.detail
    assert division.detail.startswith("package-0, package-1: divided by CPU time; ")


def test_packages_are_named_by_the_method_of_their_division() -> None:
    package, *others = busy_host().domains
    marked = replace(package, learned=True), replace(package, counters=True), *others
    counted, learned, timed = examine_division(
        document(replace(busy_host(), domains=marked)).domains
    )
    assert counted.detail == "package-0: divided by performance counters"
    assert (learned.mark, learned.remedy) == (Severity.OK, "")
    assert learned.detail.startswith("package-0: divided by CPU time at its learned cost, ")
    assert (timed.mark, timed.detail.partition(":")[0]) == (Severity.NOTE, "package-1")
    assert timed.remedy.endswith("Uses that never vary cannot be told apart.")
    assert list(examine_division(document(replace(busy_host(), domains=())).domains)) == []


# ---------------------------------------------------------------------- the performance counters


def told_of_counters(path: Path, setting: str = "auto", answer: bytes = b"") -> Finding:
    """The finding while a helper gives an ``answer``; without one, no helper listens."""
    config = Config(processes=ProcessesSettings(counters=setting))
    with socket.socket(socket.AF_UNIX) as listener:
        if answer:
            listener.bind(str(path))
            listener.listen()

        def helper() -> None:
            with listener.accept()[0] as connection:
                connection.recv(1)
                connection.sendall(answer)

        thread = threading.Thread(target=helper if answer else int)
        thread.start()
        (finding,) = examine_counters(config, ManualClock(), path)
        thread.join()
    return finding


def test_counters_are_used_if_the_helper_answers(tmp_path: Path) -> None:
    finding = told_of_counters(tmp_path / "sock", answer=bytes(8))
    assert (finding.mark, finding.remedy) == (Severity.OK, "")


def test_answer_of_a_helper_without_counters_is_told_with_a_remedy(tmp_path: Path) -> None:
    finding = told_of_counters(tmp_path / "sock", answer=struct.pack("=II", 1, 4) + b"none")
    assert finding.mark is Severity.WARN
    assert f"the helper at {tmp_path / 'sock'}: none. See " in finding.detail


def test_counters_without_a_helper_are_a_note_with_the_command(tmp_path: Path) -> None:
    finding = told_of_counters(tmp_path / "sock")
    assert finding.mark is Severity.NOTE
    offered = not finding.detail.startswith("the CPUs or the kernel offer none")
    assert ("systemctl enable --now wattspan-counters.socket" in finding.remedy) is offered


def test_counters_that_are_off_are_a_note(tmp_path: Path) -> None:
    assert told_of_counters(tmp_path / "sock", "off").detail.startswith("not used: [processes]")


# --------------------------------------------------------------------------- the configuration


def told_of_file(path: Path, *owners: int) -> list[Finding]:
    config = Config(path=path)
    found = examine_configuration(config, Plugins(), owners or (os.geteuid(),))
    return [finding for finding in found if finding.what == "file"]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "etc" / "config.toml"
    path.parent.mkdir(mode=0o755)
    path.touch(mode=0o640)
    return path


def test_configuration_file_of_its_owner_is_ok(written: Path) -> None:
    assert told_of_file(written) == [Finding(Severity.OK, "file", str(written))]


@pytest.mark.parametrize(
    ("mode", "who"),
    [(0o666, "its group and everybody"), (0o660, "its group"), (0o602, "everybody")],
)
def test_configuration_file_writable_by_others_is_a_warning(
    mode: int, who: str, written: Path
) -> None:
    written.chmod(mode)
    (finding,) = told_of_file(written)
    assert (finding.mark, finding.remedy) == (Severity.WARN, f"Run `chmod go-w {written}`.")
    assert f"can be changed by {who}, and a capper of root obeys" in finding.detail


def test_configuration_directory_writable_by_others_is_a_warning(written: Path) -> None:
    written.parent.chmod(0o777)
    (finding,) = told_of_file(written)
    assert (finding.mark, finding.remedy) == (Severity.WARN, f"Run `chmod go-w {written.parent}`.")


def test_configuration_file_in_a_sticky_directory_is_ok(written: Path) -> None:
    written.parent.chmod(0o1777)
    assert [finding.mark for finding in told_of_file(written)] == [Severity.OK]


def test_configuration_link_in_a_writable_directory_is_a_warning(
    written: Path, tmp_path: Path
) -> None:
    link = tmp_path / "open" / "config.toml"
    link.parent.mkdir()
    link.parent.chmod(0o777)
    link.symlink_to(written)
    (finding,) = told_of_file(link)
    assert finding.remedy == f"Run `chmod go-w {link.parent}`."


def test_read_only_mount_has_no_other_writers() -> None:
    assert other_writers(stat.S_IFDIR | 0o777, read_only=True) == ""
    assert other_writers(stat.S_IFDIR | 0o777, read_only=False) == "its group and everybody"


def test_configuration_file_of_another_user_is_a_warning(written: Path) -> None:
    of_file, of_folder = told_of_file(written, os.geteuid() + 1)
    assert of_file.mark is Severity.WARN
    assert f"belongs to user {os.geteuid()}" in of_file.detail
    assert of_file.remedy == f"Run `chown root {written}`."
    assert of_folder.remedy == f"Run `chown root {written.parent}`."


def test_allowed_owner_of_the_system_file_is_root_only() -> None:
    assert allowed_owners(DEFAULT_PATH, 990) == {0}
    assert allowed_owners(Path("/srv/wattspan.toml"), 1000) == {0, 1000}


# --------------------------------------------------------------------------------- the sources


class Switch(Table, frozen=True):
    """A source's table."""

    enabled: bool | str = "auto"


PACKAGE = Domain(
    "p", HwType.CPU, "package-0", "test", Provenance.MEASURED, why="a top zone", resource="cpu"
)


def counting(*watts: float) -> list[Batch]:
    """One batch a second, then as many joules later as each of ``watts`` says."""
    readings, mono, counter = [], 10**12, 0
    for power in (0, *watts):
        counter += round(power * 10**6)
        readings.append(Reading("p", Instant(mono, mono), Microjoules(counter)))
        mono += 10**9
    return [Batch((PACKAGE,), (reading,)) for reading in readings]


def examined(
    batches: Iterable[Batch] | None,
    settings: Table | None = None,
    refusal: str = "",
    work: Callable[[Path], None] = use_all_sockets,
) -> tuple[list[Finding], int]:
    def open_(settings: Switch, context: SourceContext) -> CounterSource | None:
        if batches is not None:
            return ReplaySource(batches)
        if settings.enabled is True:
            raise SourceError(refusal)
        return None

    plugins = Plugins(sources={"x": SourcePlugin(Switch, open_)})
    config = Config(sources={"x": settings or Switch()})
    context = SourceContext(ManualClock(), FakeDirectory())
    result = examine_sources(plugins, config, context, work=work)
    return result.sections["Source x"], result.readable


def test_counter_is_listed_with_watts_and_reason_for_the_sum() -> None:
    findings, readable = examined(counting(42))
    assert findings == [
        Finding(Severity.OK, "cpu package-0", "42.0 W, measured, counted: a top zone")
    ]
    assert readable == 1


def test_constant_counter_is_a_warning() -> None:
    (finding,), _ = examined(counting(0))
    assert finding.mark is Severity.WARN
    assert "it does not move" in finding.detail


def test_counter_that_stands_still_while_cpus_work_is_a_failure() -> None:
    frozen = replace(PACKAGE, moves_with="cpu")
    batches = [replace(one, domains=(frozen,)) for one in counting(0, 0)]
    worked = list[Path]()
    (finding,), readable = examined(batches, work=worked.append)
    assert (finding.mark, readable) == (Severity.FAIL, 0)
    assert finding.detail == (
        "its value does not change while the hardware works: its energy is unknown"
    )
    assert "[sources.estimate]" in finding.remedy
    assert worked == [Path("/sys")]


def test_part_that_stands_still_while_cpus_work_is_a_warning() -> None:
    part = replace(PACKAGE, moves_with="cpu", in_cover=False, resource=None)
    batches = [replace(one, domains=(part,)) for one in counting(0, 0)]
    (finding,), readable = examined(batches, work=lambda _: None)
    assert (finding.mark, readable) == (Severity.WARN, 0)


def test_counter_that_moves_with_work_is_counted() -> None:
    resting = replace(PACKAGE, moves_with="cpu")
    batches = [replace(one, domains=(resting,)) for one in counting(0, 7)]
    (finding,), readable = examined(batches, work=lambda _: None)
    assert (finding.mark, readable) == (Severity.OK, 1)


def test_work_on_all_sockets_ends(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    use_all_sockets(tmp_path)
    assert os.sched_getaffinity(0) == before


def test_unreadable_counter_is_a_failure_with_a_remedy() -> None:
    denied = Failure("x", "/sys/e", Trouble.DENIED, "permission denied", "Grant it.", "p")
    findings, readable = examined([Batch((PACKAGE,), failures=(denied,))])
    assert findings == [Finding(Severity.FAIL, "/sys/e", "permission denied (denied)", "Grant it.")]
    assert readable == 0


def test_mig_instance_without_a_counter_is_part_of_its_board() -> None:
    board = replace(PACKAGE, hw_type=HwType.GPU, name="H100 0")
    instance = replace(
        board, id="i", name="H100 0, 1g.10gb 1", in_cover=False, parent="p", resource=None,
        provenance=Provenance.ESTIMATED, why="1 of 7 slices of the board",
    )  # fmt: skip
    batches = [Batch((board, instance), batch.readings) for batch in counting(300)]
    (_, finding), readable = examined(batches)
    assert (finding.mark, finding.what) == (Severity.OK, "gpu H100 0, 1g.10gb 1")
    assert "a part of its board's energy, estimated, not summed: 1 of 7 slices" in finding.detail
    assert readable == 1


def test_estimate_is_not_counted_as_a_counter() -> None:
    batches = [
        Batch((Domain("p", HwType.CPU, "package-0", "x", Provenance.ESTIMATED),), batch.readings)
        for batch in counting(42)
    ]
    assert examined(batches)[1] == 0


def test_source_without_counters_reports_its_reason() -> None:
    findings, _ = examined(None, refusal="Cannot read X: it is not there. Plug it in.")
    assert findings == [
        Finding(Severity.NOTE, "nothing to read", "Cannot read X: it is not there. Plug it in.")
    ]


def test_enabled_source_without_counters_is_a_failure() -> None:
    findings, _ = examined(None, Switch(enabled=True), refusal="Cannot read X.")
    assert findings[0].mark is Severity.FAIL


def test_disabled_source_is_a_note() -> None:
    findings, _ = examined(counting(1), Switch(enabled=False))
    assert findings == [Finding(Severity.NOTE, "off", "enabled = false")]


def test_silent_source_is_waited_for_with_a_timeout() -> None:
    findings, readable = examined([Batch((PACKAGE,))])
    assert (findings[0].mark, readable) == (Severity.WARN, 0)
    assert "no figure yet" in findings[0].detail


def test_device_of_two_sources_is_counted_once_and_the_cover_is_explained() -> None:
    """AMD SMI and a sensor of hwmon may read one board."""
    domains = {
        name: Domain(f"{name}:1", HwType.GPU, name, name, Provenance.MEASURED, pci="0000:0c:00.0")
        for name in ("amdsmi", "hwmon")
    }

    def opened(name: str) -> SourcePlugin:
        reading = Reading(domains[name].id, Instant(1, 1), Microjoules(1))
        batch = Batch((domains[name],), (reading,))
        return SourcePlugin(Switch, lambda *_: ReplaySource([batch], name))

    plugins = Plugins(sources={name: opened(name) for name in domains})
    config = Config(sources=dict.fromkeys(domains, Switch()))
    result = examine_sources(plugins, config, SourceContext(ManualClock(), FakeDirectory()))
    (finding,) = result.sections["Source hwmon"]
    assert "not summed: amdsmi:1 measures the same board 0000:0c:00.0" in finding.detail
    assert result.sections["Cover"] == [
        Finding(
            Severity.OK,
            "board 0000:0c:00.0",
            "counted by amdsmi:1, measured; "
            "not by hwmon:1: amdsmi:1 measures the same board 0000:0c:00.0",
        )
    ]
    assert [domain.in_cover for domain in result.domains] == [True, False]


def test_id_of_two_sources_is_a_failure() -> None:
    def opened(name: str) -> SourcePlugin:
        return SourcePlugin(Switch, lambda *_: ReplaySource(counting(1), name))

    plugins = Plugins(sources={"x": opened("x"), "y": opened("y")})
    config = Config(sources={"x": Switch(), "y": Switch()})
    result = examine_sources(plugins, config, SourceContext(ManualClock(), FakeDirectory()))
    mark, what, detail, remedy = msgspec.structs.astuple(result.sections["Cover"][0])
    assert (mark, what) == (Severity.FAIL, "p")
    assert "that of y is ignored" in detail
    assert "Rename the domain" in remedy


def test_setting_that_matches_nothing_is_a_finding_of_a_source_without_counters() -> None:
    absent = SourcePlugin(Switch, lambda *_: None, lambda _: ["sources.x.sysfs: no directory /x"])
    context = SourceContext(ManualClock(), FakeDirectory())
    found = examine_sources(
        Plugins(sources={"x": absent}), Config(sources={"x": Switch()}), context
    )
    assert [(one.mark, one.what) for one in found.sections["Source x"]] == [
        (Severity.NOTE, "nothing to read"),
        (Severity.WARN, "setting"),
    ]


def test_broken_source_plugin_has_its_own_section() -> None:
    plugins = Plugins(broken=(BrokenPlugin("sources.y", "it does not load", "Reinstall it."),))
    context = SourceContext(ManualClock(), FakeDirectory())
    ((title, findings),) = examine_sources(plugins, Config(), context).sections.items()
    assert title == "Source y"
    assert findings[0].remedy == "Reinstall it."


# ------------------------------------------------------------------------ requirements of the
# agent


class Listening(Table, frozen=True):
    """An exporter's table."""

    listen: Listen = Listen("")


def directories(state: Path, **store: object) -> list[Finding]:
    agent = AgentSettings(state_dir=str(state), run_dir=str(state))
    config = Config(agent=agent, store=StoreSettings(**store))  # type: ignore[arg-type]
    return [f for f in tuple(examine_directories(config)) if f.what != "run_dir"]


def test_writable_state_directory_is_ok(tmp_path: Path) -> None:
    assert directories(tmp_path) == [
        Finding(Severity.OK, "state_dir", f"{tmp_path} can be written")
    ]


def test_examination_creates_no_directory(tmp_path: Path) -> None:
    (finding,) = directories(tmp_path / "a/b")
    assert finding.detail.endswith("will be created")
    assert list(tmp_path.iterdir()) == []


def test_file_in_place_of_a_directory_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    assert directories(tmp_path / "f")[0].mark is Severity.FAIL


def test_run_directory_writable_by_others_is_a_failure(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    agent = AgentSettings(state_dir=str(tmp_path), run_dir=str(tmp_path))
    (finding,) = [f for f in tuple(examine_directories(Config(agent=agent))) if f.what == "run_dir"]
    assert finding.mark is Severity.FAIL
    assert "can be written by its group and every user" in finding.detail
    assert finding.remedy.startswith("Set [agent] run_dir to a directory inside it")


def test_disk_smaller_than_the_store_is_a_warning(tmp_path: Path) -> None:
    told = directories(tmp_path, max_size=Size(2**62))
    assert [f.what for f in told] == ["state_dir", "disk space"]


def test_port_in_use_by_another_program_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = Listen(f"127.0.0.1:{server.getsockname()[1]}")
        (finding,) = examine_ports(Config(exporters={"p": Listening(listen=listen)}))
    assert finding.mark is Severity.FAIL
    assert f"cannot listen at {listen}: address already in use" in finding.detail


@pytest.mark.parametrize("runs", [True, False])
def test_port_in_use_by_a_running_agent_is_ok(runs: bool, tmp_path: Path) -> None:
    """Any program may answer as the agent does; the run directory is the agent's."""
    with serving() as agent, socket.socket(socket.AF_UNIX) as api:
        api.bind(str(tmp_path / "api.sock"))
        if runs:
            api.listen()
        listen = Listen(f"127.0.0.1:{agent.port}")
        exporters = {"p": plugin.settings(listen=listen)}
        run_dir = AgentSettings(run_dir=str(tmp_path))
        (finding,) = examine_ports(Config(agent=run_dir, exporters=exporters))
    if runs:
        detail = f"a running agent answers at {listen}"
        assert finding == Finding(Severity.OK, "exporters.p", detail)
    else:
        assert finding.mark is Severity.WARN
        assert "unknown by whom" in finding.detail


def test_exporter_without_listener_has_no_port_finding() -> None:
    config = Config(exporters={"p": Listening()})
    assert list(examine_ports(config)) == []


@pytest.mark.parametrize(
    ("claims", "mark", "words"),
    [
        ([], Severity.OK, "0 devices of pods by the kubelet"),
        (["gpu-0"], Severity.WARN, "Cannot read the UUID of gpu.nvidia.com/n/gpu-0"),
    ],
)
def test_pods_of_the_kubelet_are_a_finding(
    tmp_path: Path, claims: list[str], mark: Severity, words: str
) -> None:
    path = tmp_path / "kubelet.sock"
    devices = [{"driver": "gpu.nvidia.com", "pool": "n", "device": name} for name in claims]
    pod = {"namespace": "ml", "pod": "a", "container": "main", "claims": devices}
    with Kubelet(path, encode_claims([pod])):
        settings = ProcessesSettings(pod_resources=str(path))
        (finding,) = examine_pods(Config(processes=settings))
    assert (finding.mark, words in finding.detail) == (mark, True), finding


def test_node_without_a_kubelet_is_a_finding() -> None:
    settings = ProcessesSettings(pod_resources="", kubernetes_node="node-1")
    (finding,) = examine_pods(Config(processes=settings))
    assert finding.mark is Severity.WARN
    assert "kubernetes_node has no effect" in finding.detail
    assert list(examine_pods(Config(processes=ProcessesSettings(pod_resources="")))) == []
