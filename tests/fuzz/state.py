"""The agent's own files, torn by a crash or written by somebody else."""

from __future__ import annotations

import functools
import json
import sqlite3
from contextlib import closing

import msgspec
from testbed.known_totals import Books

from fuzz.registry import target
from fuzz.supply import Supply, folder, one_line, told
from wattspan.config import StoreSettings as StoreSettings
from wattspan.model import (
    Checkpoint,
    Decision,
    DecisionReason,
    Instant,
    Knob,
    Move,
    RecordedDecision,
)
from wattspan.otlp.spool import Spool
from wattspan.ports import StoreError
from wattspan.service.decision_events import decision_record
from wattspan.storage.checkpoints import (
    AlternatingCheckpointFiles,
    CheckpointError,
    checkpoint_from_json,
    checkpoint_to_json,
    pack_checkpoint,
    unpack_checkpoint,
)
from wattspan.storage.store import Store
from wattspan.storage.tuning import CertificationStore, DecisionLog, read_decisions
from wattspan.testing import ManualClock
from wattspan.tuning.decisions.certified_settings import CertifiedSettings, from_json, to_json
from wattspan.tuning.decisions.values import CertifiedLevels, Fingerprint
from wattspan.tuning.serialization import recorded_decision_to_json

_HELD = Decision(Move.HOLD, DecisionReason.CERTIFIED, "Hold.", {"gpu0": 320_000}, {"bound": 0.04})
_DECIDED = RecordedDecision(Instant(5, 7), "train", Knob.GPU_POWER, _HELD, True)
_TOLD = msgspec.json.encode(recorded_decision_to_json(_DECIDED)) + b"\n"


@target(
    "decision-book",
    whose="a previous agent, torn by a crash",
    holds="reading and appending never raise; every entry read can be serialised again",
    watched=("wattspan.storage.tuning", "wattspan.tuning.serialization"),
    samples=(_TOLD, _TOLD * 2 + _TOLD[:40], b"null\n[]\n"),
    words=(b"1e400", b"9" * 400, b"[" * 3000, b'"at_mono_ns":', b'"caps":', b'"shown":', b"\n"),
)
def decision_book(data: bytes) -> None:
    with folder() as path:
        (path / "d.jsonl").write_bytes(data)
        for decided in read_decisions(path / "d.jsonl"):
            msgspec.json.encode(recorded_decision_to_json(decided))
            decision_record(decided)
        book = DecisionLog(path / "d.jsonl", ManualClock())
        book.add(_DECIDED)
        assert len(book.recent("train")) <= data.count(b"\n") + 2
        assert any(one.decision.same_as == _HELD.same_as for one in book.recent("train"))


_JOB = Fingerprint("train.py", "H100", "570", 1, "trainer", "step")
_SETTING = CertifiedLevels(level=3, original=9, slowdown=0.02, saving=0.2, pairs=40, noise=0.01)


@target(
    "certified-book",
    whose="a previous agent, torn by a crash",
    holds="a file whose settings are within bounds and can be serialised again, or an empty one",
    watched=("wattspan.storage.tuning", "wattspan.tuning.decisions.certified_settings"),
    samples=(
        json.dumps(to_json(CertifiedSettings().certified(_JOB, Knob.GPU_POWER, _SETTING))).encode(),
        b"{}",
    ),
    words=(b"1e400", b"9" * 400, b"[" * 3000, b'"levels":', b"NaN", b"true", b"null"),
)
def certified_book(data: bytes) -> None:
    with folder() as path:
        (path / "tuning").mkdir()
        (path / "tuning" / "certified.json").write_bytes(data)
        said: list[str] = []
        book = CertificationStore.open(path, emulated=False, log=said.append)
        for sentence in said:
            one_line(sentence, 1500)
        known = book._memory
        assert from_json(json.loads(json.dumps(to_json(known)))) == known
        for entry in known.entries.values():
            assert 0 <= entry.setting.level <= entry.setting.original
        book.certified(_JOB, Knob.GPU_POWER, _SETTING)
        assert not (path / "tuning" / "certified.json").is_symlink()


@functools.cache
def _books() -> Checkpoint:
    host = Books()
    for _ in range(3):
        host.spend({1: 5, 2: 7})
    return host.now()


