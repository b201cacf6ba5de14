"""ports.Caps over the socket: guarantees for a tuner."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from testbed.capper_bench import Bench, W
from testbed.capper_server import CapperServer
from testbed.fixtures import entered, short_path
from testbed.waiting import eventually

from wattspan.capper.protocol import CapperClient
from wattspan.clock import SystemClock
from wattspan.model import SECOND
from wattspan.ports import Caps, CapsError
from wattspan.testing import ManualClock

path = entered(lambda: short_path("capper.sock"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def server(bench: Bench, path: Path) -> Iterator[CapperServer]:
    with CapperServer(bench, path) as server:
        yield server


@pytest.fixture
def client(server: CapperServer) -> Iterator[CapperClient]:
    client = server.client()
    yield client
    client.close()


def test_client_implements_the_port(client: CapperClient) -> None:
    caps: Caps = client
    assert [row.state.name for row in caps.rows()] == ["GPU0", "GPU1"]


def test_client_rows_equal_the_capper_rows(client: CapperClient, bench: Bench) -> None:
    client.hold("job", {bench.key(): 500 * W}, "because")
    told = client.rows()
    assert told == bench.manager.rows()
    assert (told[0].holder, told[0].wanted, told[0].why) == ("job", 500 * W, "because")


def test_new_lease_replaces_and_release_restores(client: CapperClient, bench: Bench) -> None:
    client.hold("job", {bench.key(0): 500 * W}, "why")
    rows = client.hold("job", {bench.key(1): 500 * W}, "why")
    assert [row.state.requested for row in rows] == [650 * W, 500 * W]
    client.rows(renew=True)
    client.release("another")
    assert bench.stands == [650 * W, 500 * W]
    client.release("job")
    assert bench.stands == [650 * W, 650 * W]


def test_refusal_names_device_and_cause(client: CapperClient, bench: Bench) -> None:
    bench.board(1).locked = True
    with pytest.raises(CapsError, match="gpu1 is locked") as refused:
        client.hold("job", {bench.key(1): 500 * W}, "why")
    assert (refused.value.refusal, refused.value.device) == ("locked", "gpu1")


def test_two_tuners_do_not_hold_one_device(
    server: CapperServer, client: CapperClient, bench: Bench
) -> None:
    client.hold("job", {bench.key(): 500 * W}, "why")
    second = server.client()
    with pytest.raises(CapsError, match="is held for 'job'") as refused:
        second.hold("job", {bench.key(): 500 * W}, "why")
    assert refused.value.refusal == "held"
    second.close()


def test_closing_the_client_restores_every_device(
    server: CapperServer, client: CapperClient, bench: Bench
) -> None:
    client.hold("job", {bench.key(): 500 * W}, "why")
    client.close()
    eventually(lambda: bench.stands[0] == 650 * W, "the original")


def test_client_reconnects_to_a_returning_capper(bench: Bench, path: Path) -> None:
    clock = ManualClock()
    client = CapperClient(path, clock, who="test", timeout=20.0)
    with CapperServer(bench, path):
        client.hold("job", {bench.key(): 500 * W}, "why")
    with pytest.raises(CapsError, match="No capper answers") as lost:
        client.rows(renew=True)
    assert lost.value.refusal == ""
    with CapperServer(bench, path):
        clock.advance(60)
        assert client.rows()[0].holder == ""
        client.close()


def test_client_retries_a_missing_capper_with_backoff(path: Path) -> None:
    clock = ManualClock()
    client = CapperClient(path, clock, who="test", timeout=0.01)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(128)
        listener.settimeout(0)
        attempts = 0
        for _ in range(600):  # ten minutes, a call a second
            clock.advance(1)
            with pytest.raises(CapsError):
                client.rows()
            try:
                listener.accept()[0].close()
                attempts += 1
            except BlockingIOError:
                pass
    assert 15 <= attempts <= 60


def test_client_waits_at_most_the_timeout_for_a_hung_capper(path: Path) -> None:
    clock = SystemClock()
    client = CapperClient(path, clock, who="test", timeout=0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        with pytest.raises(CapsError, match="it takes too long"):
            client.rows()
        with pytest.raises(CapsError, match="it takes too long"):  # without an attempt
            client.rows()


@pytest.mark.parametrize(
    "answer", [b"hello\n", b"{}\n", b"\xff\n", b'{"is":"state"}\n', b"", b"x" * 5_000_000]
)
def test_invalid_capper_response_is_an_error(path: Path, answer: bytes) -> None:
    client = CapperClient(path, SystemClock(), who="test", timeout=20.0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def talk() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                try:
                    peer.sendall(answer)
                except OSError:
                    return  # the buffer is full

        thread = threading.Thread(target=talk)
        thread.start()
        with pytest.raises(CapsError, match="No capper answers"):
            client.rows()
        thread.join(20)


def test_unlisted_user_is_refused(bench: Bench, path: Path) -> None:
    with CapperServer(bench, path, allowed=frozenset({os.getuid() + 1})) as server:
        client = server.client()
        with pytest.raises(CapsError, match=r"name it in \[caps\] users") as refused:
            client.rows()
        assert refused.value.refusal == "not_allowed"
        client.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may set a ceiling")
def test_ceiling_survives_its_writer_until_lifted(
    client: CapperClient, path: Path, bench: Bench
) -> None:
    (answer,) = spoken(path, b'{"do":"ceiling","limit":900000,"ttl":60000000000}')
    assert answer["ceiling"] == 900 * W
    eventually(lambda: sum(bench.stands) <= 900 * W, "the ceiling is kept")
    assert client.rows()[0].holder == "budget"
    assert client.state is not None
    assert [one.limit for one in client.state.ceilings] == [900 * W]
    spoken(path, b'{"do":"ceiling","limit":null}')
    eventually(lambda: bench.stands == [650 * W, 650 * W], "the originals")


def test_allotment_is_set_and_ends_in_time(bench: Bench, path: Path) -> None:
    clock = SystemClock()
    with CapperServer(bench, path, in_fleet=True) as server:
        client = server.client()
        assert client.allotment().until is None
        eventually(lambda: client.allotment().enforced == 400 * W, "the floors")
        until = clock.now().since_boot + 60 * SECOND
        client.allot(900 * W, 600 * W, until, "why")
        eventually(lambda: client.allotment().enforced == 900 * W, "the allotment")
        assert client.allotment().until == until
        ended = client.allot(0, 0, 0, "why")
        assert (ended.limit, ended.until) == (600 * W, None)
        eventually(lambda: client.allotment().enforced == 600 * W, "the fallback")
        client.close()


def test_allotment_outside_a_fleet_is_an_error(client: CapperClient) -> None:
    with pytest.raises(CapsError, match=r"\[fleet\] endpoints"):
        client.allotment()
    with pytest.raises(CapsError, match="is in no fleet"):
        client.allot(1, 1, 1, "why")


# ----------------------------------------------------------------------------------- the wire


def spoken(path: Path, *lines: bytes) -> list[dict[str, object]]:
    """The answers to raw lines, sent one after the other."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(20)
        peer.connect(str(path))
        told = []
        with peer.makefile("rb") as answers:
            for line in lines:
                peer.sendall(line + b"\n")
                told.append(msgspec.json.decode(answers.readline()))
        return told


