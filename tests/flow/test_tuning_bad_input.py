"""A tuner with a faulty capper, and a superfluous second agent."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from testbed.capper_bench import Bench
from testbed.capper_server import CapperServer
from testbed.fixtures import entered, short_path
from testbed.tuned_host import Host
from testbed.tuned_stack import Tuned, TunedHost
from testbed.waiting import eventually

from wattspan.capper.protocol import CapperClient, RefusalReason, RefusedReply
from wattspan.model import DecisionReason, Move
from wattspan.ports import Caps, Clock

MINUTES = 10
ATTEMPTS = MINUTES * 60 / 15 + 8
"""As many as there are at half the longest delay, and those before it has grown so long."""

STRANGER = RefusedReply(
    reason=RefusalReason.NOT_ALLOWED,
    sentence="User 1001 may not ask the capper; name it in [caps] users.",
)
ANOTHER = RefusedReply(
    reason=RefusalReason.MALFORMED,
    sentence="This capper speaks version 2 of its protocol, not 1; restart whichever is older.",
)


path = entered(lambda: short_path("capper.sock"))


class Impostor:
    """A listener on the capper's socket that sends one fixed response and counts its clients."""

    def __init__(self, path: Path, answer: bytes) -> None:
        self.answer, self.callers = answer, 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(16)
        self._thread = threading.Thread(target=self._serve, name="impostor", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):  # the client may have disconnected
                self.callers += 1
                connection.sendall(self.answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self._socket.close()


def told(answer: RefusedReply) -> bytes:
    return msgspec.json.encode(answer) + b"\n"


Way = Callable[[Clock], Caps]


@pytest.fixture
def closing(path: Path) -> Iterator[Way]:
    """A client of the capper at ``path``; the test closes it at the end."""
    with contextlib.ExitStack() as clients:

        def way(clock: Clock) -> Caps:
            client = CapperClient(path, clock, who="test", timeout=60.0)
            clients.callback(client.close)
            return client

        yield way


@pytest.mark.parametrize(
    ("answer", "reason", "says"),
    [
        (told(STRANGER), DecisionReason.NO_PERMISSION, "name it in [caps] users"),
        (told(ANOTHER), DecisionReason.NO_CAPPER, "restart whichever is older"),
        (b"\xff\xfe\x00 garbage \n", DecisionReason.NO_CAPPER, "invalid response"),
        (b'{"is":"state","rows":7}\n', DecisionReason.NO_CAPPER, "invalid response"),
        (b"", DecisionReason.NO_CAPPER, "the connection was closed"),
    ],
    ids=["not on the list", "another version", "garbage", "of another shape", "silence"],
)
def test_capper_that_is_of_no_use_leaves_advice_one_line_and_no_storm(
    path: Path, closing: Way, answer: bytes, reason: DecisionReason, says: str
) -> None:
    impostor = Impostor(path, answer)
    try:
        host = Host(caps=closing)
        host.train()
        host.run(MINUTES * 60)
        (line,) = host.logged
        assert says in line
        assert 3 < impostor.callers < ATTEMPTS
        accounts = host.tuner.accounts()
        assert accounts.capper.answers is False
        assert says in accounts.capper.trouble
        (row,) = accounts.rows
        assert row.decision.move is Move.DECLINE
        assert row.decision.reason is reason
        assert row.decision.sentence.startswith("Advice: try ")
        assert not row.applied
        assert host.tuner._trouble is reason
        assert len(host.book.decided) < 5
    finally:
        impostor.close()


def test_newly_permitted_user_is_served(tmp_path: Path, path: Path, closing: Way) -> None:
    impostor = Impostor(path, told(STRANGER))
    host = Host(caps=closing)
    host.train()
    host.run(60)
    impostor.close()
    path.unlink()
    # The capper limits requests per second: of the tuner's time, which runs faster than real time
    with CapperServer(Bench(tmp_path), path, clock=host.clock):
        host.run(60)
        assert host.tuner.accounts().capper.answers is True
        assert [row.state.name for row in host.tuner.accounts().caps] == ["GPU0", "GPU1"]


@pytest.mark.exhaustive
def test_second_agent_reports_the_first_and_does_not_disturb_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with TunedHost() as host, Tuned(host, first) as agent:
        agent.caps()
        with Tuned(host, second) as another:
            eventually(lambda: "/metrics" in another.said, "the second agent serves")
            assert f"{host.sockets}/api.sock: another agent listens there" in another.said
            assert another.capper is None
            agent.caps()
            assert another.metrics("wattspan_capper_up") == {"": 1}
        assert agent.process.poll() is None
        agent.caps()
        decisions = agent.metrics("wattspan_autotune_decisions_total")
        assert not any("foreign_writer" in name and count for name, count in decisions.items())
