"""Input of the only process with write access to hardware: requests, ceilings, its own files."""

from __future__ import annotations

import re
import selectors
import socket
from contextlib import closing
from pathlib import Path

import msgspec
from testbed.capper_bench import BOOT, Bench, W, entry

from fuzz.registry import target
from fuzz.supply import Supply, folder, one_line
from wattspan.capper import protocol
from wattspan.capper.audit import AuditEvent
from wattspan.capper.ceilings import (
    CeilingFile,
)
from wattspan.capper.journal import encode_journal
from wattspan.capper.planner import OperatorLimits
from wattspan.capper.server import CapperSocketServer, _ClientConnection
from wattspan.service.decision_events import AuditTail
from wattspan.testing import ManualClock
from wattspan.util.unix_sockets import PeerCredentials

_ORIGINAL, _LEAST, _FLOOR = 650 * W, 200 * W, 420 * W
_WATCHED = ("wattspan.capper", "wattspan.model.settings")
_HOLD = b'{"do":"hold","job":"a","caps":[{"knob":"gpu_power","device":"gpu0","value":500000}]}\n'


class _Conversation:
    """A server, its desk and two boards, with one connection whose other end is ours."""

    def __init__(self, path: Path, uid: int) -> None:
        self.bench = Bench(path, limits=OperatorLimits(_FLOOR / (700 * W), 0, 1.0))
        clock = self.bench.clock
        self.desk = self.bench.desk()
        self.listener = socket.socket(socket.AF_UNIX)
        self.server = CapperSocketServer(self.listener, self.desk, clock, frozenset({uid}))
        theirs, self.ours = socket.socketpair()
        theirs.setblocking(False)
        self.ours.setblocking(False)
        self.connection = _ClientConnection(theirs, 1, PeerCredentials(77, uid))
        self.server._connections[1] = self.connection
        self.server._selector.register(theirs, selectors.EVENT_READ, None)

    @property
    def is_open(self) -> bool:
        return 1 in self.server._connections

    def say(self, data: bytes) -> bytes:
        """Response to the input."""
        for at in range(0, len(data), 1 << 14):
            if not self.is_open:
                break
            self.ours.sendall(data[at : at + (1 << 14)])
            self.server._serve(self.connection, selectors.EVENT_READ)
        try:
            return self.ours.recv(1 << 20)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self.server.close()
        self.ours.close()


@target(
    "capper-protocol",
    whose="every user with access to the capper",
    holds=(
        "each line is answered; no board ever leaves its clamps; in the end its original is "
        "restored"
    ),
    watched=_WATCHED,
    samples=(
        b'\0{"do":"hello","who":"t"}\n' + _HOLD + b'{"do":"renew"}\n{"do":"release","job":"a"}\n',
        b'\1{"do":"hello","who":"t","version":1}\n' + _HOLD + b'{"do":"status"}\n{"do":"accept"}\n',
        b'\2{"do":"ceiling","limit":900000,"why":"grid","ttl":1000000000}\n{"do":"restore"}\n',
        b'\0{"do":"ceiling","limit":null}\n{"do":"ceiling","limit":1}\n',
    ),
    words=(
        *(b'"do":"hello"', b'"do":"hold"', b'"do":"ceiling"', b'"limit":', b'"ttl":', b'"lease":'),
        *(b"-1", b"1e3", b"null", b"9" * 20, b"9" * 400, b"\\ud800", b"\\u0000", b"[[[[", b"\n"),
    ),
)
def capper_protocol(data: bytes) -> None:
    supply = Supply(data)
    kind, said = supply.byte(), supply.rest()
    uid = 0 if kind & 1 else 1000
    with folder() as path, closing(_Conversation(path, uid)) as talk:
        _converse(talk, said, by_turns=bool(kind & 2))


def _converse(talk: _Conversation, said: bytes, *, by_turns: bool) -> None:
    bench, desk = talk.bench, talk.desk
    is_accepted = False
    for piece in said.splitlines(keepends=True) if by_turns else [said]:
        answers = talk.say(piece)
        bench.clock.advance(1.0)
        desk.turn()
        for answer in answers.splitlines():
            told = msgspec.json.decode(answer, type=protocol.StateReply | protocol.RefusedReply)
            if isinstance(told, protocol.RefusedReply):
                one_line(told.sentence, 1000)
            else:
                assert len(told.rows) == 2
        is_accepted = is_accepted or b"accept" in piece
    if talk.is_open:
        desk.gone(1)
    for _, value in bench.actuator.written:
        assert value is None or _LEAST <= value <= _ORIGINAL, f"{value} was written"
    root = PeerCredentials(1, 0)
    desk.answer(2, root, protocol.CeilingRequest(limit=None))
    for _ in range(3):
        bench.clock.advance(1.0)
        desk.turn()
    assert bench.stands == [_ORIGINAL, _ORIGINAL], bench.stands
    for event in bench.events:
        one_line(event.job, 300)
        assert len(event.why) <= 1200
        msgspec.json.encode(event)


