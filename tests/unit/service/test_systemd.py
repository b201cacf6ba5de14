"""Notifications to the service manager: by whom, how often, and never more than one line of it."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from testbed.service_manager import ServiceManager
from testbed.simulated_host import PACKAGE
from testbed.waiting import receive_instead_of_main

from wattspan.config import Config, SpansSettings, changed_keys
from wattspan.model import (
    SECOND,
    DomainAccount,
    Instant,
    Provenance,
    Snapshot,
    SourceHealth,
)
from wattspan.ports import ListenError
from wattspan.service.systemd import (
    LONGEST_STATUS,
    StopRequest,
    SystemdNotifier,
    Watchdog,
    agent_status,
    hangup_reloads,
    inherited_unix_socket,
    stop_on_signals,
)
from wattspan.testing import ManualClock

NOW = Instant(10**12, 1_700_000_000 * 10**9)


def test_notify_uses_the_service_manager_socket() -> None:
    with ServiceManager() as manager:
        notify = SystemdNotifier(manager.environ)
        notify("READY=1")
        notify("RELOADING=1", "MONOTONIC_USEC=7")
        assert manager.messages == ["READY=1", "RELOADING=1\nMONOTONIC_USEC=7"]


def test_abstract_address_is_understood_as_well() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0wattspan-test-{os.getpid()}")
        SystemdNotifier({"NOTIFY_SOCKET": f"@wattspan-test-{os.getpid()}"})("READY=1")
        assert manager.recv(100) == b"READY=1"


def test_notify_without_a_service_manager_is_a_no_op() -> None:
    SystemdNotifier({})("READY=1")
    SystemdNotifier({"NOTIFY_SOCKET": "/nowhere/at/all"})("READY=1")
    assert not SystemdNotifier({}).available


def test_child_of_a_service_does_not_notify() -> None:
    with ServiceManager(watchdog=3) as manager:
        environ = {**manager.environ, "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
        notify = SystemdNotifier.from_environment(environ)
        assert environ == {"HOME": "/"}
        assert (notify.available, notify.period) == (True, 3 * SECOND)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"WATCHDOG_USEC": ""},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "-5"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "1"},
    ],
)
def test_foreign_or_invalid_watchdog_is_ignored(told: dict[str, str]) -> None:
    assert SystemdNotifier({"NOTIFY_SOCKET": "/nowhere", **told}).period is None


def test_watchdog_is_notified_four_times_a_period() -> None:
    clock = ManualClock()
    with ServiceManager(watchdog=2) as manager:
        watchdog = Watchdog(SystemdNotifier(manager.environ), clock)
        for _ in range(100):
            watchdog()
            clock.advance(0.1)
            assert manager.messages  # taken at once: a kernel may keep no more than ten
        assert manager.count("WATCHDOG=1") == 20


def test_hanging_loop_stops_watchdog_notifications() -> None:
    clock = ManualClock()
    with ServiceManager(watchdog=2) as manager:
        watchdog = Watchdog(SystemdNotifier(manager.environ), clock)
        watchdog()
        clock.advance(60)
        assert manager.count("WATCHDOG=1") == 1
        watchdog()
        watchdog()
        assert manager.count("WATCHDOG=1") == 2


def test_disabled_watchdog_is_not_notified() -> None:
    with ServiceManager() as manager:
        Watchdog(SystemdNotifier(manager.environ), ManualClock())()
        assert manager.messages == []


def test_status_is_sent_on_change() -> None:
    with ServiceManager() as manager:
        notify = SystemdNotifier(manager.environ)
        notify.ready("One.")
        for sentence in ("One.", "Two.", "Two.", "One."):
            notify.status(sentence)
        assert manager.messages == ["READY=1\nSTATUS=One.", "STATUS=Two.", "STATUS=One."]


def test_status_text_cannot_inject_messages() -> None:
    """A cause may quote foreign text."""
    with ServiceManager() as manager:
        notify = SystemdNotifier(manager.environ)
        notify.status("A device called\nMAINPID=1\x00\x1b[2J.")
        notify.status("x" * 5000)
        first, second = manager.messages
        assert "\n" not in first
        assert first.isprintable()
        assert len(second) == len("STATUS=") + LONGEST_STATUS


def test_reload_notification_has_its_monotonic_time() -> None:
    with ServiceManager() as manager:
        SystemdNotifier(manager.environ).reloading(1_234_567_891)
        assert manager.lines[:2] == ["RELOADING=1", "MONOTONIC_USEC=1234567"]


def test_full_notify_socket_does_not_block_the_loop() -> None:
    with ServiceManager(watchdog=1) as manager:
        notify = SystemdNotifier(manager.environ)
        for _ in range(2000):  # more than any queue of datagrams holds
            notify.alive()
        assert 0 < manager.count("WATCHDOG=1") <= 2000


# --------------------------------------------------------------------------- the one sentence


def test_status_lists_listeners_sources_and_failures() -> None:
    health = (
        SourceHealth("rapl", True, 1, 0),
        SourceHealth("nvml", False, 1, 1),
        SourceHealth("store", False, 1, 1),
    )
    snapshot = Snapshot(NOW, 1, "host", domains=(DomainAccount(PACKAGE),), health=health)
    assert agent_status(snapshot, ["http://127.0.0.1:9949/metrics"]) == (
        f"serving http://127.0.0.1:9949/metrics; 1 energy counter of {PACKAGE.source};"
        " missing: nvml, store."
    )


def test_empty_status_has_a_message() -> None:
    assert agent_status(Snapshot(NOW, 1, "host"), []) == "no listener; no energy counter answers."


def test_status_names_emulation() -> None:
    domain = replace(PACKAGE, provenance=Provenance.EMULATED)
    snapshot = Snapshot(NOW, 1, "host", domains=(DomainAccount(domain),))
    assert agent_status(snapshot, []).startswith("EMULATED: ")


def test_vanished_counter_is_not_listed_as_available() -> None:
    account = DomainAccount(PACKAGE, present=False)
    told = agent_status(Snapshot(NOW, 1, "host", domains=(account,)), [])
    assert "no energy counter answers" in told


def test_long_status_is_shortened_with_counts() -> None:
    told = agent_status(
        Snapshot(NOW, 1, "host"), [f"http://h:{port}" for port in range(9)], "x" * 999
    )
    assert "http://h:2 and 6 more" in told
    assert len(told) < LONGEST_STATUS


# ------------------------------------------------------------------------------- inherited ones


def handed(*sockets: socket.socket) -> tuple[dict[str, str], int]:
    """Environment of a service manager that passes these sockets, and the first descriptor."""
    first = sockets[0].fileno() if sockets else 3
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(sockets)), "HOME": "/"}
    return environ, first


def test_listening_unix_socket_is_taken_over_and_not_passed_on(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        os.set_inheritable(listener.fileno(), True)
        environ, first = handed(listener)
        found = inherited_unix_socket(environ | {"LISTEN_FDNAMES": "capper"}, first=first)
        assert found.address == str(tmp_path / "s")
        assert not os.get_inheritable(found.socket.fileno())
        found.socket.detach()


def test_inherited_sockets_are_read_once() -> None:
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "HOME": "/"}
    assert inherited_unix_socket(environ) is None  # another process's
    assert environ == {"HOME": "/"}


@pytest.mark.parametrize("count", ["", "0", "-1", "many"])
def test_missing_inherited_sockets_give_none(count: str) -> None:
    assert inherited_unix_socket({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": count}) is None


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_inherited_socket_without_listener_is_rejected(kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_UNIX, kind) as idle:
        environ, first = handed(idle)
        with pytest.raises(ListenError, match="no listening Unix stream socket"):
            inherited_unix_socket(environ, first=first)


def test_network_socket_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as network:
        environ, first = handed(network)
        with pytest.raises(ListenError, match="no listening Unix stream socket"):
            inherited_unix_socket(environ, first=first)


def test_file_in_place_of_a_socket_is_refused() -> None:
    with Path(os.devnull).open() as file:
        environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
        with pytest.raises(ListenError, match="no socket"):
            inherited_unix_socket(environ, first=file.fileno())


# ------------------------------------------------------------------------------------- signals


def test_sighup_reloads_with_a_service_manager() -> None:
    assert hangup_reloads(managed=True)


def test_reload_requests_are_coalesced_per_running_reload() -> None:
    request, told = StopRequest(), list[str]()
    request.request_reload()
    request.register(lambda: told.append("stop"), lambda: told.append("reload"))
    assert told == ["reload"]
    assert [request.take_reload(), request.take_reload()] == [True, False]
    request.request_reload()
    assert request.take_reload()
    assert not request.requested


def test_signal_that_interrupts_no_wait_of_the_main_thread_stops_it_at_once() -> None:
    waits = queue.SimpleQueue[str]()
    with stop_on_signals() as request:
        request.register(lambda: waits.put("stop"), wake=lambda: waits.put("wake"))
        threading.Thread(target=receive_instead_of_main, args=(signal.SIGTERM,)).start()
        # Handlers run at the end of each round of a loop, by Python 3.14 not after each call.
        told = {waits.get(timeout=20) for _ in range(2)}
    assert told == {"stop", "wake"}


# -------------------------------------------------------------------------------- changed keys


def test_reload_lists_changed_keys_without_secrets() -> None:
    spans = SpansSettings(forward="http://c:4318", forward_headers="authorization=one")
    old = Config(spans=spans, sources={"rapl": SpansSettings()})
    new = replace(old, spans=msgspec.structs.replace(spans, forward_headers="authorization=two"))
    assert changed_keys(old, old) == frozenset()
    assert changed_keys(old, new) == {"spans.forward_headers"}
    assert changed_keys(old, replace(old, sources={})) == {"sources.rapl"}