ONE_CAP = b'{"knob":"gpu_power","device":"%s","value":500000}'


def is_answered(path: Path) -> bool:
    """True if the capper accepts a new peer; a rejected peer may lose its pipe first."""
    try:
        (answer,) = spoken(path, b'{"do":"status"}')
    except (BrokenPipeError, ConnectionResetError):
        return False
    return answer["is"] == "state"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b'{"do":"format-disk"}',
        b'{"do":"hold"}',
        b'{"do":"hold","job":"x","caps":[{"knob":"gpu_power","device":"gpu0","value":"1"}]}',
        b'{"do":"hold","job":"x","caps":[{"knob":"voltage","device":"gpu0","value":1}]}',
        b'{"do":"status","extra":1}',
        b'{"do":"hello","who":"%s"}' % (b"x" * 201),
        b'{"do":"hold","job":"","caps":[]}',
        b'{"do":"hold","job":"%s","caps":[]}' % (b"x" * 201),
        b'{"do":"hold","job":"x","caps":[],"why":"%s"}' % (b"x" * 4001),
        b'{"do":"hold","job":"x","caps":[%s]}' % b",".join([ONE_CAP % b"gpu0"] * 257),
        b'{"do":"hold","job":"x","caps":[%s]}' % (ONE_CAP % (b"x" * 201)),
        b'{"do":"release","job":"%s"}' % (b"x" * 201),
        b'{"do":"ceiling","limit":1,"why":"%s"}' % (b"x" * 4001),
        b'{"do":"renew"',
        b"[" * 30_000,
    ],
)
def test_invalid_request_line_is_answered_with_an_error(
    server: CapperServer, path: Path, bench: Bench, line: bytes
) -> None:
    refused, after = spoken(path, line, b'{"do":"status"}')
    assert (refused["is"], refused["reason"]) == ("refused", "malformed")
    assert str(refused["sentence"]).startswith("The request is invalid")
    assert after["is"] == "state"
    assert bench.events == []


def test_lease_requires_a_hello(server: CapperServer, path: Path) -> None:
    hold = b'{"do":"hold","job":"x","caps":[{"knob":"gpu_power","device":"gpu0","value":500000}]}'
    refused, greeted, held = spoken(path, hold, b'{"do":"hello","who":"me"}', hold)
    assert refused["sentence"] == "Send hello first."
    assert greeted["is"] == held["is"] == "state"


def test_other_protocol_version_is_answered_with_ours(server: CapperServer, path: Path) -> None:
    (refused,) = spoken(path, b'{"do":"hello","who":"me","version":2}')
    assert "version 1" in str(refused["sentence"])


def test_repeated_refusal_is_audited_once(server: CapperServer, path: Path, bench: Bench) -> None:
    hold = b'{"do":"hold","job":"x","caps":[{"knob":"gpu_power","device":"gpu9","value":500000}]}'
    spoken(path, b'{"do":"hello","who":"me"}', *[hold] * 10)
    assert bench.deeds() == ["refuse"]
    assert bench.events[0].uid == os.getuid()
    assert bench.events[0].pid == os.getpid()


def test_one_peer_cannot_take_every_connection(server: CapperServer, path: Path) -> None:
    opened = []
    for _ in range(80):
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(20)
        peer.connect(str(path))
        opened.append(peer)
    refused = opened[-1].recv(65536)
    assert b"too many" in refused
    for peer in opened:
        peer.close()
    eventually(lambda: is_answered(path), "it answers again")
    assert server.bench.manager.leases.longest == 10 * SECOND
