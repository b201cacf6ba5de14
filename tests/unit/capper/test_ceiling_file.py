"""A ceiling written by somebody else: its lifetime, and the effect of an invalid file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wattspan.capper.ceilings import MAX_FILE_BYTES, CeilingFile
from wattspan.capper.protocol import CeilingRow
from wattspan.testing import ManualClock


class Writer:
    """The file's writer, by the test's own clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.ceiling = CeilingFile(path, self.clock)
        self.last: CeilingRow | None = None
        self.owners: frozenset[int] = frozenset()

    def write(self, text: str) -> CeilingRow | None:
        fresh = self.path.with_name("fresh")
        fresh.write_text(text)
        wall = self.clock.now().wall
        os.utime(fresh, ns=(wall, wall))
        fresh.rename(self.path)
        return self.poll()

    def poll(self) -> CeilingRow | None:
        self.last = self.ceiling.poll(self.last, self.owners)
        return self.last

    def limit(self) -> int | None:
        ceiling = self.poll()
        return None if ceiling is None else ceiling.limit


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "ceiling.toml")


def test_ceiling_file_gives_watts_and_reason(writer: Writer) -> None:
    assert writer.write('watts = 1200.5\nwhy = "grid event"\n') == CeilingRow(
        source="file", limit=1_200_500, uid=os.geteuid(), why="grid event"
    )
    assert writer.ceiling.trouble == ""


def test_ceiling_without_time_to_live_stays(writer: Writer) -> None:
    writer.write("watts = 1200\n")
    writer.clock.advance(1e7)
    assert writer.limit() == 1_200_000


def test_ceiling_ends_when_its_time_is_up(writer: Writer) -> None:
    writer.write('watts = 1200\nttl = "1h"\n')
    writer.clock.advance(3_599)
    assert writer.limit() == 1_200_000
    writer.clock.advance(1)
    assert writer.limit() is None


@pytest.mark.parametrize(("written", "left"), [(-3_000, 600), (86_400, 3_600)])
def test_ceiling_lifetime_starts_at_the_file_write(writer: Writer, written: int, left: int) -> None:
    """A file from the future is as of now."""
    writer.path.write_text('watts = 1200\nttl = "1h"\n')
    at = writer.clock.now().wall + written * 10**9
    os.utime(writer.path, ns=(at, at))
    assert writer.limit() == 1_200_000
    writer.clock.advance(left)
    assert writer.limit() is None


def test_rewritten_ceiling_file_renews_the_ceiling(writer: Writer) -> None:
    writer.write('watts = 1200\nttl = "1h"\n')
    writer.clock.advance(3_000)
    writer.write('watts = 1200\nttl = "1h"\n')
    writer.clock.advance(3_000)
    assert writer.limit() == 1_200_000


def test_clock_step_does_not_lengthen_a_ceiling(writer: Writer) -> None:
    writer.write('watts = 1200\nttl = "1h"\n')
    writer.clock.step_wall(-86_400)
    writer.clock.advance(3_600)
    assert writer.limit() is None


def test_lost_writer_leaves_its_ceiling_in_force_until_its_time_is_up(writer: Writer) -> None:
    writer.write('watts = 1200\nttl = "1h"\n')
    writer.path.unlink()
    assert writer.limit() == 1_200_000
    assert "last ceiling of 1200 W stays in force" in writer.ceiling.trouble
    writer.clock.advance(3_600)
    assert writer.limit() is None
    assert "No ceiling of it is in force" in writer.ceiling.trouble


def test_restored_ceiling_file_clears_the_fault(writer: Writer) -> None:
    writer.write("watts = 1200\n")
    away = writer.path.rename(writer.path.with_name("away"))
    assert writer.limit() == 1_200_000
    away.rename(writer.path)
    assert writer.limit() == 1_200_000
    assert writer.ceiling.trouble == ""


def test_zero_lifts_the_ceiling(writer: Writer) -> None:
    writer.write("watts = 1200\n")
    assert writer.write("watts = 0\n") is None
    assert writer.ceiling.trouble == ""


