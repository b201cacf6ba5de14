"""Tuning in the terminal view."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from rich.console import Console
from testbed.snapshots import busy_host, serving_host
from testbed.top_view import document, drawn
from testbed.tuned import ACCOUNTS, DECLINED, HELD, HOLD, PROBED

from wattspan.cli.top.controls import ViewOptions, ViewSection
from wattspan.cli.top.view import render_snapshot
from wattspan.model import Decision, DecisionReason, Move, Snapshot, TuningAccounts, TuningRow


def host(*rows: TuningRow) -> Snapshot:
    accounts = replace(ACCOUNTS, rows=rows) if rows else ACCOUNTS
    return replace(busy_host(), tuning=accounts)


def place_of(text: str, lines: list[str]) -> int:
    (found,) = [place for place, line in enumerate(lines) if text in line]
    return found


def test_job_has_a_line_and_a_sentence_below() -> None:
    lines = drawn(host(HELD))
    at = place_of("TUNING", lines)
    assert lines[at].split() == [
        *("TUNING", "state", "setting", "slower", "bound", "budget", "saving"),
    ]
    assert lines[at + 1].split() == [
        *("trainer/train_step", "holding", "560", "of", "700", "W", "2.4%", "3.1%", "5%", "18.2%"),
    ]
    assert " ".join(" ".join(lines[at + 2 : at + 4]).split()) == HOLD.sentence


def test_wide_terminal_shows_saved_energy_and_pairs() -> None:
    lines = drawn(host(HELD), width=120)
    at = place_of("TUNING", lines)
    assert lines[at].split()[-2:] == ["saved", "pairs"]
    assert lines[at + 1].split()[-3:] == ["12.3", "kJ", "46"]
    assert lines[at + 2] == f"  {HOLD.sentence}"


def test_columns_are_aligned_for_all_jobs() -> None:
    lines = drawn(host(HELD, PROBED, DECLINED), width=120)
    at = place_of("TUNING", lines)
    for title, figure in (("slower", "2.4%"), ("saving", "18.2%"), ("budget", "5%")):
        assert lines[at].index(title) + len(title) == lines[at + 1].index(figure) + len(figure)
    rows = [lines[place_of(row.job, lines)] for row in (HELD, PROBED, DECLINED)]
    ends = [line.index(" 5%") for line in rows]
    assert len(set(ends)) == 1


def test_declared_job_shows_what_was_asked_and_given_and_why() -> None:
    lines = drawn(host(PROBED), width=120)
    at = place_of(PROBED.job, lines)
    assert lines[at + 1].endswith('Declared as "chat server": limited.')
    assert lines[at + 2].startswith(
        "  The budget of 20 % is limited to 5 %: the operator permits no more"
    )


def test_jobs_with_applied_settings_come_first() -> None:
    lines = drawn(host(DECLINED, PROBED, HELD))
    places = [place_of(row.job, lines) for row in (HELD, PROBED, DECLINED)]
    assert places == sorted(places)


@pytest.mark.parametrize("by", [by for by in ViewSection if by is not ViewSection.ALL])
def test_single_section_shows_no_tuning(by: ViewSection) -> None:
    assert not any("TUNING" in line for line in drawn(host(), by=by))


def test_view_without_jobs_has_no_tuning_section() -> None:
    untuned = replace(busy_host(), tuning=TuningAccounts("advise"))
    assert drawn(untuned, height=40) == drawn(busy_host(), height=40)


@pytest.mark.parametrize("height", range(6, 61, 9))
@pytest.mark.parametrize("width", [80, 120])
def test_view_with_many_jobs_fits_the_terminal(height: int, width: int) -> None:
    several = [replace(HELD, job=f"job {n}") for n in range(9)]
    accounts = replace(ACCOUNTS, rows=(*several, PROBED, DECLINED))
    for snapshot in (host(), replace(serving_host(), tuning=accounts)):
        lines = drawn(snapshot, width, height, keys=True)
        before = drawn(replace(snapshot, tuning=TuningAccounts()), width, height, keys=True)
        assert len(lines) <= max(height, len(before))


def test_title_counts_the_jobs_that_do_not_fit() -> None:
    lines = drawn(host(), height=24)
    assert lines[place_of("TUNING", lines)].startswith("TUNING (1 of 3)")
    assert any("trainer/train_step" in line for line in lines)


def test_filter_selects_jobs() -> None:
    lines = drawn(host(), filter="llm")
    assert place_of("llm/chat", lines)
    assert not any("train_step" in line for line in lines)


def test_advised_setting_is_not_shown_as_applied() -> None:
    advised = replace(HELD, applied=False)
    line = next(line for line in drawn(host(advised), width=120) if HELD.job in line)
    assert "holding (advice)" in line
    assert "560" not in line
    assert "700 W" in line


def test_job_name_cannot_command_the_terminal() -> None:
    decision = Decision(Move.DECLINE, DecisionReason.NO_SIGNAL, "odd \x1b[2J words")
    lines = drawn(host(replace(HELD, job="evil\x1b[31m\nname", decision=decision)))
    assert any("evil?[31m?name" in line for line in lines)
    assert "\x1b" not in "".join(lines)


def test_view_without_tuning_jobs_if_their_description_is_unknown() -> None:
    known = document(host())
    newer = msgspec.structs.replace(known.tuning, jobs=[{"knob": "fan"}])
    unknown = msgspec.structs.replace(known, tuning=newer)
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(render_snapshot(unknown, ViewOptions()))
    assert "tritonserver" in captured.get()
    assert "TUNING" not in captured.get()


def test_json_has_the_tuning_jobs() -> None:
    told = document(host()).tuning
    assert [job["job"] for job in told.jobs] == [row.job for row in ACCOUNTS.rows]
