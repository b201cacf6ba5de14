"""Input errors of people and machines: one clear sentence, the right exit code, nothing lost."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.certificates import Authority
from testbed.emulated_faults import FaultyHost
from testbed.program import UNPRIVILEGED, Running, fallen, lasting, on_a_disk_of, options, wattspan
from testbed.waiting import eventually

from wattspan.emulation.host import EmulatedHost, profile_named

EMULATED_HOST = r"wattspan: Emulated host in [^\n]+\n"


def refused(done: subprocess.CompletedProcess[str]) -> tuple[int, str]:
    """The exit code, and the only sentence on standard error."""
    assert done.stdout == ""
    said = re.sub(EMULATED_HOST, "", done.stderr)
    assert said.count("\n") == 1, said
    assert said.startswith("wattspan: "), said
    assert "Traceback" not in said
    return done.returncode, said.removeprefix("wattspan: ").removesuffix("\n")


def run(folder: Path, *arguments: str, **settings: object) -> tuple[int, str]:
    chosen = {
        "agent.state_dir": folder / "state",
        "exporters.prometheus.listen": "127.0.0.1:0",
        "spans.http": "127.0.0.1:0",
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    return refused(wattspan("run", *arguments, *options(chosen)))


# ----------------------------------------------------------------------------- configuration


def test_all_configuration_errors_are_reported_together(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[agent]\nintervall = 1\n[store]\ninterval = 'x'\n[nonsense]\n")
    done = wattspan("run", "--config", str(file))
    assert done.returncode == 2
    assert [line.split(":")[2] for line in done.stderr.splitlines()] == ["2", "4", "5"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config", "/nonexistent.toml"], "Cannot read /nonexistent.toml: there is no such file"),
        (["--set", "agent.interval"], "--set agent.interval: no value. Write --set KEY=VALUE"),
        (["--set", "agent.intervall=1s"], "--set agent.intervall: Unknown key"),
        (["--emulate", "mainframe"], "There is no emulated host 'mainframe'. Choose one of: "),
    ],
)
def test_options_that_cannot_be_are_refused(arguments: list[str], sentence: str) -> None:
    code, said = refused(wattspan("run", *arguments))
    assert (code, said[: len(sentence)]) == (2, sentence)


# ------------------------------------------------------------------------------- the exporter


def test_port_in_use_is_named_and_keeps_stored_measurements(tmp_path: Path) -> None:
    with Running(tmp_path) as agent:
        before = agent.measuring().energy()
        agent.end()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listen = f"127.0.0.1:{port}"
        code, said = run(tmp_path, "--emulate", "laptop", exporters__prometheus__listen=listen)
    assert code == 4
    assert said.startswith(f"Cannot serve metrics on {listen}: the port is in use; stop its user")
    assert f"ss -ltnp sport = :{port}" in said
    with Running(tmp_path) as agent:
        assert eventually(agent.energy, "the first figure") >= before


@pytest.mark.parametrize("bad", ["junk", "absent", "another's key"])
def test_invalid_certificate_is_rejected(tmp_path: Path, bad: str) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.issue("one"), authority.issue("two")
    certificate, key = pair.certificate, pair.key
    if bad == "junk":
        certificate.write_text("no certificate")
    elif bad == "absent":
        certificate.unlink()
    else:
        key = other.key
    code, said = run(
        tmp_path,
        *("--emulate", "laptop"),
        exporters__prometheus__tls_certificate=certificate,
        exporters__prometheus__tls_key=key,
    )
    assert code == 4
    assert str(certificate) in said
    assert "[exporters.prometheus]" in said


# ------------------------------------------------------------------------------- the counters


def test_host_without_counters_error_names_the_remedy(tmp_path: Path) -> None:
    code, said = run(tmp_path, sources__rapl__sysfs=tmp_path, sources__nvml__enabled="false")
    assert code == 3
    assert said.startswith("No energy counter can be read on this host")
    for advice in ("`wattspan doctor`", "`wattspan demo`", "[sources.estimate]"):
        assert advice in said


def test_source_that_was_insisted_on_and_is_not_there_is_named(tmp_path: Path) -> None:
    code, said = run(tmp_path, sources__rapl__sysfs=tmp_path, sources__rapl__enabled="true")
    assert code == 3
    assert said.startswith("Cannot read CPU energy counters: no zone counts energy under ")
    assert "Load the driver" in said


@pytest.fixture
def host() -> Iterator[EmulatedHost]:
    """Counters that the program takes for those of this machine."""
    with FaultyHost(profile_named("two-socket")) as emulated:
        yield emulated


def zone_file(host: EmulatedHost, zone: str, name: str) -> Path:
    return (host.sysfs / "class" / "powercap" / zone / name).resolve()


def test_unreadable_counters_error_names_the_remedy(tmp_path: Path, host: EmulatedHost) -> None:
    for zone in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0", "intel-rapl:1:0"):
        zone_file(host, zone, "energy_uj").chmod(0)
    assert host.sysfs is not None
    settings = {
        "agent.state_dir": tmp_path,
        "sources.rapl.sysfs": host.sysfs,
        "spans.http": "127.0.0.1:0",
    }
    code, said = refused(wattspan("run", *options(settings), within=UNPRIVILEGED))
    assert code == 3
    assert said.startswith("No energy counter can be read. Cannot read ")
    assert "/energy_uj and 3 more: permission denied. " in said
    assert "udev" in said


def test_malformed_zone_affects_only_itself(tmp_path: Path, host: EmulatedHost) -> None:
    host.ask(do="fault", zone="intel-rapl:0", fault="freeze")
    bad = zone_file(host, "intel-rapl:0", "energy_uj")
    bad.unlink()
    bad.write_text("banana\n")
    with Running(tmp_path, emulate=None, sources__rapl__sysfs=host.sysfs) as agent:
        agent.measuring()
        eventually(lambda: healthy(agent, "package-1") > 0, "the other zone is measured")
        told = eventually(lambda: problems(agent), "the bad one is told")
        assert all("intel-rapl:0" in line for line in told), told
        assert agent.end() == 0, agent.said
        assert "Traceback" not in agent.said


def healthy(agent: Running, name: str) -> float:
    return sum(
        value
        for key, value in agent.totals().items()
        if key.startswith("hw_energy_joules_total") and f'"hw_name": "{name}"' in key
    )


def problems(agent: Running) -> list[str]:
    return [line for line in agent.said.splitlines() if "Cannot" in line]


# ---------------------------------------------------------------------------------- the store


def test_corrupted_store_is_moved_aside_and_no_counter_falls(tmp_path: Path) -> None:
    with Running(tmp_path) as agent:
        agent.measuring()
        before = agent.totals()
        agent.end()
    store = tmp_path / "state" / "wattspan-emulated.sqlite"
    store.write_bytes(b"no database" * 4096)
    with Running(tmp_path) as agent:
        after = agent.totals()
        (told,) = problems(agent)
        assert f"Cannot use the store {store}: it is corrupt" in told
        assert f"renamed it to {store}.corrupt-1" in told
    assert lasting(before)
    assert fallen(lasting(before), after) == {}


def test_unavailable_store_ends_the_agent_only_if_required(tmp_path: Path) -> None:
    fixed = tmp_path / "state"
    fixed.mkdir()
    fixed.chmod(0o555)
    with Running(tmp_path, within=UNPRIVILEGED) as agent:
        agent.measuring()
        (told,) = problems(agent)
        assert "until the store opens, totals are lost with the agent. Cannot open" in told
        assert f"permission denied. Make {fixed} writable" in told
        assert agent.end() == 0
    done = wattspan(
        *("run", "--emulate", "laptop", "--set", "store.enabled=true"),
        *("--set", f"agent.state_dir={fixed}"),
        within=UNPRIVILEGED,
    )
    code, said = refused(done)
    assert (code, said.startswith("Cannot open the store ")) == (5, True)


def test_store_that_can_be_had_later_is_used_from_then_on(tmp_path: Path) -> None:
    fixed = tmp_path / "state"
    fixed.mkdir()
    fixed.chmod(0o555)
    used = re.compile(r'^wattspan_source_up\{source="store"\} 1', re.MULTILINE)
    with Running(tmp_path, within=UNPRIVILEGED, store__interval="1s") as agent:
        agent.measuring()
        assert not used.search(agent.scrape())
        fixed.chmod(0o777)
        eventually(lambda: used.search(agent.scrape()), "it is used")
        assert "The store is open now." in agent.said
        shown = lasting(agent.totals())
        assert agent.end() == 0
    with Running(tmp_path, within=UNPRIVILEGED) as agent:
        agent.measuring()
        assert shown
        assert fallen(shown, agent.totals()) == {}


def test_state_directory_that_is_a_file_has_its_sentence(tmp_path: Path) -> None:
    file = tmp_path / "state"
    file.write_text("")
    for path in (file, file / "below"):
        code, said = run(
            tmp_path, "--emulate", "laptop", store__enabled="true", agent__state_dir=path
        )
        assert code == 5
        assert str(path) in said
        assert "state_dir" in said


def test_store_of_another_agent_is_not_written(tmp_path: Path) -> None:
    with Running(tmp_path) as first:
        first.measuring()
        second_folder = tmp_path / "second"
        second_folder.mkdir()
        with Running(second_folder, agent__state_dir=first.state_dir) as second:
            second.measuring()
            (told,) = problems(second)
            assert f"process {first.process.pid} is writing it. Stop that agent, or set" in told
            assert second.end() == 0
        code, _ = run(
            *(tmp_path, "--emulate", "laptop"),
            agent__state_dir=first.state_dir,
            store__enabled="true",
        )
        assert code == 5
        assert first.end() == 0
        assert problems(first) == []


@pytest.mark.needs_root
def test_full_disk_stops_only_the_store(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with Running(tmp_path, within=on_a_disk_of("8k", folder)) as agent:
        agent.measuring()
        (told,) = problems(agent)
        assert "continues without a store" in told
        assert f"the disk is full. Free some space for {folder}." in told
        assert agent.end() == 0


@pytest.mark.needs_root
def test_filling_disk_loses_no_energy_once_space_returns(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with Running(tmp_path, within=on_a_disk_of("2m", folder), store__interval="1s") as agent:
        agent.measuring()
        seen_from_outside = Path(f"/proc/{agent.process.pid}/root{folder}")
        ballast = seen_from_outside / "ballast"
        fill(ballast)
        eventually(lambda: "disk is full" in agent.said, "the full disk is told")
        energy = agent.energy()
        eventually(lambda: agent.energy() > energy, "it goes on measuring")
        ballast.unlink()
        eventually(lambda: store_up(agent), "the store is written again")
        assert agent.end() == 0, agent.said
        assert "Traceback" not in agent.said


def fill(file: Path) -> None:
    """Write to ``file`` until its disk is full."""
    with file.open("wb", buffering=0) as sink, contextlib.suppress(OSError):
        while sink.write(bytes(4096)):
            pass


def store_up(agent: Running) -> bool:
    return 'wattspan_source_up{source="store"} 1' in agent.scrape("text/plain")


# -------------------------------------------------------------------------------- the plugins


PLUGIN = """
from wattspan.ports import SourcePlugin, ExporterPlugin
from wattspan.model.settings import Table

