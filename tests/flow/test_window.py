"""Windows in programs of their own, against the whole agent on an emulated host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed.program import ENVIRONMENT, PROGRAM, Running
from testbed.waiting import eventually

from wattspan.sdk import MeasurementError
from wattspan.sdk.client import request_json

BURN = """
import json, os, sys, threading, time
import wattspan

def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

def facts(w):
    m = w.result(timeout=30)
    return {
        "seconds": m.seconds, "joules": dict(m.joules), "process": dict(m.process),
        "host": dict(m.host), "coverage": [m.joules.coverage, m.host.coverage],
        "devices": {d.name: d.joules for d in m.devices}, "provenance": m.provenance,
        "emulated": m.emulated, "complete": m.complete,
    }
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("agent"), emulate="two-socket") as running:
        knows_all(running)
        yield running
        running.end()


def knows_all(running: Running) -> None:
    """Until every device has been measured, so that later windows are covered."""

    def settled() -> bool:
        try:
            told = request_json(
                "/v1/energy", {"start": "-100ms", "wait": "5s"}, directories=(str(running.run_dir),)
            )
        except MeasurementError:
            return False
        return told["host"]["coverage"] == 1.0

    eventually(settled, "the agent measures", within=60)


def program(agent: Running, script: str, within: tuple[str, ...] = ()) -> Any:
    """Output of a separate program, as JSON."""
    done = subprocess.run(
        [*within, sys.executable, "-c", BURN + textwrap.dedent(script)],
        env={**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(agent.run_dir)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nested_windows_add_up_to_no_more_than_the_one_around_them(agent: Running) -> None:
    outer, first, second = program(
        agent,
        """
        with wattspan.window("outer") as outer:
            with wattspan.window("first") as first:
                burn(0.3)
            with wattspan.window("second") as second:
                burn(0.6)
        print(json.dumps([facts(w) for w in (outer, first, second)]))
        """,
    )
    for kind in ("cpu", "memory"):
        assert min(first["process"][kind], second["process"][kind]) > 0
        parts = first["process"][kind] + second["process"][kind]
        assert parts <= outer["process"][kind] + 1e-5
        assert parts == pytest.approx(outer["process"][kind], rel=0.2)
        assert outer["process"][kind] < outer["host"][kind]
    assert outer["coverage"] == [1.0, 1.0]
    assert outer["complete"] is outer["emulated"] is True
    assert set(outer["provenance"].values()) == {"emulated"}
    assert sum(outer["devices"].values()) == pytest.approx(sum(outer["host"].values()), abs=1e-4)


def test_idle_window_has_almost_no_process_energy(
    agent: Running,
) -> None:
    idle, busy = program(
        agent,
        """
        burn(0.1)
        with wattspan.window("settled") as settled:
            pass
        facts(settled)  # the host was measured since: what was burnt is in no later interval
        with wattspan.window("idle") as idle:
            time.sleep(1)
        with wattspan.window("busy") as busy:
            burn(1)
        print(json.dumps([facts(idle), facts(busy)]))
        """,
    )
    assert idle["process"]["cpu"] < 0.1 * busy["process"]["cpu"]
    assert idle["host"]["cpu"] > busy["process"]["cpu"] * 0.1  # the host goes on drawing


def test_windows_are_per_thread(agent: Running) -> None:
    windows = program(
        agent,
        """
        windows = []
        def work():
            with wattspan.window() as w:
                burn(0.2)
            windows.append(facts(w))
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads: t.start()
        for t in threads: t.join()
        print(json.dumps(windows))
        """,
    )
    assert len(windows) == 4
    assert all(w["process"]["cpu"] > 0 for w in windows)


def test_forked_child_measures_itself_and_counts_for_its_parent(agent: Running) -> None:
    told = program(
        agent,
        """
        reader, writer = os.pipe()
        with wattspan.window("parent") as parent:
            child = os.fork()
            if not child:
                try:
                    with wattspan.window("child") as w:
                        burn(1)
                    os.write(writer, json.dumps(facts(w)).encode())
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
        os.close(writer)
        with os.fdopen(reader) as said:
            print(json.dumps({"child": json.load(said), "parent": facts(parent)}))
        """,
    )
    child, parent = told["child"], told["parent"]
    assert child["process"]["cpu"] > 0
    assert parent["process"]["cpu"] < 0.2 * child["process"]["cpu"]
    assert parent["joules"]["cpu"] == pytest.approx(child["process"]["cpu"], rel=0.3)


@pytest.mark.needs_root
def test_process_of_another_user_is_refused(agent: Running) -> None:
    agent.run_dir.chmod(0o755)
    nobody = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups")
    told = program(
        agent,
        f"""
        from wattspan.sdk.client import request_json
        with wattspan.window() as w:
            burn(0.2)
        try:
            request_json("/v1/energy", {{"start": "-1s", "pid": "{os.getpid()}"}})
        except wattspan.RefusedError as error:
            print(json.dumps([facts(w), str(error)]))
        """,
        within=nobody,
    )
    own, refusal = told
    assert own["process"]["cpu"] > 0
    assert f"process {os.getpid()}: it belongs to another user" in refusal


def test_command_window_includes_its_children(agent: Running, tmp_path: Path) -> None:
    out = tmp_path / "figures"
    burn = f"{sys.executable} -S -c 'import time\nwhile time.process_time() < 0.7: pass'"
    done = subprocess.run(
        [*PROGRAM, "measure", "--json", "-o", str(out), "--", "sh", "-c", f"{burn}; {burn}; true"],
        env={**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(agent.run_dir)},
        timeout=120,
        check=True,
    )
    assert done.returncode == 0
    told = json.loads(out.read_text())
    (one,) = told["runs"]
    assert one["cpu_seconds"] >= 1.4
    assert one["coverage"] == 1.0
    assert told["measured_by"] == "the running agent"
    assert told["emulated"] is True
    command, host = one["command"]["joules"], one["host"]["joules"]
    assert command["cpu"] < host["cpu"]
    assert command["cpu"] > 3  # the shell itself, without its children, spends a tenth of that


def test_command_is_measured_without_an_agent_on_an_emulated_host(tmp_path: Path) -> None:
    out = tmp_path / "figures"
    done = subprocess.run(
        [*PROGRAM, "measure", "--emulate", "laptop", "--interval", "50ms", "--json",
         "-o", str(out), "--", sys.executable, "-S", "-c",
         "import time\nwhile time.process_time() < 0.5: pass"],
        env={**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(out.read_text())
    assert told["measured_by"] == "wattspan measure itself, no agent"
    assert told["runs"][0]["coverage"] == 1.0
    assert 0 < told["mean"]["command_joules"]["total"] < told["mean"]["host_joules"]["total"]
    assert list(tmp_path.iterdir()) == [out]  # it serves no client and stores no data


@pytest.mark.long
def test_late_reads_of_windows_have_the_energy_of_an_immediate_read(tmp_path: Path) -> None:
    """A hundred readings a second: the history is thinned after 41 s."""
    with Running(tmp_path, emulate="two-socket", agent__interval="10ms") as agent:
        knows_all(agent)
        told = program(
            agent,
            """
            from wattspan.sdk.client import request_json

            def read(begin, end):
                query = {"pid": "self", "family": "1", "wait": "20s"}
                found = request_json(
                    "/v1/energy", {**query, "start": f"mono:{begin}", "end": f"mono:{end}"},
                    patience=20,
                )
                return [
                    *(one["joules"] for one in found["devices"]),
                    *found["family"]["joules"].values(),
                ]

            windows = []
            for _ in range(30):
                with wattspan.window() as w:
                    burn(0.02)
                    time.sleep(0.02)
                windows.append(w)
                time.sleep(0.02)
            early = [read(*w.period) for w in windows]
            inside = [(w.period[0] + 17_000_000, w.period[1] - 5_000_000) for w in windows]
            others = [read(*period) for period in inside]
            deadline = time.monotonic() + 150
            while [read(*one)[:4] for one in inside] == [one[:4] for one in others]:
                assert time.monotonic() < deadline, "the history is never thinned"
                time.sleep(1)
            windows[0].result()
            late = [
                [*(one.joules for one in w.devices), *w.joules.values()] for w in windows
            ]
            print(json.dumps([early, late, [read(*w.period) for w in windows]]))
            """,
        )
        agent.end()
    early, together, alone = told
    assert all(None not in one for one in early)
    assert together == early
    assert alone == early


def test_ended_agent_is_reported_and_a_new_one_is_used(tmp_path: Path) -> None:
    with Running(tmp_path) as first:
        knows_all(first)
        with subprocess.Popen(
            [sys.executable, "-c", BURN + textwrap.dedent(_ACROSS)],
            env={**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(first.run_dir)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as measured:
            assert measured.stdout.readline() == "measured\n"
            first.end()
            measured.stdin.write("ended\n")
            measured.stdin.flush()
            assert measured.stdout.readline() == "AgentUnavailableError\n"
            with Running(tmp_path, agent__run_dir=first.run_dir) as second:
                second.run_dir = first.run_dir
                knows_all(second)
                said, _ = measured.communicate("again\n", timeout=60)
                second.end()
    lost, over, *known = said.splitlines()
    assert (lost, known) == ("NotMeasuredError", ["True", "True"])
    coverage, *certainties = json.loads(over)  # of a window that was open over the restart
    assert 0 < coverage < 1
    assert certainties == ["lower_bound", "lower_bound"]
    assert measured.returncode == 0


_ACROSS = """
def tried(w):
    try:
        w.result(timeout=30).joules.total  # a busy agent may settle in more than the usual 5 s
    except wattspan.MeasurementError as error:
        return type(error).__name__
    return "known"

with wattspan.window() as w:
    burn(0.1)
w.result(timeout=30)
with wattspan.window() as lost:
    burn(0.1)
over = wattspan.window().begin()
burn(2.0)
print("measured", flush=True)
sys.stdin.readline()
print(tried(lost), flush=True)
sys.stdin.readline()
print(tried(lost), flush=True)
burn(0.5)
over.end()
found = over.result(timeout=30)
print(json.dumps([found.joules.coverage, over.certainty, found.host.certainty]))
print(found.joules["cpu"] > 0)
with wattspan.window() as w:
    burn(0.1)
print(w.result(timeout=30).host["cpu"] > 0, flush=True)
"""
