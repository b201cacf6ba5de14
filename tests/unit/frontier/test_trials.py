"""The file of a study: what it keeps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from testbed.studies import power_settings, study, trial

from wattspan.frontier.trials import (
    MAX_SETTINGS,
    VERSION,
    PowerLimit,
    Setting,
    Study,
    StudyFile,
    StudyFileError,
    grid,
    parse_clocks,
    parse_parameter,
    parse_powers,
    substituted,
)
from wattspan.ports import ConfigError


def test_power_range_has_equal_steps_down_to_both_ends() -> None:
    found = parse_powers("100%..60%/5")
    assert found == [None, *(PowerLimit(share) for share in (0.9, 0.8, 0.7, 0.6))]


def test_power_range_in_watts_is_absolute() -> None:
    assert parse_powers("300W..200W/3") == [
        PowerLimit(300, relative=False),
        PowerLimit(250, relative=False),
        PowerLimit(200, relative=False),
    ]


def test_power_list_has_each_limit_once() -> None:
    assert parse_powers("80%, 60%,80%") == [PowerLimit(0.8), PowerLimit(0.6)]


def test_limit_is_relative_to_the_original_one() -> None:
    assert PowerLimit(0.8).milliwatts(300_000) == 240_000
    assert PowerLimit(250, relative=False).milliwatts(300_000) == 250_000


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "a value is missing"),
        ("80%,", "a value is missing"),
        ("80", "write a limit such as"),
        ("0%", "write a limit such as"),
        ("120%", "at most 100%"),
        ("100%..200W/3", "both ends"),
        ("100%..60%/1", "give 2 to"),
        (f"100%..60%/{MAX_SETTINGS + 1}", "give 2 to"),
    ],
)
def test_invalid_power_is_explained(text: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        parse_powers(text)


def test_clocks_are_whole_megahertz() -> None:
    assert parse_clocks("1980,1500,1980") == [1980, 1500]
    for text in ("fast", "1.5", "0", "1980,"):
        with pytest.raises(ConfigError):
            parse_clocks(text)


def test_parameter_has_a_name_and_values() -> None:
    assert parse_parameter("batch=8,16,8") == ("batch", ["8", "16"])
    for text in ("batch", "=8", "a b=8", "batch=", "batch=8,,9"):
        with pytest.raises(ConfigError):
            parse_parameter(text)


def test_grid_begins_with_the_baseline_and_descends() -> None:
    found = grid(parse_powers("60%,100%,80%"), parse_clocks("1500"), {"batch": ["16", "8"]})
    assert found[0] == Setting(None, None, (("batch", "16"),))
    assert [one.power for one in found[:3]] == [None, PowerLimit(0.8), PowerLimit(0.6)]
    assert len(found) == len(set(found)) == 3 * 2 * 2


def test_grid_without_a_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to compare"):
        grid([], [], {"batch": ["8"]})
    with pytest.raises(ConfigError, match="too many"):
        grid(parse_powers("100%..10%/400"), parse_clocks("1500"), {})


def test_parameters_are_substituted_anywhere_in_a_word() -> None:
    found = substituted(["train", "--batch={batch}", "{batch}x{lr}"], {"batch": "8", "lr": "1e-3"})
    assert found == ["train", "--batch=8", "8x1e-3"]


def test_braces_of_other_languages_stay() -> None:
    command = ["sh", "-c", 'echo \'{"a": {"b": 1}}\' ${x:-1} {} {{batch}} {batch}']
    found = substituted(command, {"batch": "8"})
    assert found[2] == 'echo \'{"a": {"b": 1}}\' ${x:-1} {} {batch} 8'


def test_unknown_and_unused_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="no --param lr"):
        substituted(["train", "{lr}"], {})
    with pytest.raises(ConfigError, match="--param batch has no effect"):
        substituted(["train"], {"batch": "8"})


def test_setting_names_what_it_sets() -> None:
    assert str(Setting()) == "original limits"
    assert str(Setting(PowerLimit(0.75), 1500, (("batch", "8"),))) == "75 %, 1500 MHz, batch=8"
    assert not Setting(parameters=(("batch", "8"),)).capped
    assert Setting(clock=1500).capped


# ------------------------------------------------------------------------------------------- trials


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
