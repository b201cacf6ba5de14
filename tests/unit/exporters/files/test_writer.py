"""Rotation, retention, recovery and trouble with the disk."""

import errno
import gzip
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.file_writer import Desk, desk, read, settings
from testbed.process_rights import umask
from testbed.scrapes import full_host

from wattspan.model import Provenance
from wattspan.model.settings import SettingError
from wattspan_exporters.files import parts
from wattspan_exporters.files.exporter import SnapshotWriter
from wattspan_exporters.files.parts import FileName, host_component, parse_file_name, trim_part
from wattspan_exporters.files.rows import COLUMNS

LINES = 6  # series of hw.energy in full_host()
ONE = {"metrics": ["hw.energy"]}
FORMATS = [
    {"format": "jsonl"},
    {"format": "csv"},
    {"format": "jsonl", "compression": "gzip"},
    {"format": "csv", "compression": "gzip"},
    {"format": "parquet"},
]


def ids(keys: dict[str, str]) -> str:
    return "-".join(keys.values())


@pytest.mark.parametrize("keys", FORMATS, ids=ids)
def test_file_gets_its_name_when_complete(tmp_path: Path, keys: dict[str, str]) -> None:
    with desk(tmp_path, **ONE, **keys) as it:
        it.turn()
        it.turn()
        assert (len(it.parts), it.closed) == (1, [])
    (path,) = it.closed
    assert it.parts == []
    assert [row["metric"] for row in read(path)] == ["hw.energy"] * 2 * LINES
    assert it.log == []


def test_file_names_have_time_and_host_and_sort_by_time(tmp_path: Path) -> None:
    with desk(tmp_path, **ONE, rotate="10s") as it:
        for _ in range(3):
            it.turn()
    assert [path.name for path in it.closed] == [
        "wattspan-20231114T221330.000000Z-node7.jsonl",
        "wattspan-20231114T221340.000000Z-node7.jsonl",
        "wattspan-20231114T221350.000000Z-node7.jsonl",
    ]


def test_only_owner_and_group_may_read(tmp_path: Path) -> None:
    with umask(0), desk(tmp_path, **ONE, compression="gzip") as it:
        it.turn()
        modes = [stat.S_IMODE(path.stat().st_mode) for path in it.parts]
    assert modes == [0o640]
    assert [stat.S_IMODE(path.stat().st_mode) for path in it.closed] == [0o640]


def test_snapshot_is_written_once(tmp_path: Path) -> None:
    with desk(tmp_path, **ONE) as it:
        it.writer.turn(it.turn())
    assert len(read(it.closed[0])) == LINES


# -------------------------------------------------------------------------- rotation, retention