@target(
    "books",
    whose="a previous agent, torn by a crash",
    holds="a checkpoint that can be serialised again, or none",
    watched=("wattspan.storage.checkpoints", "wattspan.storage.checkpoints"),
    samples=(b"\0{}",),
    words=(b"1e400", b"9" * 400, b"[" * 3000, b'"accounts":', b'"processes":', b"null", b"-1"),
)
def books(data: bytes) -> None:
    supply = Supply(data)
    kind, text = supply.byte() % 3, supply.rest()
    if kind == 2:  # the decision log, which has two files
        with folder() as path:
            (path / "s.latest-0").write_bytes(text)
            latest = AlternatingCheckpointFiles(path / "s.db")
            latest.write(_books())
            latest.close()
            again = AlternatingCheckpointFiles(path / "s.db")
            assert again.previous() is not None
            again.close()
        return
    try:
        opening = checkpoint_from_json(text) if kind == 0 else unpack_checkpoint(text)
    except CheckpointError as error:
        told(error)
        return
    assert checkpoint_from_json(checkpoint_to_json(opening)) == opening
    pack_checkpoint(opening)


@functools.cache
def _database() -> bytes:
    """A store's file as an agent leaves it."""
    with folder() as path:
        host = Books()
        store = Store(path, StoreSettings(), host.clock)
        for _ in range(3):
            host.spend({1: 5, 2: 7})
            store.write(host.now())
        name = store.path
        store.close()
        with sqlite3.connect(name) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            database.execute("PRAGMA journal_mode = DELETE")
        database.close()
        return name.read_bytes()


@target(
    "store-file",
    whose="a failing disk, or a user who edits the file",
    holds="opened or moved aside with a sentence; then checkpoints are written and history is read",
    watched=("wattspan.storage",),
    samples=(b"", b"\0\0\0\x60\5", b"\0\0\x20\0\xff\0\1\0\0\0\1"),
    words=(b"\0\0\0\x12", b"\0\x10", b"SQLite format 3\0", b"\xff" * 8),
)
def store_file(data: bytes) -> None:
    """The input is edits of a sound file: an offset of three bytes, a length, new bytes."""
    content, supply = bytearray(_database()), Supply(data)
    while not supply.is_empty:
        at = int.from_bytes(supply.take(3), "big") % (len(content) + 1)
        new = supply.chunk()
        content[at : at + len(new)] = new
        if not content:
            break
    with folder() as path:
        probe = Store(path, StoreSettings(), ManualClock())
        name = probe.path
        probe.close()
        name.write_bytes(content)
        said: list[str] = []
        host = Books()
        try:
            store = Store(path, StoreSettings(), host.clock, log=said.append)
        except StoreError as error:
            told(error)
            return
        with closing(store):
            for _ in range(2):
                host.spend({1: 5, 2: 7})
                store.write(host.now())
            assert store.health.failures or store.last_checkpoint() is not None
        for sentence in said:
            assert sentence.isprintable(), sentence


@target(
    "spool",
    whose="a previous agent, torn by a crash",
    holds="only records with valid checksums; subsequent writes are kept",
    watched=("wattspan.otlp.spool", "wattspan.otlp.spool"),
    samples=(b"\0",),
    words=(b"WSPN", b"\xff" * 4, b"\0" * 4),
)
def spool(data: bytes) -> None:
    supply = Supply(data)
    kind, junk = supply.byte() % 2, supply.rest()
    with folder() as path:
        said: list[str] = []
        if kind:  # a sound file with the input written over its end
            first = Spool(path, 1 << 20, said.append)
            assert first.keep(b"one", 1) is not None
            assert first.keep(b"other", 2) is not None
            first.close()
            (file,) = path.glob("*.spans")
            sound = file.read_bytes()
            cut = supply_at(junk, len(sound))
            file.write_bytes(sound[:cut] + junk[2:])
        else:
            (path / "000000000001.spans").write_bytes(junk)
        again = Spool(path, 1 << 20, said.append)
        for record in list(again.restored()):
            body = record.read()
            assert body is None or len(body) == record.size
            record.settle(record.spans)
        kept = again.keep(b"new", 1)
        assert kept.read() == b"new"
        again.close()


def supply_at(junk: bytes, size: int) -> int:
    """A place in a file, from the first two bytes."""
    return int.from_bytes(junk[:2], "little") % (size + 1)
