"""`wattspan run` as a service manager runs it: started, scraped, signalled, killed, restarted."""

from __future__ import annotations

import http.client
import itertools
import random
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text
from testbed.program import (
    UNPRIVILEGED,
    Running,
    alive,
    descendants,
    emulated_hosts,
    fallen,
    lasting,
    wattspan,
)
from testbed.prometheus_server import scraping
from testbed.requirements import find_program
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.emulation.host import EmulatedHost, profile_named

pytestmark = pytest.mark.long

PROMPT = 20.0
"""Seconds from a signal to the end, also beside others: what was not woken takes a minute."""

EMULATED_HOST = '"command": "emulated-host"'


def seconds_to_end(agent: Running, number: int) -> tuple[float, int]:
    clock = SystemClock()
    began = clock.monotonic()
    code = agent.end(number)
    return (clock.monotonic() - began) / 1e9, code


# ------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_agent_with_success(tmp_path: Path, number: int) -> None:
    with Running(tmp_path) as agent:
        agent.measuring()
        (engine,) = (Path(f"/proc/{pid}") for pid in descendants(agent.process.pid))
        (host,) = (h for h in emulated_hosts() if str(h) in (engine / "cmdline").read_text())
        took, code = seconds_to_end(agent, number)
        assert code == 0, agent.said
        assert took < PROMPT
        assert not host.exists()
        assert not engine.exists()
        assert "Traceback" not in agent.said


def test_signal_during_start_ends_the_agent_with_success(tmp_path: Path) -> None:
    def caught(folder: Path) -> bool:
        folder.mkdir()
        with Running(folder, emulate="two-socket-h100") as agent:
            # The host's process is there before the host is: handlers are in place, no more.
            eventually(lambda: descendants(agent.process.pid), "the start of the emulated host")
            took, code = seconds_to_end(agent, signal.SIGTERM)
            assert (code, took < PROMPT) == (0, True), agent.said
            return "Serving" not in agent.said

    turns = itertools.count()
    eventually(lambda: caught(tmp_path / str(next(turns))), "it ends before it serves")


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_at_any_moment_ends_the_agent_with_success(tmp_path: Path, number: int) -> None:
    """Before its first own line the interpreter decides; from then on the code is 0."""
    moments, pause = random.Random(number), threading.Event()
    for turn in range(10):
        folder = tmp_path / str(turn)
        folder.mkdir()
        with Running(folder) as agent:
            pause.wait(moments.uniform(0.1, 1.6))
            begun = bool(agent.said)
            children = descendants(agent.process.pid)
            took, code = seconds_to_end(agent, number)
            assert took < PROMPT
            if begun or code == 0:
                assert (code, "Traceback" in agent.said) == (0, False), agent.said
            eventually(lambda left=children: not alive(left), "its processes are gone")


def test_client_that_keeps_its_connection_does_not_keep_the_agent(tmp_path: Path) -> None:
    with Running(tmp_path) as agent:
        address = urlsplit(agent.address())
        connection = http.client.HTTPConnection(address.hostname or "", address.port)
        connection.request("GET", "/metrics")
        assert connection.getresponse().read()
        took, code = seconds_to_end(agent, signal.SIGTERM)
        connection.close()
        assert (code, took < PROMPT) == (0, True)


def test_long_interval_delays_no_end_and_a_repeated_signal_is_handled_once(tmp_path: Path) -> None:
    """`timeout` sends it to the program and to its group."""
    with Running(tmp_path, agent__interval="1m") as agent:
        agent.address()
        agent.process.send_signal(signal.SIGTERM)
        took, code = seconds_to_end(agent, signal.SIGTERM)
        assert (code, took < PROMPT) == (0, True)
        assert "does not return" not in agent.said


def test_killed_agent_leaves_no_process_and_no_directory(tmp_path: Path) -> None:
    with Running(tmp_path) as agent:
        agent.measuring()
        children = descendants(agent.process.pid)
        assert children
        directories = {
            h for h in emulated_hosts()
            if any(str(h) in Path(f"/proc/{pid}/cmdline").read_text() for pid in children)
        }  # fmt: skip
        assert agent.end(signal.SIGKILL) == -signal.SIGKILL
        eventually(lambda: not alive(children), "the emulated host ends with its owner")
        eventually(lambda: not directories & emulated_hosts(), "its directory is gone")