def test_file_ends_when_its_time_is_over(tmp_path: Path) -> None:
    with desk(tmp_path, **ONE, rotate="1m") as it:
        for _ in range(13):
            it.turn()
    assert [len(read(path)) // LINES for path in it.closed] == [6, 6, 1]


def test_file_ends_before_its_size_limit(tmp_path: Path) -> None:
    with desk(tmp_path, **ONE, rotate_size="8KiB") as it:
        for _ in range(9):
            it.turn()
    assert len(it.closed) > 2
    assert all(path.stat().st_size <= 8192 for path in it.closed)
    assert sum(len(read(path)) for path in it.closed) == 9 * LINES


def test_snapshot_larger_than_a_file_gets_its_own_file(tmp_path: Path) -> None:
    with desk(tmp_path, rotate_size="4KiB") as it:
        it.turn()
        it.turn()
    assert len(it.closed) == 2


def test_clock_set_back_neither_ends_nor_overwrites_a_file(tmp_path: Path) -> None:
    with desk(tmp_path, **ONE, rotate="20s") as it:
        for _ in range(8):
            it.turn(10)
            it.clock.step_wall(-10)
    assert len(it.closed) == 4
    assert sum(len(read(path)) for path in it.closed) == 8 * LINES


def test_oldest_files_make_room(tmp_path: Path) -> None:
    with desk(tmp_path, **ONE, rotate="10s", keep=3) as it:
        for _ in range(8):
            it.turn()
    assert [path.name[9:24] for path in it.closed] == [
        "20231114T221420", "20231114T221430", "20231114T221440",
    ]  # fmt: skip


def test_total_size_of_files_is_bounded(tmp_path: Path) -> None:
    with desk(tmp_path, **ONE, rotate="10s", keep_size="8KiB") as it:
        for _ in range(8):
            it.turn()
    assert 0 < sum(path.stat().st_size for path in it.closed) <= 8192


def test_foreign_files_are_never_removed(tmp_path: Path) -> None:
    strangers = [
        tmp_path / "notes.txt",
        tmp_path / "wattspan-20200101T000000.000000Z-node8.jsonl",
        tmp_path / "wattspan-2020-node7.jsonl",
    ]
    for stranger in strangers:
        stranger.write_text("x" * 9999)
    with desk(tmp_path, **ONE, rotate="10s", keep=1, keep_size="4KiB") as it:
        for _ in range(4):
            it.turn()
    assert all(stranger.exists() for stranger in strangers)


# ------------------------------------------------------------------------------------- recovery


def left_behind(directory: Path, keys: dict[str, str]) -> Path:
    """The part of an agent that was killed after two snapshots."""
    dying = Desk(directory, SnapshotWriter(settings(directory, **ONE, **keys), print), [])
    dying.turn()
    dying.turn()
    part = dying.writer._part
    part.close()
    part.folder.close()
    (path,) = dying.parts
    return path


@pytest.mark.parametrize("keys", FORMATS, ids=ids)
def test_parts_of_a_killed_agent_are_finished_by_the_next(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    part = left_behind(tmp_path, keys)
    with part.open("ab") as file:
        file.write(part.read_bytes().splitlines()[-1][:-9])
    with desk(tmp_path, **ONE) as it:
        it.turn(1000)
        assert [path.name for path in it.closed] == [part.name.removesuffix(".part")]
        assert len(read(it.closed[0])) == 2 * LINES
        assert it.writer.drops == 1
        assert "torn: 1 of 13 rows" in it.log[0]


@pytest.mark.parametrize("keys", FORMATS[:2], ids=ids)
def test_truncated_file_keeps_complete_rows(tmp_path: Path, keys: dict[str, str]) -> None:
    part = left_behind(tmp_path, keys)
    data = part.read_bytes()
    heading = 1 if keys["format"] == "csv" else 0
    for cut in range(0, len(data), 41):
        part.write_bytes(data[:cut])
        with desk(tmp_path, **ONE) as it:
            it.turn(1000)
            rows = [row for path in it.closed for row in read(path)]
            whole = max(0, data[:cut].count(b"\n") - heading)
            assert len(rows) == whole
        for path in tmp_path.iterdir():
            path.unlink()


def test_row_torn_inside_doubled_quotes_is_dropped(tmp_path: Path) -> None:
    whole = b'metric,attributes\na,"{""k"":""v""}"\n'
    part = tmp_path / "part"
    part.write_bytes(whole + b'b,"{""k"":""v"\n')
    with part.open("r+b") as file:
        assert trim_part(FileName(0, "host", "csv"), file.fileno()) == (1, len(whole), 1)
    assert part.read_bytes() == whole


def test_parts_of_older_versions_keep_their_columns(tmp_path: Path) -> None:
    part = left_behind(tmp_path, {"format": "csv"})
    lines = part.read_text().splitlines()
    part.write_text("".join(f"{line.rpartition(',')[0]}\n" for line in lines) + "torn,")
    with desk(tmp_path, **ONE) as it:
        it.turn(1000)
        rows = read(tmp_path / part.name.removesuffix(".part"))
    assert len(rows) == 2 * LINES
    assert "attributes" not in rows[0]
    assert it.writer.drops == 1


def test_zeros_that_a_power_cut_left_end_the_rows(tmp_path: Path) -> None:
    for keys in FORMATS[:2]:
        part = left_behind(tmp_path, keys)
        with part.open("ab") as file:
            file.write(b"\0" * 4096 + b"\n" + b"x\n" * 3)
        with desk(tmp_path, **ONE) as it:
            it.turn(1000)
            assert len(read(tmp_path / part.name.removesuffix(".part"))) == 2 * LINES
            assert it.writer.drops == 4
        for path in tmp_path.iterdir():
            path.unlink()


def test_part_that_another_agent_writes_is_left_alone(tmp_path: Path) -> None:
    with desk(tmp_path, **ONE) as one, desk(tmp_path, **ONE) as other:
        one.turn()
        other.turn()
        one.turn()
        assert len(one.parts) == 2
    assert sorted(len(read(path)) for path in one.closed) == [LINES, 2 * LINES]


def test_cleanup_does_not_remove_files_of_another_agent(tmp_path: Path) -> None:
    with desk(tmp_path, **ONE) as one, desk(tmp_path, **ONE, rotate="10s", keep=1) as other:
        one.turn()
        for _ in range(4):
            other.turn(20)
        one.turn()
        assert one.log == []
        assert one.writer.drops == 0


def test_truncated_draft_is_rewritten(tmp_path: Path) -> None:
    part = left_behind(tmp_path, {"compression": "gzip"})
    draft = tmp_path / f".{part.name.removesuffix('.part')}.draft"
    draft.write_bytes(b"half")
    with desk(tmp_path, **ONE) as it:
        it.turn(1000)
        assert len(read(tmp_path / part.name.removesuffix(".part"))) == 2 * LINES
        assert not draft.exists()


def test_finished_file_with_a_leftover_part_is_not_rewritten(tmp_path: Path) -> None:
    part = left_behind(tmp_path, {"compression": "gzip"})
    done = tmp_path / part.name.removesuffix(".part")
    done.write_bytes(gzip.compress(part.read_bytes()))
    with desk(tmp_path, **ONE) as it:
        it.turn(1000)
        assert it.closed == [done]
        assert not part.exists()


def test_missing_pyarrow_delays_rows_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "has_pyarrow", lambda: False)
    with desk(tmp_path, **ONE, format="parquet", rotate="10s") as it:
        it.turn()
        it.turn()
        assert (len(it.parts), it.closed) == (2, [])
        assert " install pyarrow`" in it.log[0]
        monkeypatch.undo()
        it.turn()
    assert [len(read(path)) for path in it.closed] == [LINES] * 3


def test_parts_that_cannot_be_finished_are_bounded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "has_pyarrow", lambda: False)
    with desk(tmp_path, **ONE, format="parquet", rotate="10s", keep=3) as it:
        for _ in range(20):
            it.turn()
        assert len(it.parts) <= 5