def test_ceiling_persists_over_a_restart_until_the_file_changes(
    writer: Writer,
) -> None:
    writer.last = CeilingRow(source="file", limit=900_000, why="before")
    assert writer.limit() == 900_000
    writer.write("watts = 1000\n")
    assert writer.limit() == 1_000_000


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("", "may be half written"),
        ("watts = 12", "may be half written"),
        ("\n", "no key 'watts'"),
        ("watts = true\n", "'watts': expected number"),
        ("watts = nan\n", "'watts': nan is out of bounds"),
        ('watts = "1200"\n', "'watts': expected number"),
        ("watts = -1\n", "at least 0"),
        ("watts = 1e9\n", "at most 1000000"),
        ("watt = 3\n", "no key 'watts'"),
        ("watts = 3\ntll = 4\n", "Unknown key 'tll': did you mean 'ttl'?"),
        ("watts = 3\nttl = 60\n", "a duration such as"),
        ('watts = 3\nttl = "soon"\n', "a duration such as"),
        ("watts = 3\nwhy = 4\n", "'why': expected text"),
        ("watts : 3\n", "line 1"),
        ("#" * MAX_FILE_BYTES + "\n", "larger than"),
        ("watts = 3 # \x00\n", "line 1"),
    ],
)
def test_invalid_ceiling_file_keeps_the_ceiling_and_is_reported(
    writer: Writer, content: str, cause: str
) -> None:
    writer.write("watts = 1200\n")
    writer.write(content)
    assert writer.limit() == 1_200_000
    assert cause in writer.ceiling.trouble
    assert str(writer.path) in writer.ceiling.trouble
    writer.write("watts = 800\n")
    assert (writer.limit(), writer.ceiling.trouble) == (800_000, "")


def test_bytes_that_are_no_text_are_a_broken_file(writer: Writer) -> None:
    writer.path.write_bytes(b'watts = 3\nwhy = "\xff"\n')
    assert writer.limit() is None
    assert "utf-8" in writer.ceiling.trouble


def test_pipe_or_directory_as_ceiling_file_does_not_block(writer: Writer) -> None:
    os.mkfifo(writer.path)
    assert writer.limit() is None
    assert "a named pipe" in writer.ceiling.trouble
    writer.path.unlink()
    writer.path.mkdir()
    assert writer.limit() is None
    assert writer.ceiling.trouble != ""


def test_ceiling_reason_is_one_bounded_line(writer: Writer) -> None:
    ceiling = writer.write(f'watts = 5\nwhy = "a\\nb\\u001b[31m{"x" * 500}"\n')
    assert ceiling.why.startswith("a b [31mx")
    assert len(ceiling.why) == 200


# --------------------------------------------------------------------------------- permissions


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_file_that_others_may_write_is_refused(writer: Writer, mode: int) -> None:
    writer.write("watts = 1200\n")
    fresh = writer.path.with_name("fresh")
    fresh.write_text("watts = 1\n")
    fresh.chmod(mode)
    fresh.rename(writer.path)
    assert writer.limit() == 1_200_000
    assert "its group or everybody may write it" in writer.ceiling.trouble
    writer.path.chmod(0o644)
    assert writer.limit() == 1_000


def test_file_that_becomes_writable_by_others_is_reported(writer: Writer) -> None:
    writer.write("watts = 1200\n")
    writer.path.chmod(0o666)
    assert writer.limit() == 1_200_000
    assert writer.ceiling.trouble


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
def test_ceiling_file_of_an_unconfigured_user_is_rejected(writer: Writer) -> None:
    writer.path.write_text("watts = 1\n")
    os.chown(writer.path, 1000, 1000)
    assert writer.limit() is None
    assert "user 1000 owns it" in writer.ceiling.trouble
    writer.owners = frozenset({1000})
    assert writer.limit() == 1_000
    assert writer.ceiling.trouble == ""