# -------------------------------------------------------------------------------- the next life


def without_the_agent(totals: dict[str, float]) -> dict[str, float]:
    """Counters of energy and time; counters of the agent itself restart with it."""
    return {
        name: value
        for name, value in totals.items()
        if "_joules_total" in name or "gap_seconds_total" in name
    }


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive), signal.SIGKILL]
)
def test_counters_do_not_fall_over_a_restart(tmp_path: Path, number: int) -> None:
    everybody = {"emulate": "two-socket-h100", "processes__top": 10_000}
    with Running(tmp_path, **everybody) as agent:
        agent.measuring()
        first = agent.energy()
        eventually(lambda: agent.energy() > first + 100, "more joules than one book holds")
        before = lasting(agent.totals())
        agent.end(number)
    assert before
    with Running(tmp_path, **everybody) as agent:
        at_once = without_the_agent(agent.totals())
        assert fallen(before, at_once) == {}
        restored = charged(agent, EMULATED_HOST)  # of the first run's host, which has ended
        known = agent.energy()
        eventually(lambda: agent.energy() > known, "it goes on measuring")
        later = without_the_agent(agent.totals())
        assert fallen(at_once, later) == {}
        assert agent.energy() < 10 * known + 10_000, "and no counter jumps"
        # it measures within milliseconds; the host's process has CPU time only at the next tick
        eventually(lambda: charged(agent, EMULATED_HOST) > restored, "the emulated host is charged")
        answered = wattspan("report", "--since", "1h", "--state-dir", str(agent.state_dir))
        assert (answered.returncode, "total" in answered.stdout) == (0, True), answered.stderr
        agent.end()
    every = ("report", "--since", "1h", "--limit", "0", "--state-dir")
    answered = wattspan(*every, str(tmp_path / "state"))
    assert "emulated-host" in answered.stdout, answered.stdout + answered.stderr


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive), signal.SIGKILL]
)
def test_processes_and_counters_continue_within_one_boot(tmp_path: Path, number: int) -> None:
    with EmulatedHost(profile_named("laptop")) as host:
        browser = f'"pid": "{host.start_jobs()["browser"]}"'  # other tests have such jobs too
        counters = {"emulate": None, "sources__rapl__sysfs": host.sysfs}
        with Running(tmp_path, **counters) as agent:
            agent.measuring()
            eventually(lambda: charged(agent, browser) > 0.5, "a job is charged for energy")
            before = without_the_agent(agent.totals())
            at_end = charged(agent, browser)
            agent.end(number)
        with Running(tmp_path, **counters) as agent:
            assert fallen(before, without_the_agent(agent.totals())) == {}
            eventually(lambda: charged(agent, browser) > at_end, "its row goes on")
            after = without_the_agent(agent.totals())
            assert fallen(before, after) == {}
            assert not {name for name in before if browser in name} - after.keys()


def charged(agent: Running, label: str) -> float:
    """CPU joules of the processes with this label."""
    return sum(
        value
        for name, value in agent.totals().items()
        if name.startswith("wattspan_process_energy_joules_total")
        and label in name
        and '"hw_type": "cpu"' in name
    )


@pytest.mark.exhaustive
def test_counters_do_not_fall_over_repeated_kills(tmp_path: Path) -> None:
    moments, pause = random.Random(1), threading.Event()
    last: dict[str, float] = {}
    for _ in range(6):
        with Running(tmp_path, agent__interval="20ms") as agent:
            agent.address()
            last = lasting(last)
            for _ in range(moments.randrange(1, 30)):
                seen = without_the_agent(agent.totals())
                assert fallen(last, seen) == {}
                last = seen
                pause.wait(moments.uniform(0, 0.1))
            agent.end(signal.SIGKILL)
    assert any(last.values())


# ------------------------------------------------------------------------------------ the scrape