# ------------------------------------------------------------------------- trouble with the disk


def test_full_disk_loses_only_the_current_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        if full_now:
            os.pwrite(fd, data[:17], os.fstat(fd).st_size)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    write, full_now = os.write, False
    monkeypatch.setattr("wattspan_exporters.files.parts.os.write", full)
    with desk(tmp_path, **ONE) as it:
        it.turn()
        full_now = True
        it.turn()
        it.turn()
        health = it.writer.health
        full_now = False
        it.turn()
        assert it.writer.health.up
    assert [row["monotonic_ns"] for row in read(it.closed[0])[::LINES]] == [
        1_010_000_000_000, 1_040_000_000_000,
    ]  # fmt: skip
    assert it.writer.drops == 2 * LINES
    assert len(it.log) == 2
    assert "no space left on device" in it.log[0]
    assert "again; 12 rows were dropped" in it.log[1]
    assert (health.source, health.up, health.reads, health.failed) == ("files", False, 3, 2)
    assert [str(failure) for failure in health.failures] == it.log[:1]


def test_failed_write_is_truncated_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fd: int, data: bytes) -> int:
        if failing_now:
            write(fd, data[:100])
            raise OSError(errno.EIO, "Input/output error")
        return write(fd, data)

    def refusing(fd: int, size: int) -> None:
        if failing_now:
            raise OSError(errno.EIO, "Input/output error")
        truncate(fd, size)

    write, truncate, failing_now = os.write, os.ftruncate, False
    monkeypatch.setattr("wattspan_exporters.files.parts.os.write", failing)
    monkeypatch.setattr("wattspan_exporters.files.parts.os.ftruncate", refusing)
    with desk(tmp_path, **ONE) as it:
        it.turn()
        failing_now = True
        it.turn()
        it.turn()
        failing_now = False
        it.turn()
    assert len(read(it.closed[0])) == 2 * LINES
    assert it.writer.drops == 2 * LINES


def test_lasting_failure_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_behind(tmp_path, {"compression": "gzip"})

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with desk(tmp_path, **ONE, compression="gzip", rotate="20s") as it:
        monkeypatch.setattr("wattspan_exporters.files.parts._to_gzip", full)
        for _ in range(9):
            it.turn()
        monkeypatch.setattr("wattspan_exporters.files.parts.os.write", full)
        for _ in range(9):
            it.turn()
        assert [line[:13] for line in it.log] == ["Cannot finish", "Cannot write "]
        monkeypatch.undo()
        it.turn(100)
        assert [line[:9] for line in it.log[2:]] == ["Files are"] * 2
        assert it.parts[:-1] == []