@target(
    "ceiling-file",
    whose="a writer of the file: a scheduler, a power manager",
    holds="a ceiling within its bounds, or one sentence and the last one in force",
    watched=("wattspan.capper.ceilings", "wattspan.model.settings"),
    samples=(
        b'watts = 1200\nttl = "1h"\nwhy = "grid event"\n',
        b"watts = 0\n",
        b"watts = 12.5\n",
    ),
    words=(b"watts", b"ttl", b"why", b"[", b"[[", b"inf", b"nan", b"0x", b"9" * 400, b'"""'),
)
def ceiling_file(data: bytes) -> None:
    with folder() as path:
        (path / "ceiling").write_bytes(b'watts = 777\nwhy = "before"\n')
        file = CeilingFile(path / "ceiling", ManualClock())
        before = file.poll(None)
        (path / "ceiling").unlink()
        (path / "ceiling").write_bytes(data)
        found = file.poll(before)
        one_line(file.trouble, 1000)
        if file.trouble:
            assert found == before
        if found is not None:
            assert 0 < found.limit <= 10**9
            one_line(found.why, 200)


@target(
    "capper-files",
    whose="a previous capper, torn by a crash",
    holds="invalid files are moved aside and reported; no board leaves its range",
    watched=_WATCHED,
    samples=(
        b"\0"
        + msgspec.json.encode(
            {"boot_id": BOOT, "version": 1, "entries": [msgspec.to_builtins(entry())]}
        ),
        b"\2" + encode_journal(BOOT, 2, 1, [entry()]),
        b"\1" + msgspec.json.encode({"requested": {"limit": 900_000, "why": "x", "boot_id": "b"}}),
        b"\1" + msgspec.json.encode({"written": {"limit": 9, "expires": 5, "expires_wall": 7}}),
        b'\1{"version":2,"requested":[{"limit":900000,"uid":0,"expires":5,"expires_wall":7}]}',
    ),
    words=(b'"entries"', b'"original"', b"null", b"-1", b"9" * 20, b"9" * 400, b"true"),
)
def capper_files(data: bytes) -> None:
    supply = Supply(data)
    kind, content = supply.byte(), supply.rest()
    is_journal, is_checked = not kind & 1, bool(kind & 2)
    with folder() as path:
        if is_journal:
            (path / f"journal-{BOOT}.{'a.jsonl' if is_checked else 'json'}").write_bytes(content)
        else:
            (path / "ceilings.json").write_bytes(content)
        with closing(_Conversation(path, 0)) as talk:
            talk.bench.manager.turn()
            for _ in range(2):
                talk.bench.clock.advance(1.0)
                talk.desk.turn()
            msgspec.json.encode(talk.desk.state())
            for _, value in talk.bench.actuator.written:
                assert value is None or _LEAST <= value <= 700 * W, f"{value} was written"
            assert len(talk.bench.journal.trouble) < 2000


@target(
    "audit-log",
    whose="a capper whose log may be torn",
    holds="every complete event once and in order; no other output, no repetition",
    watched=("wattspan.service.decision_events",),
    samples=(
        b'{"at":1,"deed":"write","knob":"gpu_power","device":"gpu0","new":5}\n{"at":2,"deed":"end"}\n',
        b'{"at":1,"deed":"start","later":{"a":[1]}}\n',
    ),
    words=(b'"at"', b'"deed"', b"[" * 50, b"\n", b"\\ud800"),
)
def audit_log(data: bytes) -> None:
    with folder() as path:
        told: list[AuditEvent] = []
        tail = AuditTail(path / "audit.jsonl", told.append, ManualClock())
        (path / "audit.jsonl").touch()
        tail.begin()
        half = len(data) // 2
        with (path / "audit.jsonl").open("ab", buffering=0) as log:
            for piece in (data[:half], data[half:]):
                log.write(piece)
                tail.turn()
        tail.close()
        whole = [line for line in data.split(b"\n")[:-1] if re.match(rb"\s*\{", line)]
        assert len(told) <= len(whole)
