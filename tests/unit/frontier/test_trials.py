"""The file of a study: what it keeps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from testbed.studies import power_settings, study, trial

from wattspan.frontier.trials import VERSION, Study, StudyFile, StudyFileError

LEVELS = power_settings(100, 80)
BEGUN = study(LEVELS, trials=[trial(LEVELS[0], 0, 1.0, 300.0)])


def test_study_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = StudyFile(tmp_path / "frontier.json")
    pruned = msgspec.structs.replace(BEGUN, pruned=[(LEVELS[1], "slower")])
    file.write(pruned)
    assert file.read() == pruned
    assert [path.name for path in tmp_path.iterdir()] == ["frontier.json"]
    assert json.loads(file.path.read_text())["version"] == VERSION


def test_study_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    file = StudyFile(tmp_path / "frontier.json")
    file.write(msgspec.structs.replace(BEGUN, version=VERSION + 1))
    with pytest.raises(StudyFileError, match=f"version {VERSION + 1}"):
        file.read()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 1}', "\x00", "[" * 5000])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "frontier.json"
    path.write_text(content)
    with pytest.raises(StudyFileError, match="no study of `wattspan frontier`"):
        StudyFile(path).read()


def test_unreadable_and_unwritable_files_are_explained(tmp_path: Path) -> None:
    with pytest.raises(StudyFileError, match="no such file"):
        StudyFile(tmp_path / "none.json").read()
    with pytest.raises(StudyFileError, match="Cannot write"):
        StudyFile(tmp_path / "none" / "frontier.json").write(BEGUN)


def test_continued_study_keeps_its_trials() -> None:
    again = msgspec.structs.replace(study(LEVELS, repeat=9), created_unix=7.0)
    found = BEGUN.continued(again)
    assert found.trials == BEGUN.trials
    assert (found.created_unix, found.repeat) == (BEGUN.created_unix, 9)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"command": ["other"]}, "command, unit or settings"),
        ({"unit": "stdout:epoch"}, "command, unit or settings"),
        ({"settings": LEVELS[:1]}, "command, unit or settings"),
        ({"host": "elsewhere"}, "another host"),
        ({"devices": []}, "another devices"),
        ({"driver": "600.1"}, "another driver"),
        ({"emulated": False}, "another emulation"),
        ({"window_seconds": 20.0}, "another window"),
    ],
)
def test_study_of_something_else_is_not_continued(changes: dict[str, object], cause: str) -> None:
    other: Study = msgspec.structs.replace(study(LEVELS), **changes)
    with pytest.raises(StudyFileError, match=cause):
        BEGUN.continued(other)