def test_unexpected_error_is_logged_once_until_the_next_snapshot(tmp_path: Path) -> None:
    with desk(tmp_path, **ONE) as it:
        for _ in range(3):
            it.writer.failed_unexpectedly(RuntimeError("no idea"))
        assert not it.writer.health.up
        it.turn()
        assert it.writer.health.up
        said, over = it.log
    assert said.startswith(f"Cannot write a snapshot to {tmp_path}: RuntimeError: no idea. Report")
    assert over.startswith("Files are written")


def test_missing_directory_is_logged_once_and_used_again(
    tmp_path: Path,
) -> None:
    folder, aside = tmp_path / "files", tmp_path / "aside"
    folder.mkdir()
    with desk(folder, **ONE) as it:
        it.turn()
        folder.rename(aside)
        it.turn()
        it.turn()
        folder.mkdir()
        it.turn()
    assert len(read(it.closed[0])) == LINES
    assert [len(read(path)) for path in aside.iterdir()] == [LINES]
    assert it.writer.drops == 2 * LINES
    assert ["no such file" in it.log[0], "written" in it.log[1], len(it.log)] == [True, True, 2]


def test_externally_removed_part_counts_as_lost(tmp_path: Path) -> None:
    with desk(tmp_path, **ONE) as it:
        it.turn()
        it.parts[0].unlink()
        it.turn()
    assert it.writer.drops == LINES
    assert "was removed while it was written" in it.log[0]
    assert len(read(it.closed[0])) == LINES


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def hardlink(path: Path, target: Path) -> None:
    path.hardlink_to(target)


def fifo(path: Path, target: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("trap", [link, hardlink, fifo])
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.part", "jsonl.gz.part", "csv.part"])
def test_links_in_the_directory_are_not_followed(
    tmp_path: Path, trap: Callable[[Path, Path], None], suffix: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b'{"a":1}\ntorn')
    folder = tmp_path / "files"
    folder.mkdir()
    traps = [folder / f"wattspan-20231114T22{m}.000000Z-node7.{suffix}" for m in ("1330", "0000")]
    for each in traps:
        trap(each, victim)
    with desk(folder, **ONE, rotate="10s", keep=1) as it:
        it.turn()
        it.turn()
    assert victim.read_bytes() == b'{"a":1}\ntorn'
    assert all(each.is_symlink() or each.exists() for each in traps)
    mine = [path for path in it.closed if path not in traps]
    assert [len(read(path)) for path in mine] == [LINES]


# ---------------------------------------------------------------------------------------- names


def test_emulation_is_marked_in_file_name_rows_and_metadata(tmp_path: Path) -> None:
    with desk(tmp_path, **ONE, format="parquet") as it:
        emulated = tuple(
            replace(a, domain=replace(a.domain, provenance=Provenance.EMULATED))
            for a in full_host().domains
        )
        it.turn(domains=emulated)
    (path,) = it.closed
    assert "-emulated-node7." in path.name
    assert {row["provenance"] for row in read(path)} == {"emulated"}
    import pyarrow.parquet as pq

    assert pq.read_schema(path).metadata[b"wattspan.emulated"] == b"true"


def test_emulation_is_marked_in_rows_without_provenance(tmp_path: Path) -> None:
    with desk(tmp_path, metrics=["wattspan.agent.start.time"], format="parquet") as it:
        it.turn(host="emulated-node7")
    (path,) = it.closed
    assert {row["provenance"] for row in read(path)} == {None}
    import pyarrow.parquet as pq

    assert pq.read_schema(path).metadata[b"wattspan.emulated"] == b"true"


@pytest.mark.parametrize("host", ["node7", "a.b-c", "../../etc", "", "x" * 500, "a/b\n", "Zürich"])
def test_host_name_round_trips_through_the_file_name(host: str) -> None:
    word = host_component(host, emulated=False)
    name = FileName(1_700_000_000_000_001, word, "jsonl.gz")
    assert "/" not in str(name)
    assert not str(name).startswith(".")
    assert len(name.draft) < 255
    assert parse_file_name(str(name), word) == (name, False)
    assert parse_file_name(name.part, word) == (name, True)
    assert parse_file_name(str(name), "other") is None


@pytest.mark.parametrize(
    "keys", [{"format": "parquet", "compression": "gzip"}, {"metrics": []}, {"keep": -1}]
)
def test_settings_that_cannot_be(tmp_path: Path, keys: dict[str, object]) -> None:
    with pytest.raises(SettingError):
        settings(tmp_path, **keys)


def test_column_meanings_are_unique() -> None:
    names = [column.name for column in COLUMNS]
    assert len(set(names)) == len(names)