def test_scrape_parses_in_both_formats_and_promtool_is_content(tmp_path: Path) -> None:
    with Running(tmp_path, emulate="two-socket-h100") as agent:
        agent.measuring()
        # While the idle power is unknown, the first intervals may be unattributed.
        eventually(
            lambda: "\nwattspan_process_energy_joules_total{" in agent.scrape(),
            "a process's energy",
        )
        modern, classic = agent.scrape(), agent.scrape("text/plain")
    families = {family.name for family in openmetrics(modern)}
    assert {"hw_energy_joules", "wattspan_process_energy_joules"} <= families
    assert {"hw_energy_joules"} <= {family.name for family in text(classic)}
    assert modern.endswith("# EOF\n")
    promtool = find_program("promtool")
    if promtool is not None:
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=classic, capture_output=True, text=True
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


@pytest.mark.exhaustive
@pytest.mark.needs_prometheus
def test_real_prometheus_has_consistent_rates_without_resets(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """Scraped while jobs work; every joule a device drew is somebody's, in watts as well."""
    with EmulatedHost(profile_named("two-socket")) as host:
        host.start_jobs()
        with Running(tmp_path, emulate=None, sources__rapl__sysfs=host.sysfs) as agent:
            target = urlsplit(agent.measuring().address()).netloc
            jobs = [{"job_name": "agent", "static_configs": [{"targets": [target]}]}]
            with scraping(tmp_path, free_port(), jobs, interval="500ms") as prometheus:

                def watts(name: str, chosen: str = "") -> dict[str, float]:
                    query = f"sum by (hw_type) (rate({name}{{{chosen}}}[10s] @ {now}))"
                    return {k: float(v) for k, v in prometheus.query(query, "hw_type").items()}

                def scrapes() -> float:
                    found = prometheus.query("count_over_time(hw_host_energy_joules_total[1m])")
                    return float(found.get("agent", "0"))

                eventually(lambda: scrapes() >= 30, "15 s of scrapes", within=60)
                now = float(prometheus.query("vector(time())")[""])  # one moment for all of them
                drawn = watts("hw_energy_joules_total", 'hw_parent=""')
                shares = [
                    watts(f"wattspan_{account}_energy_joules_total")
                    for account in ("process", "idle", "unattributed")
                ]
                assert drawn.keys() == {"cpu", "memory"}
                for kind, power in drawn.items():
                    booked = sum(share.get(kind, 0.0) for share in shares)
                    # A row listed within the window enters its rate a scrape late.
                    assert booked == pytest.approx(power, rel=0.05), (kind, shares)
                assert watts("hw_host_energy_joules_total")[""] == pytest.approx(
                    sum(drawn.values()), rel=0.02
                )
                groups = watts("wattspan_group_energy_joules_total", 'group_kind="user"')
                # Not the rates of processes: those of the short ones have one scrape.
                consumed = drawn["cpu"] - shares[1]["cpu"] - shares[2].get("cpu", 0.0)
                assert groups["cpu"] == pytest.approx(consumed, rel=0.1)
                names = [n for n in prometheus.get("label/__name__/values") if "_total" in n]
                assert len(names) > 5
                for name in names:
                    assert prometheus.query(f"max(resets({name}[1m]))") == {"": "0"}, name
            assert agent.end() == 0


# ----------------------------------------------------------------------------- without privilege


def test_agent_measures_and_attributes_unprivileged(tmp_path: Path) -> None:
    if not find_program("setpriv"):
        pytest.skip("no setpriv; install Debian's util-linux")
    with Running(tmp_path, emulate="two-socket-h100", within=UNPRIVILEGED) as agent:
        agent.measuring()

        def attributed() -> float:
            return sum(
                value
                for name, value in agent.totals().items()
                if name.startswith("wattspan_process_energy_joules_total")
                and '"hw_type": "cpu"' in name
                and '"pid": ""' not in name
            )

        eventually(lambda: attributed() > 0, "a process is charged for CPU energy")
        without = re.findall(r"wattspan: Without (.*): .* Grant CAP_NET_ADMIN", agent.said)
        assert "exit accounting (taskstats)" in without, "it says what it cannot have"
        assert agent.end() == 0, agent.said
