"""The newest checkpoint survives any kill, and is never confused with an older one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.known_totals import Books

from wattspan.config import StoreSettings as Settings
from wattspan.model import (
    Checkpoint,
    EngineRow,
    HostRequests,
    InferenceRow,
    Instant,
    Microjoules,
    Nanoseconds,
    Reading,
)
from wattspan.storage.checkpoints import (
    AlternatingCheckpointFiles,
    CheckpointError,
    checkpoint_from_json,
    checkpoint_to_json,
    latest_checkpoint,
    pack_checkpoint,
    unpack_checkpoint,
)
from wattspan.storage.query import HistoryExtract, extract_history
from wattspan.storage.store import Store
from wattspan.testing import ManualClock


@pytest.fixture
def host() -> Books:
    return Books(ManualClock())


def files(folder: Path) -> list[Path]:
    return [folder / f"w.latest-{n}" for n in (0, 1)]


def again(folder: Path) -> Checkpoint | None:
    """State found by a new process."""
    latest = AlternatingCheckpointFiles(folder / "w.sqlite")
    latest.close()
    return latest.previous()


def total(opening: Checkpoint | None) -> int:
    assert opening is not None
    return sum(account.energy for account in opening.accounts)


def test_newest_is_found_by_the_next_process(tmp_path: Path, host: Books) -> None:
    assert again(tmp_path) is None
    latest = AlternatingCheckpointFiles(tmp_path / "w.sqlite")
    written = [host.spend({1: 10}) for _ in range(5)]
    for books in written:
        latest.write(books)
    assert total(again(tmp_path)) == total(written[-1])
    latest.close()
    latest = AlternatingCheckpointFiles(tmp_path / "w.sqlite")
    more = host.spend({1: 10})
    latest.write(more)
    latest.close()
    assert total(again(tmp_path)) == total(more)


@pytest.mark.parametrize("keep", [0, 1, 8, 23, 24, 25, 100, -1])
def test_torn_write_leaves_the_one_before(tmp_path: Path, host: Books, keep: int) -> None:
    latest = AlternatingCheckpointFiles(tmp_path / "w.sqlite")
    before, torn = host.spend({1: 10}), host.spend({1: 10})
    latest.write(before)
    latest.write(torn)
    latest.close()
    newest = files(tmp_path)[0]  # the second write
    newest.write_bytes(newest.read_bytes()[:keep])
    assert total(again(tmp_path)) == total(before)


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_flipped_bit_is_detected(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    folder, host = tmp_path_factory.mktemp("latest"), Books(ManualClock())
    latest = AlternatingCheckpointFiles(folder / "w.sqlite")
    sound = [host.spend({1: 10}), host.spend({1: 10})]
    for books in sound:
        latest.write(books)
    latest.close()
    newest = files(folder)[0]
    data = bytearray(newest.read_bytes())
    data[at % len(data)] ^= 1 << bit
    newest.write_bytes(data)
    assert total(again(folder)) == total(sound[0])


def test_checkpoint_keeps_the_totals_of_requests_to_language_models() -> None:
    row = InferenceRow(
        "llm", "m", {"input": Microjoules(3)}, {"output": 4}, {"model": 5}, (0, 2, 5)
    )
    checkpoint = Checkpoint(Instant(1, 2), "boot", inference=(row,), inference_idle=Microjoules(7))
    assert unpack_checkpoint(pack_checkpoint(checkpoint)) == checkpoint


def test_checkpoint_keeps_the_totals_of_the_host_and_of_engines() -> None:
    energy = {"gpu": Microjoules(3), "cpu": Microjoules(1)}
    host = HostRequests(energy, {"output": 4}, 5, (0, 5))
    row = InferenceRow("llm", "m", energy, {"output": 4}, {"model": 5}, (0, 2, 5), "ann", host)
    engine = EngineRow("chat", "m", "ann", Microjoules(8), {"output": 4}, 2, host=host)
    checkpoint = Checkpoint(
        Instant(1, 2), "boot", inference=(row,), inference_host_idle={"cpu": Microjoules(9)},
        engines=(replace(engine, token_energy={"all": (7, 1)}, idle=0.5, services=("llm",)),),
    )  # fmt: skip
    found = unpack_checkpoint(pack_checkpoint(checkpoint))
    assert found == replace(checkpoint, engines=(engine,))


FIRST_RELEASE = {
    **{"accounts": [], "readings": [], "groups": [], "processes": []},
    **{"other": {}, "retired": {}},
}
"""The fields of every checkpoint of the first release, beside its time and boot."""


def test_older_agent_reads_the_readings() -> None:
    """Its readings have four items, and it takes a longer array for a damaged store."""
    aged = Reading("gpu:0", Instant(1, 2), Microjoules(3), 4, Nanoseconds(5))
    text = checkpoint_to_json(replace(Books(ManualClock()).spend({1: 10}), readings=(aged,)))
    assert [len(one) for one in json.loads(text)["readings"]] == [4]
    assert checkpoint_from_json(text).readings == (aged._replace(stale=None),)


@pytest.mark.parametrize("missing", [*FIRST_RELEASE, "at", "boot_id", None])
def test_incomplete_checkpoint_is_none(missing: str | None) -> None:
    whole = {"at": [5, 7], "boot_id": "b", **FIRST_RELEASE}
    text = json.dumps({name: value for name, value in whole.items() if name != missing}).encode()
    if missing is None:
        assert checkpoint_from_json(text) == Checkpoint(Instant(5, 7), "b")
        return
    with pytest.raises(CheckpointError, match=missing):
        checkpoint_from_json(text)


def test_damaged_row_of_an_engine_costs_no_other_total() -> None:
    rows = [{"engine": "chat", "model": name, "owner": "", "energy": name} for name in "mn"]
    document = {"at": [5, 7], "boot_id": "b", **FIRST_RELEASE, "engines": [*rows, 7]}
    rows[1]["energy"] = 3
    found = checkpoint_from_json(json.dumps(document).encode())
    assert found.engines == (EngineRow("chat", "n", "", Microjoules(3)),)


def test_names_that_are_no_text_survive(tmp_path: Path, host: Books) -> None:
    books = host.spend({1: 10})
    row = replace(books.processes[0], info=replace(books.processes[0].info, command="\udcff\x00"))
    latest = AlternatingCheckpointFiles(tmp_path / "w.sqlite")
    latest.write(replace(books, processes=(row,)))
    latest.close()
    found = again(tmp_path)
    assert found.processes[0].info.command == "\udcff\x00"


def test_write_failure_is_logged_once_and_retried(tmp_path: Path, host: Books) -> None:
    said: list[str] = []
    latest = AlternatingCheckpointFiles(tmp_path / "w.sqlite", said.append)
    whole = latest._files
    with Path("/dev/full").open("wb") as full:
        latest._files = [full.fileno()] * 2
        latest.write(host.spend({1: 10}))
        latest.write(host.spend({1: 10}))
    latest._files = whole
    assert len(said) == 1
    assert "No space left" in said[0]
    last = host.spend({1: 10})
    latest.write(last)
    latest.close()
    assert total(again(tmp_path)) == total(last)


def test_checkpoint_with_the_latest_time_is_used(tmp_path: Path, host: Books) -> None:
    early, late = host.spend({1: 10}), host.spend({1: 10})
    assert latest_checkpoint(early, late) is late
    assert latest_checkpoint(late, None) is late
    assert latest_checkpoint(None, None) is None
    store = Store(tmp_path, Settings(), host.clock)
    assert store.previous is None
    assert store.write(early)
    store.write_latest(late)
    store.close()
    store = Store(tmp_path, Settings(), host.clock)
    assert total(store.previous) == total(late)
    store.close()


def test_recreated_history_does_not_start_with_the_full_total(tmp_path: Path, host: Books) -> None:
    kept = Store(tmp_path, Settings(), host.clock)
    whole = [host.spend({1: 10}) for _ in range(10)][-1]
    kept.write(whole)
    kept.write_latest(whole)
    kept.close()
    (tmp_path / "wattspan.sqlite").unlink()
    kept = Store(tmp_path, Settings(), host.clock)
    assert total(kept.previous) == total(whole)
    later = host.spend({1: 10})
    kept.write(later)
    kept.close()
    held = extract_history(tmp_path / "wattspan.sqlite", 0, 2**33)
    assert isinstance(held, HistoryExtract)
    assert sum(domain.energy for domain in held.domains) == total(later) - total(whole)