class Settings(Table, frozen=True):
    pass

class Broken:
    name, address = "bad", None
    def read(self): raise RuntimeError("read")
    def start(self, view): raise RuntimeError("start")
    def close(self): raise RuntimeError("close")
    stop = close

def refuse(settings, context): raise RuntimeError("open")
def succeed(settings, context): return Broken()

reads_not = SourcePlugin(Settings, succeed)
exports_not = ExporterPlugin(Settings, refuse)
starts_not = ExporterPlugin(Settings, succeed)
"""


def install(folder: Path, entry: str) -> dict[str, str]:
    """The environment in which the plugin that ``entry`` names is installed."""
    group, value = entry.split(" = ")
    (folder / "bad_plugin.py").write_text(PLUGIN)
    info = folder / "bad_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[wattspan.{group}]\nbad = {value}\n")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("sources = absent_module:x", "The plugin [sources.bad] cannot be used: absent_module:x"),
        ("sources = bad_plugin:reads_not", "source 'bad': it raised RuntimeError: read"),
        ("exporters = bad_plugin:exports_not", "[exporters.bad]: it does not open, RuntimeError"),
    ],
)
def test_broken_plugin_is_named_and_affects_only_itself(
    tmp_path: Path, entry: str, sentence: str
) -> None:
    with Running(tmp_path, environ=install(tmp_path, entry)) as agent:
        agent.measuring()
        eventually(lambda: sentence in agent.said, f"it says {sentence!r}")
        told = [line for line in agent.said.splitlines() if "bad" in line]
        assert len(told) == 1, told
        code = agent.end()
        assert (code, "Traceback" in agent.said) == (0, False), agent.said


def test_exporter_that_does_not_start_ends_the_agent_in_order(tmp_path: Path) -> None:
    with Running(tmp_path, environ=install(tmp_path, "exporters = bad_plugin:starts_not")) as agent:
        assert agent.process.wait(30) == 4
        assert "Cannot start the exporter 'bad': RuntimeError: start." in agent.said
        assert "Traceback" not in agent.said
