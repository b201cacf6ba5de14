"""Files from an agent that runs: ended, killed, on a disk that is full."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from testbed.file_writer import Row, desk, read, settings
from testbed.program import Running, on_a_disk_of, options, wattspan
from testbed.scrapes import full_host
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.ports import ExporterContext, ExporterError
from wattspan_exporters.files import FilesSettings, open_exporter
from wattspan_exporters.files.exporter import FilesExporter


def writing(folder: Path, **more: object) -> dict[str, Any]:
    chosen = {"directory": folder, "interval": "100ms", **more}
    return {f"exporters__files__{key}": value for key, value in chosen.items()}


def closed(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("wattspan-*") if p.suffix != ".part")


def rows(folder: Path) -> list[Row]:
    return [row for path in closed(folder) for row in read(path)]


def adds_up(found: list[Row]) -> int:
    """Number of snapshots whose cover energies equal the host's."""
    hosts: Counter[object] = Counter()
    parts: Counter[object] = Counter()
    for row in found:
        if row["metric"] == "hw.host.energy":
            hosts[row["monotonic_ns"]] += row["whole"]
        elif row["metric"] == "hw.energy" and row["hw_parent"] is None:
            parts[row["monotonic_ns"]] += row["whole"]
    assert hosts == parts
    return len(hosts)


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_agent_that_ends_leaves_whole_files_that_add_up(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "files"
    with Running(tmp_path, **writing(folder, format=form)) as agent:
        agent.measuring()
        assert agent.end() == 0
    found = rows(folder)
    assert adds_up(found) >= 1
    assert {row["provenance"] for row in found if row["unit"] == "J"} == {"emulated"}
    assert all("-emulated-" in path.name for path in closed(folder))
    assert not list(folder.glob("*.part"))


def test_files_of_a_killed_agent_are_finished_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    with Running(tmp_path, **writing(folder)) as agent:
        agent.measuring()
        eventually(lambda: any(p.stat().st_size > 50_000 for p in folder.glob("*.part")), "rows")
        agent.end(signal.SIGKILL)
    assert closed(folder) == []
    with Running(tmp_path, **writing(folder)) as agent:
        agent.measuring()
        eventually(lambda: closed(folder), "the other's file is finished")
        assert agent.end() == 0
    assert len(closed(folder)) == 2
    assert adds_up(read(closed(folder)[1])) >= 1


@pytest.mark.needs_root
def test_full_disk_is_logged_once_and_counted(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    more = writing(folder, rotate="1s", keep_size="10MiB")
    with Running(tmp_path, within=on_a_disk_of("256k", folder), **more) as agent:
        agent.measuring()

        def dropped() -> float:
            key = 'wattspan_agent_exporter_drops_total{"exporter": "files"}'
            return agent.totals().get(key, 0)

        there = Path(f"/proc/{agent.process.pid}/root{folder}")
        eventually(lambda: dropped() > 0, "rows are dropped, and counted")
        eventually(lambda: "Cannot write to" in agent.said, "the log says so")
        assert "no space left on device" in agent.said

        def goes_on() -> bool:
            for path in closed(there):  # the part that filled the disk may be closed later
                path.unlink()
            return "are written to" in agent.said

        eventually(goes_on, "it goes on when there is room")
        before = agent.energy()
        eventually(lambda: agent.energy() > before, "measuring goes on")
        assert agent.said.count("Cannot write to") < 5
        adds_up([row for path in closed(there) for row in read(path)])


WRITER = """
import sys
from pathlib import Path
from testbed.file_writer import Desk, settings
from wattspan_exporters.files.exporter import SnapshotWriter
folder = Path(sys.argv[1])
keys = {"rotate": "1m", "format": sys.argv[2], "compression": sys.argv[3], "metrics": ["hw.*"]}
it = Desk(folder, SnapshotWriter(settings(folder, **keys), sys.stderr.write), [])
it.clock.advance(int(sys.argv[4]) * 10**6)  # further than anybody gets before he is killed
while True:
    snapshot = it.turn()
    print(snapshot.at.mono, flush=True)
"""


@pytest.mark.parametrize(
    ("form", "compression"), [("jsonl", "none"), ("csv", "none"), ("jsonl", "gzip")]
)
def test_kill_at_any_moment_keeps_written_rows_once(
    tmp_path: Path, form: str, compression: str
) -> None:
    chance = random.Random(f"{form} {compression}")
    told: list[int] = []
    for number in range(5):
        told += until_killed(tmp_path, form, compression, number, chance.randint(1, 60))
    with desk(tmp_path, metrics=["hw.power"]) as it:
        it.turn(10**6)
        assert len(it.parts) == 1  # the agent's own
    found = Counter(row["monotonic_ns"] for row in rows(tmp_path) if row["metric"] != "hw.power")
    complete = max(found.values())
    assert {found[mono] for mono in told} == {complete}
    # Each that was killed may have had one more snapshot in hand, part of it written.
    assert len(found) <= len(told) + 5


def until_killed(folder: Path, form: str, compression: str, number: int, turns: int) -> list[int]:
    """Every snapshot that a writer said it had written when it was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), form, compression, str(number)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(turns)]
        process.kill()
        told += process.stdout.readlines()
    return [int(line) for line in told if line.endswith("\n")]


# ------------------------------------------------------------------------------------ the thread


def started(folder: Path, log: list[str], **keys: object) -> FilesExporter:
    context = ExporterContext(SystemClock(), "1.2.3", log.append)
    made = open_exporter(settings(folder, **keys), context)
    assert isinstance(made, FilesExporter)
    made.start(full_host)
    return made


def test_first_and_last_snapshots_are_written(
    tmp_path: Path,
) -> None:
    log: list[str] = []
    folder = tmp_path / "deep" / "files"
    exporter = started(folder, log, interval="1h", metrics=["hw.energy"])
    try:
        eventually(lambda: any(p.stat().st_size for p in folder.glob("*.part")), "rows")
    finally:
        exporter.stop()
    assert len(rows(folder)) == 6  # the same snapshot is not written again
    assert (exporter.drops, exporter.address, exporter.name) == (0, None, "files")
    assert log == []


def test_unexpected_write_error_loses_one_snapshot(
    tmp_path: Path,
) -> None:
    log: list[str] = []

    def view() -> Any:
        if not log:
            raise ZeroDivisionError("gone")
        return full_host()

    context = ExporterContext(SystemClock(), "1.2.3", log.append)
    exporter = FilesExporter(settings(tmp_path, interval="100ms"), context)
    exporter.start(view)
    try:
        eventually(lambda: list(tmp_path.glob("*.part")), "it goes on")
    finally:
        exporter.stop()
    assert "ZeroDivisionError: gone" in log[0]


def test_exporter_without_a_directory_is_off() -> None:
    context = ExporterContext(SystemClock(), "1.2.3", print)
    assert open_exporter(settings(Path("files")), context) is not None
    assert open_exporter(FilesSettings(), context) is None


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_directory_that_cannot_be_is_refused_in_one_sentence(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ExporterError, match=r"Cannot write files to .*\[exporters\.files\]"):
        started(tmp_path / place, [])


def test_unknown_metric_name_is_a_startup_error(tmp_path: Path) -> None:
    chosen = {"exporters.files.directory": tmp_path, "exporters.files.metrics": '["hw.enrgy"]'}
    chosen |= {"agent.state_dir": tmp_path / "state", "agent.run_dir": tmp_path / "run"}
    done = wattspan("run", "--emulate", "laptop", *options(chosen))
    assert done.returncode == 2
    assert '"hw.energy" is near' in done.stderr
    assert "Traceback" not in done.stderr
