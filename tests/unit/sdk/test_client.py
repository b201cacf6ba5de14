"""Windows: measuring by hand, against a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from testbed.announcing import listening
from testbed.constant_history import GPU, ConstantPast
from testbed.query_server import FAR, STARTED, QueryServer, powered
from testbed.waiting import eventually

import wattspan
from wattspan import sdk as sdk_agent
from wattspan.http.limits import ServerLimits
from wattspan.model import Consumer, HwType, Milliwatts, StaticBasis
from wattspan.sdk import (
    KEPT_WINDOWS,
    READ_TOGETHER,
    AgentBusyError,
    UnreadWindows,
    run_directories,
)
from wattspan.sdk.client import Energy, HungAgents, read_devices, request_json
from wattspan.util.unix_sockets import ACKNOWLEDGEMENTS


@pytest.fixture
def past() -> ConstantPast:
    """We draw 4 W of CPU and 0.4 W of memory, our children 1 W and 0.1 W."""
    return powered(os.getpid(), watts=4, children={2**22: 1})


@pytest.fixture
def agent(
    past: ConstantPast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[QueryServer]:
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(sdk_agent, "registration", sdk_agent.WatchRegistration())
    with QueryServer(tmp_path, past) as server:
        yield server


@pytest.fixture
def no_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(sdk_agent, "registration", sdk_agent.WatchRegistration())
    return tmp_path


# ------------------------------------------------------------------------------------- figures


@pytest.mark.usefixtures("agent")
def test_window_reports_its_energy() -> None:
    with wattspan.window("train") as w:
        sum(range(10_000))
    seconds = w.seconds
    assert seconds > 0
    assert w.joules["cpu"] == pytest.approx(5 * seconds, rel=0.01, abs=2e-6)
    assert w.process["cpu"] == pytest.approx(4 * seconds, rel=0.01, abs=2e-6)
    assert w.host["cpu"] == pytest.approx(30 * seconds, rel=0.01, abs=2e-6)
    assert w.total == w.joules.total == sum(w.joules.values())
    assert [device.name for device in w.devices] == ["package-0", "package-1", "dram-0"]
    assert w.coverage == 1.0
    assert w.uncertainty["cpu"] <= w.joules["cpu"]
    assert w.provenance == {"cpu": "derived", "memory": "measured"}
    assert w.ok


def test_window_divides_its_gpu_energy_into_static_and_dynamic(
    agent: QueryServer, past: ConstantPast
) -> None:
    past.known_domains = (*past.known_domains, GPU)
    past.devices[GPU.id] = past.gpu_power = 300_000
    past.static_power = Milliwatts(110_000), StaticBasis.LOWER_BOUND
    with wattspan.window("train") as w:
        sum(range(10_000))
    assert (w.static, w.dynamic) == (
        pytest.approx(110 * w.seconds, rel=0.01, abs=2e-6),
        pytest.approx(190 * w.seconds, rel=0.01, abs=2e-6),
    )
    assert w.static_basis == "lower_bound"
    assert w.static + w.dynamic == pytest.approx(w.joules["gpu"], abs=2e-6)


def test_window_has_no_split_while_the_static_power_is_unknown(
    agent: QueryServer, past: ConstantPast
) -> None:
    past.known_domains = (*past.known_domains, GPU)
    past.devices[GPU.id] = past.gpu_power = 300_000
    with wattspan.window("train") as w:
        sum(range(10_000))
    assert w.joules["gpu"] > 0
    assert (w.static, w.dynamic, w.static_basis) == (None, None, None)


@pytest.mark.usefixtures("agent")
def test_windows_nest_and_overlap() -> None:
    with wattspan.window("outer") as outer:
        first = wattspan.window("first").begin()
        second = wattspan.window("second").begin()
        first.end()
        second.end()
    assert outer.seconds > max(first.seconds, second.seconds)
    assert outer.total >= max(first.total, second.total)
    assert first._begun < second._begun < first._ended < second._ended


@pytest.mark.usefixtures("agent")
def test_windows_may_be_open_in_many_threads_at_once() -> None:
    together = threading.Barrier(8)
    windows: list[wattspan.Window] = []

    def work() -> None:
        with wattspan.window("step") as w:
            together.wait(20)
        assert w.total > 0
        windows.append(w)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(windows) == 8
    assert max(w._begun for w in windows) < min(w._ended for w in windows)


@pytest.mark.usefixtures("agent")
def test_window_read_does_not_block_the_event_loop() -> None:
    async def main() -> float:
        with wattspan.window("request") as w:
            await asyncio.to_thread(int)
        measurements = await asyncio.gather(w.aresult(), w.aresult())
        return measurements[0].joules.total

    assert asyncio.run(main()) > 0


def test_unsettled_window_is_waited_for(agent: QueryServer, past: ConstantPast) -> None:
    past.until = 0
    with wattspan.window("train") as w:
        pass
    threading.Timer(0.05, lambda: setattr(past, "until", FAR)).start()
    assert w.result(timeout=30).complete


def test_unsettled_window_is_reported(agent: QueryServer, past: ConstantPast) -> None:
    past.until = 0
    with wattspan.window("train") as w:
        pass
    with pytest.raises(
        wattspan.NotSettledError, match=r"'train'.* after 0 s\. Read it again"
    ) as no:
        w.result(timeout=0)
    assert isinstance(no.value, TimeoutError)
    assert no.value.partial.joules.coverage == 0.0
    assert w.result(timeout=0, partial=True).complete is False
    past.until = FAR
    assert w.result(timeout=0).complete  # unknown energy is requested again


def test_settled_window_is_requested_once(agent: QueryServer, past: ConstantPast) -> None:
    with wattspan.window("train") as w:
        pass
    total = w.total
    past.powers.clear()
    assert w.total == total


def test_unknown_energy_is_an_error_and_no_zero(agent: QueryServer, past: ConstantPast) -> None:
    past.horizon = FAR
    with wattspan.window("train") as w:
        pass
    with pytest.raises(wattspan.NotMeasuredError, match="cpu, memory was not measured"):
        _ = w.total
    assert not w.ok
    assert dict(w.host) == {}


def test_unmeasured_device_is_unknown(agent: QueryServer, past: ConstantPast) -> None:
    past.known_domains = (*past.known_domains, GPU)
    with wattspan.window("train") as w:
        pass
    assert {device.kind: device.joules for device in w.devices}["gpu"] is None
    with pytest.raises(KeyError, match="'gpu' has no known energy here; known: cpu, memory"):
        _ = w.host["gpu"]
    assert "gpu" not in w.host
    assert w.host.get("gpu") is None
    assert w.host.unknown == ("gpu",)
    with pytest.raises(wattspan.NotMeasuredError, match="gpu was not measured"):
        _ = w.host.total
    assert w.host["cpu"] > 0


def test_window_from_time_without_an_idle_power_is_a_lower_bound(
    agent: QueryServer, past: ConstantPast
) -> None:
    past.bounds = {HwType.CPU: FAR}
    with wattspan.window("train") as w:
        pass
    assert w.joules.lower_bound == ("cpu",)
    assert w.certainty == w.joules.certainty == "lower_bound"
    assert repr(w.joules).startswith("<Energy cpu≥")
    assert w.host.certainty == "known"


def test_energy_mapping_has_a_readable_repr() -> None:
    energy = Energy({"cpu": 1.5, "gpu": 2.0}, {"cpu": 0.1, "gpu": 0.2}, 0.5)
    assert dict(energy) == {"cpu": 1.5, "gpu": 2.0}
    assert energy.total == 3.5
    assert energy.total_uncertainty == pytest.approx(0.3)
    assert repr(energy) == "<Energy cpu=1.5 J, gpu=2 J, coverage 50%>"
    assert len(energy) == 2
    assert energy.certainty == "known"
    assert Energy({"cpu": 1.0}, {}, 1.0, unknown=("gpu",)).certainty == "lower_bound"
    assert Energy({}, {}, 0.0).certainty == "unknown"


# ------------------------------------------------------------------------------------ no agent


def test_missing_agent_fails_only_at_the_first_read(no_agent: Path) -> None:
    with wattspan.window("train") as w:
        done = True
    assert done
    assert w.seconds > 0
    assert not w.ok
    with pytest.raises(wattspan.AgentUnavailableError) as error:
        _ = w.joules
    assert f"{no_agent}/api.sock (no such file or directory)" in str(error.value)
    assert "wattspan run" in str(error.value)


def test_socket_without_listener_is_reported(no_agent: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(no_agent / "api.sock"))
    with pytest.raises(wattspan.AgentUnavailableError, match="connection refused"):
        request_json("/v1/status", {})


def test_agent_exit_during_a_request_is_reported(no_agent: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(no_agent / "api.sock"))
        listener.listen()

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(100)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(wattspan.AgentUnavailableError, match=r"api\.sock"):
            request_json("/v1/status", {})
        thread.join()


@pytest.fixture
def hung_agent(no_agent: Path) -> Iterator[Any]:
    """A listener that nobody serves."""
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(no_agent / "api.sock"))
        listener.listen()
        listener.settimeout(60)
        yield listener


def queries(listener: Any) -> list[Any]:
    """The connections with a query of energy, of all that wait to be accepted."""
    found = []
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            connection, _ = listener.accept()
            if b" /v1/energy" in (received := connection.recv(1000)):
                assert ACKNOWLEDGEMENTS.encode() in received
                found.append(connection)
            else:  # the registration
                connection.close()
    listener.settimeout(60)
    return found


@pytest.mark.usefixtures("hung_agent")
def test_agent_that_hangs_is_reported_however_long_the_energy_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wattspan.sdk.client.LONGEST_SILENCE", 0.05)
    with wattspan.window() as w:
        pass
    with pytest.raises(wattspan.AgentUnavailableError, match="timed out"):
        w.result(timeout=10**6)


def test_hung_agent_is_waited_for_once_by_all_windows(
    hung_agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wattspan.sdk.client.LONGEST_SILENCE", 0.05)
    windows = [wattspan.window().begin().end() for _ in range(3)]
    for w in windows:
        with pytest.raises(wattspan.AgentUnavailableError, match="timed out"):
            w.result()
    with pytest.raises(wattspan.AgentUnavailableError, match="ago, and has sent nothing since"):
        read_devices(1, 2)
    (asked,) = queries(hung_agent)
    asked.close()


@pytest.mark.parametrize("sign", [b"HTTP/1.1 100 Continue\r\n\r\n", b""], ids=["byte", "end"])
def test_hung_agent_that_answers_or_ends_its_query_is_asked_again(
    hung_agent: Any, sign: bytes
) -> None:
    for _ in range(2):
        with pytest.raises(wattspan.AgentUnavailableError, match="timed out"):
            request_json("/v1/energy", {}, silence=0.05)
    (asked,) = queries(hung_agent)
    if sign:
        asked.sendall(sign)
    else:
        asked.close()

    def answer() -> None:
        connection, _ = hung_agent.accept()
        connection.recv(1000)
        body = b'{"devices": []}'
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        connection.close()

    thread = threading.Thread(target=answer)
    thread.start()
    assert request_json("/v1/energy", {}, margin=60) == {"devices": []}
    thread.join()
    asked.close()


@pytest.mark.parametrize("limits", [{"margin": 0.02}, {"margin": 0.02, "silence": 1.0}])
def test_agent_slower_than_an_impatient_query_does_not_hang(
    hung_agent: Any, no_agent: Path, past: ConstantPast, limits: dict[str, float]
) -> None:
    with pytest.raises(wattspan.AgentUnavailableError, match="timed out"):
        request_json("/v1/energy", {}, **limits)
    with pytest.raises(wattspan.AgentUnavailableError, match=r"\(timed out\)"):  # asked again
        request_json("/v1/energy", {}, **limits)
    asked = queries(hung_agent)
    assert [len(one.recv(1)) for one in asked] == [0, 0]  # closed
    for one in asked:
        one.close()


@pytest.mark.usefixtures("hung_agent")
def test_agent_that_replaces_a_hung_one_is_asked_at_once(
    no_agent: Path, past: ConstantPast
) -> None:
    with pytest.raises(wattspan.AgentUnavailableError, match="timed out"):
        request_json("/v1/energy", {}, silence=0.05)
    (no_agent / "api.sock").unlink()
    with QueryServer(no_agent, past):
        assert request_json("/v1/status", {})["version"]


def test_child_of_a_fork_closes_the_connections_to_hung_agents() -> None:
    import socket

    ours, agents = socket.socketpair()
    with ours, agents:
        hung = HungAgents()
        hung.add("api.sock", 1, ours)
        with pytest.raises(TimeoutError):
            hung.check("api.sock", 1)
        hung.forget()
        hung.check("api.sock", 1)
        assert ours.fileno() == -1


@pytest.mark.parametrize("timeout", [0.0, 0.5, 5.0, 1e6, inf])
def test_silent_wait_of_an_older_agent_is_no_hang(
    monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    """It sends nothing before its answer, once the energy settles or the wait of the query ends."""
    asked: list[tuple[float, float, float]] = []

    def ask(path: str, query: dict[str, str], **limits: Any) -> dict[str, Any]:
        wait = float(query["wait"].removesuffix("ms")) / 1000
        asked.append((wait, limits["silence"], limits["patience"]))
        return {"devices": []}

    monkeypatch.setattr("wattspan.sdk.client.request_json", ask)
    read_devices(1, 2, timeout=timeout)
    ((wait, silence, patience),) = asked
    assert wait + 1.4 <= silence <= 2
    assert min(timeout, 20) - 2 < patience < 60  # others may have the turn for long


@pytest.mark.parametrize("query", ["pid=self", "of=devices"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_agent_acknowledges_a_query_of_energy_before_it_settles(
    agent: QueryServer, past: ConstantPast, tmp_path: Path, method: str, query: str
) -> None:
    import socket

    past.until = 0  # nothing settles
    body = b"[[1,2]]" if method == "POST" else b""
    query += "&wait=50s" + ("" if body else "&start=mono:1&end=mono:2")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(tmp_path / "api.sock"))
        length = f"content-length: {len(body)}"
        head = f"{method} /v1/energy?{query} HTTP/1.1\r\nhost: agent\r\n{length}\r\n\r\n"
        connection.sendall(head.encode() + body)
        connection.settimeout(40)
        assert connection.recv(13) == b"HTTP/1.1 100 "


def test_foreign_program_on_the_socket_is_not_an_agent(no_agent: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(no_agent / "api.sock"))
        listener.listen()

        def greet() -> None:
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
            connection.close()

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(wattspan.MeasurementError, match="no wattspan agent: status 200"):
            request_json("/v1/status", {})
        thread.join()


@pytest.mark.usefixtures("agent")
def test_agents_own_sentence_is_passed_on() -> None:
    with pytest.raises(wattspan.RefusedError, match="there is no such path"):
        request_json("/v2/energy", {})


def test_rate_limited_client_is_not_reported_as_missing_agent(no_agent: Path) -> None:
    with QueryServer(no_agent, limits=ServerLimits(rate=1, rejection_delay=0.0)):

        def ask_on() -> None:
            for _ in range(10_000):
                request_json("/v1/status", {})

        with pytest.raises(wattspan.RefusedError, match="More than 1 requests a second"):
            ask_on()


def test_window_of_a_busy_agent_is_asked_for_again(no_agent: Path, past: ConstantPast) -> None:
    with QueryServer(no_agent, past, limits=ServerLimits(rate=1, rejection_delay=0.0)):
        with wattspan.window("train") as w:
            pass

        def refused() -> bool:
            try:
                request_json("/v1/status", {})
            except AgentBusyError:
                return True
            return False

        eventually(refused, "the agent refuses")
        assert w.result(timeout=60).complete


@pytest.mark.parametrize(
    ("environ", "places"),
    [
        ({}, ["/run/wattspan"]),
        ({"XDG_RUNTIME_DIR": "/run/user/5"}, ["/run/wattspan", "/run/user/5/wattspan"]),
        ({"WATTSPAN_RUN_DIR": "/x", "XDG_RUNTIME_DIR": "/run/user/5"}, ["/x"]),
    ],
)
def test_agent_socket_is_searched_in_the_run_directories(
    environ: dict[str, str], places: list[str]
) -> None:
    assert list(run_directories(environ)) == places


# ------------------------------------------------------------------------------- use and misuse


@pytest.mark.usefixtures("no_agent")
def test_window_is_used_once_and_in_order() -> None:
    w = wattspan.window("train")
    with pytest.raises(wattspan.WindowError, match="'train', not begun> is not open"):
        w.end()
    with pytest.raises(wattspan.WindowError, match="never begun"):
        _ = w.seconds
    with w:
        with pytest.raises(wattspan.WindowError, match="still open"):
            _ = w.joules
        with pytest.raises(wattspan.WindowError, match="begun before"):
            w.begin()
    with pytest.raises(wattspan.WindowError, match="is not open"):
        w.end()
    with pytest.raises(wattspan.WindowError, match="begun before"):
        w.begin()


@pytest.mark.usefixtures("no_agent")
def test_window_may_end_before_its_block() -> None:
    with wattspan.window() as w:
        w.end()
        ended = w.seconds
        sum(range(1000))
    assert w.seconds == ended


@pytest.mark.usefixtures("agent")
def test_window_with_a_failing_block_is_measured() -> None:
    w = wattspan.window("train")
    with pytest.raises(ZeroDivisionError), w:
        _ = 1 / 0
    assert w.total > 0


def test_process_watch_is_requested_once(agent: QueryServer, past: ConstantPast) -> None:
    for _ in range(3):
        with wattspan.window():
            pass
    eventually(lambda: past.watched, "the agent is asked")
    assert past.watched == [(Consumer(os.getpid(), STARTED), True)]
    sdk_agent.registration.due = 0  # as time does: the agent may have restarted
    with wattspan.window():
        pass
    eventually(lambda: len(past.watched) == 2, "the agent is asked again")


def test_process_registers_its_edges_and_itself_with_a_restarted_agent(
    agent: QueryServer, past: ConstantPast, tmp_path: Path
) -> None:
    for runs in (1, 2):
        with listening(tmp_path) as feed:
            for _ in range(2):
                sdk_agent.registration.due = 0  # as time does
                with wattspan.window() as w:
                    pass
                (report,) = feed.drain()
                assert list(report.edges)[-2:] == list(w.period)
            eventually(lambda: len(past.watched) == runs, "the agent is asked once")  # noqa: B023


@pytest.mark.usefixtures("agent")
def test_restarted_agent_has_the_edges_that_it_missed_of_kept_windows(tmp_path: Path) -> None:
    with listening(tmp_path) as feed:
        windows = [wattspan.window().begin().end()]
        assert len(feed.drain()) == 1
    windows += [wattspan.window().begin().end() for _ in range(3)]
    with listening(tmp_path) as feed:
        sdk_agent.registration.due = 0  # as time does
        windows.append(wattspan.window().begin().end())
        (report,) = feed.drain()
    assert list(report.edges) == [edge for one in windows for edge in one.period]


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("restart", [True, False])
def test_new_agent_has_the_begin_of_an_open_window_that_it_missed(
    tmp_path: Path, *, restart: bool
) -> None:
    if restart:
        with listening(tmp_path) as feed:
            wattspan.window().begin().end()
            assert len(feed.drain()) == 1
    one = wattspan.window().begin()
    with listening(tmp_path) as feed:
        sdk_agent.registration.due = 0  # as time does
        one.end()  # no other window begins
        (report,) = feed.drain()
    assert list(report.edges)[-2:] == list(one.period)


@pytest.mark.usefixtures("agent")
def test_new_agent_is_told_no_edges_of_long_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = wattspan.window().begin()
    monkeypatch.setattr(sdk_agent, "TOLD_AGAIN", 0)
    with listening(tmp_path) as feed:
        sdk_agent.registration.due = 0  # as time does
        old.end()
        new = wattspan.window().begin().end()
        (report,) = feed.drain()
    assert list(report.edges) == list(new.period)


@pytest.mark.usefixtures("agent")
def test_program_with_windows_ends_quietly_and_its_edges_are_read(tmp_path: Path) -> None:
    script = "import wattspan; kept = wattspan.window().begin().end()"
    with listening(tmp_path) as feed:
        done = subprocess.run(
            [sys.executable, "-X", "dev", "-c", script],
            env=os.environ | {"PYTHONPATH": str(Path(wattspan.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        (report,) = feed.drain()
        assert (len(report.edges), report.gone) == (2, True)


def test_later_agent_receives_the_process_watch(no_agent: Path, past: ConstantPast) -> None:
    with wattspan.window() as w:
        pass
    assert w._begun < sdk_agent.registration.due < w._begun + sdk_agent.RENEW_AFTER
    with QueryServer(no_agent, past):
        sdk_agent.registration.due = 0  # as time does
        with wattspan.window():
            pass
        eventually(lambda: past.watched, "the agent is asked")


def test_invalid_run_directory_means_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in ("x" * 200, "/\0"):
        monkeypatch.setattr(sdk_agent, "run_directories", lambda told=directory: [told])
        monkeypatch.setattr(sdk_agent, "registration", sdk_agent.WatchRegistration())
        with wattspan.window() as w:
            pass
        assert sdk_agent.registration.due < w._begun + sdk_agent.RENEW_AFTER  # retried soon


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))]
)
def test_copy_has_the_values_of_its_window(
    again: Callable[[object], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = wattspan.window("step").begin().end()
    copied, unread = again(w), pickle.dumps(w)
    assert copied.joules == w.joules
    error = again(wattspan.NotSettledError("not yet", w.result()))
    assert (str(error), error.partial) == ("not yet", w.result())
    monkeypatch.setattr(sdk_agent, "registration", sdk_agent.WatchRegistration())
    assert again(w).joules == w.joules  # in another process: read before, so it has them
    with pytest.raises(wattspan.WindowError, match="belongs to another process"):
        pickle.loads(unread).result()


def test_forked_child_measures_itself(agent: QueryServer, past: ConstantPast) -> None:
    inherited = wattspan.window("of the parent").begin().end()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            with wattspan.window() as w:
                pass
            with pytest.raises(wattspan.WindowError, match="belongs to another process"):
                _ = inherited.joules
            os.write(writer, f"{w.process['cpu']}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        assert told.read() == "0.0"  # the child was not charged
    assert os.waitpid(child, 0)[1] == 0
    assert inherited.process["cpu"] > 0
    assert {consumer.pid for consumer, _ in past.watched} == {os.getpid(), child}


# ----------------------------------------------------------------------------- synchronisation


@pytest.mark.usefixtures("no_agent")
def test_device_is_waited_for_at_both_edges_on_request() -> None:
    called: list[int] = []
    w = wattspan.window(synchronize=lambda: called.append(w._begun))
    with w:
        pass
    assert called == [0, w._begun]


@pytest.mark.usefixtures("no_agent")
def test_hook_that_fails_is_heard_and_the_window_ends() -> None:
    calls = iter([None])

    with pytest.raises(StopIteration), wattspan.window(synchronize=lambda: next(calls)) as w:
        pass
    assert w.seconds > 0


@pytest.mark.usefixtures("no_agent")
def test_failing_block_is_not_hidden_by_its_device() -> None:
    calls = iter([None])

    with pytest.raises(ZeroDivisionError), wattspan.window(synchronize=lambda: next(calls)):
        _ = 1 / 0


@pytest.mark.parametrize(("initialised", "waits"), [(True, 2), (False, 0)])
@pytest.mark.usefixtures("no_agent")
def test_window_synchronises_pytorch_devices(
    monkeypatch: pytest.MonkeyPatch, initialised: bool, waits: int
) -> None:
    called: list[str] = []
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        is_initialized=lambda: initialised, synchronize=lambda: called.append("cuda")
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    with wattspan.window(synchronize="torch"):
        pass
    assert len(called) == waits


@pytest.mark.usefixtures("no_agent")
def test_jax_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    jax = ModuleType("jax")
    jax.live_arrays = lambda: ["array"]  # type: ignore[attr-defined]
    jax.block_until_ready = called.append  # type: ignore[attr-defined]
    jax.effects_barrier = lambda: called.append("effects")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", jax)
    with wattspan.window(synchronize="jax"):
        called.append("work")
    assert called == [["array"], "effects", "work", ["array"], "effects"]


@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.usefixtures("no_agent")
def test_framework_that_is_not_loaded_is_not_loaded_by_us(name: str) -> None:
    assert name not in sys.modules
    with wattspan.window(synchronize=name):
        pass
    assert name not in sys.modules


def test_unknown_hook_is_an_error_that_names_the_known() -> None:
    with pytest.raises(ValueError, match=r"synchronize='tensorflow'.*\"torch\", \"jax\""):
        wattspan.window(synchronize="tensorflow")


# ---------------------------------------------------------------------------------- decorators


@pytest.mark.usefixtures("agent")
def test_every_call_of_a_measured_function_is_a_window() -> None:
    seen: list[wattspan.Window] = []

    @wattspan.measured("step", report=seen.append)
    def step(x: int, *, y: int = 0) -> int:
        """Add."""
        return x + y

    assert step(1, y=2) == 3
    assert step(5) == 5
    assert [w.name for w in step.windows] == ["step", "step"]  # type: ignore[attr-defined]
    assert list(step.windows) == seen  # type: ignore[attr-defined]
    assert seen[0].total > 0
    assert (step.__name__, step.__doc__) == ("step", "Add.")


@pytest.mark.usefixtures("no_agent")
def test_measured_function_that_fails_has_a_window_too() -> None:
    @wattspan.measured
    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    (w,) = fails.windows  # type: ignore[attr-defined]
    assert w.seconds > 0
    assert w.name.endswith("fails")


@pytest.mark.usefixtures("no_agent")
def test_coroutines_and_generators_are_measured_to_their_end() -> None:
    order: list[str] = []

    def ended(w: wattspan.Window) -> None:
        order.append(f"{w.name} ended")

    @wattspan.measured("coroutine", report=ended)
    async def coroutine() -> str:
        await asyncio.to_thread(int)
        order.append("coroutine worked")
        return "value"

    @wattspan.measured("generator", report=ended)
    def generator() -> Iterator[int]:
        yield 1
        order.append("generator worked")
        yield 2

    @wattspan.measured("steps", report=ended)
    async def steps() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            order.append("steps closed")

    async def main() -> None:
        assert await coroutine() == "value"
        assert list(generator()) == [1, 2]
        walk = steps()
        assert await anext(walk) == 1
        await walk.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())
    assert order == [
        "coroutine worked",
        "coroutine ended",
        "generator worked",
        "generator ended",
        "steps closed",
        "steps ended",
    ]


@pytest.mark.usefixtures("no_agent")
def test_measured_async_generator_receives_values_and_errors() -> None:
    told: list[str] = []

    @wattspan.measured
    async def session() -> AsyncGenerator[str, str]:
        told.append((yield "open"))
        try:
            yield "used"
        except ValueError:
            told.append("rolled back")

    async def main() -> None:
        opened = session()
        assert await anext(opened) == "open"
        assert await opened.asend("begun") == "used"
        with pytest.raises(StopAsyncIteration):
            await opened.athrow(ValueError("failed"))

    asyncio.run(main())
    assert told == ["begun", "rolled back"]
    assert len(session.windows) == 1  # type: ignore[attr-defined]


@pytest.mark.usefixtures("no_agent")
def test_recursion_and_threads_have_a_window_for_each_call() -> None:
    @wattspan.measured
    def countdown(n: int) -> None:
        if n:
            countdown(n - 1)

    countdown(3)
    inner_first = [w.seconds for w in countdown.windows]  # type: ignore[attr-defined]
    assert len(inner_first) == 4
    assert inner_first == sorted(inner_first)


@pytest.mark.usefixtures("no_agent")
def test_windows_of_a_function_are_kept_within_bounds() -> None:
    @wattspan.measured
    def step() -> None: ...

    for _ in range(1010):
        step()
    assert len(step.windows) == 1000  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------- import


def test_importing_wattspan_loads_few_modules() -> None:
    script = (
        "import sys; before = set(sys.modules); import wattspan; wattspan.window\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env={"PYTHONPATH": str(Path(wattspan.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    heavy = {"asyncio", "socket", "http", "json", "threading", "typing", "dataclasses", "inspect"}
    assert not heavy & set(loaded)
    assert len(loaded) < 20


def test_every_public_name_can_be_had() -> None:
    for name in wattspan.__all__:
        assert getattr(wattspan, name) is not None
    assert set(wattspan.__all__) <= set(dir(wattspan))
    with pytest.raises(AttributeError, match="no attribute 'windows'"):
        _ = wattspan.windows  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------- many windows


@dataclass(eq=False)
class Read:
    """A window with an answer that is final once it is positive."""

    end: int
    answers: list[int] = field(default_factory=list)

    @property
    def period(self) -> tuple[int, int]:
        return 0, self.end

    def accept(self, kind: object, answer: int) -> bool:
        if answer > 0:
            self.answers.append(answer)
        return answer > 0


def test_unread_windows_are_asked_for_at_once_until_they_are_known() -> None:
    unread, asked = UnreadWindows(), list[list[int]]()
    windows = [Read(end) for end in range(1, 7)]

    def ask(periods: list[tuple[int, int]]) -> list[int]:
        asked.append([end for _, end in periods])
        return [end if end < 5 or len(asked) > 1 else 0 for _, end in periods]

    for one in windows:
        unread.add(one)
    del windows[3], one
    assert unread.read(windows[1], "gpu", ask) == 2
    assert unread.read(windows[3], "gpu", ask) == 5
    assert asked == [[2, 1, 3, 5, 6], [5, 6]]
    assert unread.read(windows[0], "gpu", ask) is None  # to be read alone, if at all
    assert unread.read(windows[0], "cpu", ask) == 1  # another kind
    assert asked[2:] == [[1, 2, 3, 5, 6]]
    assert [one.answers for one in windows] == [[1, 1], [2, 2], [3, 3], [5, 5], [6, 6]]


def test_many_unread_windows_are_asked_for_in_parts_the_newest_only() -> None:
    unread, sizes = UnreadWindows(), list[int]()
    windows = [Read(end) for end in range(1, KEPT_WINDOWS + 100)]
    for one in windows:
        unread.add(one)

    def ask(periods: list[tuple[int, int]]) -> list[int]:
        sizes.append(len(periods))
        return [1] * len(periods)

    for one in windows[-KEPT_WINDOWS:]:
        assert one.answers or unread.read(one, "", ask)
    assert sizes == [READ_TOGETHER] * (KEPT_WINDOWS // READ_TOGETHER)
    assert not windows[0].answers


def test_failed_question_for_several_windows_leaves_each_to_be_read_alone() -> None:
    unread, windows = UnreadWindows(), [Read(1), Read(2)]

    def ask(periods: list[tuple[int, int]]) -> list[int]:
        raise wattspan.sdk.RefusedError("POST /v1/energy: the path does not support this method")

    for one in windows:
        unread.add(one)
    assert unread.read(windows[0], "", ask) is None


def test_agent_of_an_earlier_release_is_asked_for_fewer_windows() -> None:
    unread, sizes = UnreadWindows(), list[int]()
    windows = [Read(end) for end in range(1, READ_TOGETHER + 1)]
    for one in windows:
        unread.add(one)

    def ask(periods: list[tuple[int, int]]) -> list[int]:
        sizes.append(len(periods))
        if len(periods) > 256:
            raise wattspan.sdk.RefusedError("Expected `array` of length <= 256")
        return [end for _, end in periods]

    for one in windows[5:] + windows[:5]:
        assert one.answers or unread.read(one, "", ask) == one.end
    assert sizes == [READ_TOGETHER, 256, 256, 256, 256]
    assert all(one.answers == [one.end] for one in windows)


def test_windows_without_an_answer_are_asked_for_again() -> None:
    unread, windows, answers = UnreadWindows(), [Read(1), Read(2), Read(3)], [1]

    def ask(periods: list[tuple[int, int]]) -> list[int]:
        if not answers:
            raise AgentBusyError("more than 500 requests a second")
        return answers[: len(periods)]

    for one in windows:
        unread.add(one)
    assert unread.read(windows[0], "", ask) == 1  # the agent had no time for the others
    answers.clear()
    with pytest.raises(AgentBusyError):  # after the whole timeout, so no second question
        unread.read(windows[1], "", ask)
    answers += [2, 3]
    assert unread.read(windows[1], "", ask) == 2
    assert [one.answers for one in windows] == [[1], [2], [3]]


def test_windows_are_read_with_the_first_of_them(agent: QueryServer) -> None:
    windows = [wattspan.window(str(i)).begin() for i in range(20)]
    for one in windows:
        sum(range(1000))
        one.end()
    assert windows[3].total > 0
    agent.close()
    for one in windows:
        assert one.joules["cpu"] == pytest.approx(5 * one.seconds, rel=0.01, abs=2e-6)


def test_window_that_is_not_known_yet_is_asked_for_again(
    agent: QueryServer, past: ConstantPast
) -> None:
    windows = [wattspan.window(str(i)).begin().end() for i in range(3)]
    past.until = windows[0].period[1]
    assert windows[0].ok
    with pytest.raises(wattspan.NotSettledError):
        windows[1].result(timeout=0)
    past.until = FAR
    assert windows[2].ok
    agent.close()
    assert windows[1].total > 0


def test_daemonising_program_keeps_the_files_that_it_opens_next(agent: QueryServer) -> None:
    script = """
import os, wattspan

with wattspan.window():
    pass
used = [int(name) for name in os.listdir("/proc/self/fd")]
targets = [os.readlink(f"/proc/self/fd/{n}") for n in used if os.path.lexists(f"/proc/self/fd/{n}")]
assert any("memfd:wattspan" in one for one in targets), targets
os.closerange(3, max(used) + 1)
files = [os.open("/dev/null", os.O_RDONLY) for _ in used]
wattspan.sdk.registration.renew()  # its connection is closed; it makes another
for one in files:
    os.fstat(one)
"""
    paths = {"PYTHONPATH": str(Path(wattspan.__file__).parents[1])}
    with listening(agent.folder):
        subprocess.run([sys.executable, "-c", script], env=os.environ | paths, check=True)
