"""How jobs stand, and what was decided, as lines for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from wattspan.cli.figures import UNKNOWN, lasting
from wattspan.cli.tuning_figures import (
    against_original,
    between,
    joules_either,
    of_budget,
    percent,
    setting,
)
from wattspan.model import (
    DecisionReason,
    Instant,
    Move,
    RecordedDecision,
    TuningAccounts,
    TuningRow,
)
from wattspan.util.text import printable

EMULATED = "EMULATED: these are figures of an emulated host and true of no machine."
_WIDEST = 40


def status_lines(accounts: TuningAccounts, now: Instant, width: int | None) -> Iterator[str]:
    """A line a job. Its sentence stands at the end, or below where ``width`` has no room for it.

    ``width`` None is room for everything, as for a program that reads lines.
    """
    yield from head(accounts)
    if not accounts.rows:
        yield "No job yet: no span that is a unit of work has come. See `wattspan top --by span`."
        return
    rows = in_order(accounts.rows)
    yield ""
    lines = list(_aligned(_fitting(rows, accounts, now, width)))
    sentences = ["", *(printable(row.decision.sentence) for row in rows)]
    longest = max(len(f"{a}  {b}") for a, b in zip(lines, sentences, strict=True))
    for line, sentence in zip(lines, sentences, strict=True):
        if width is None or longest <= width:
            yield f"{line}  {sentence}".rstrip()
        else:
            yield line.rstrip()
            yield from wrapped(sentence, width, "  ")


def in_order(rows: Iterable[TuningRow]) -> list[TuningRow]:
    """By name, so that jobs do not change places."""
    return sorted(rows, key=lambda row: (row.job, row.knob))


def head(accounts: TuningAccounts) -> Iterator[str]:
    """What holds for all jobs."""
    told = {"advise": "advise: nothing is turned", "apply": "apply: settings are turned"}
    parts = [told.get(accounts.mode, accounts.mode)]
    if accounts.capper:
        parts.append(f"limits written: {accounts.writes}, given back: {accounts.restores}")
    if accounts.ceiling is not None:
        parts.append(f"the host's ceiling is {accounts.ceiling / 1000:.4g} W")
    yield "; ".join(parts)
    if accounts.capper is False:
        yield f"! {accounts.capper_trouble or 'The capper does not answer.'}"


def history_lines(decisions: Sequence[RecordedDecision], width: int | None) -> Iterator[str]:
    """A line a decision, newest last, its sentence as in :func:`status_lines`."""
    cells = [
        (
            moment(decided.at.wall),
            short(decided.job),
            decided.decision.move.value,
            decided.decision.reason.value,
            _asked(decided),
        )
        for decided in decisions
    ]
    for line, decided in zip(_aligned(cells), decisions, strict=True):
        sentence = printable(decided.decision.sentence)
        if width is None or len(line) + len(sentence) + 2 <= width:
            yield f"{line}  {sentence}".rstrip()
        else:
            yield line.rstrip()
            yield from wrapped(sentence, width, "  ")


def _asked(decided: RecordedDecision) -> str:
    """The settings a decision asked for; in brackets if it was not carried out."""
    values = sorted(set(decided.decision.caps.values()))
    if not values:
        return ""
    told = "-".join(
        setting(decided.knob, value) for value in dict.fromkeys((values[0], values[-1]))
    )
    return told if decided.applied else f"({told})"


# ------------------------------------------------------------------------------------ the table

_Cells = dict[str, str]
_FIGURES = ("SLOWER", "BOUND", "BUDGET", "SAVING", "SAVED", "PAIRS", "SINCE")
_LEAST = ("BETWEEN", "PAIRS", "SINCE", "SAVED", "BUDGET")
"""What a narrow terminal does without, in this order: `explain` tells it."""


def _fitting(
    rows: Sequence[TuningRow], accounts: TuningAccounts, now: Instant, width: int | None
) -> list[tuple[str, ...]]:
    """The heading and a line a job, with as many columns as there is room for."""
    table = [_cells(row, accounts, now) for row in rows]
    titles, less = list(table[0]), list(_LEAST)
    while True:
        heading = ["" if title == "BETWEEN" else title for title in titles]
        lines = [tuple(heading), *(tuple(cells[title] for title in titles) for cells in table)]
        if not less or width is None or len(next(_aligned(lines))) <= width:
            return lines
        titles.remove(less.pop(0))


def _cells(row: TuningRow, accounts: TuningAccounts, now: Instant) -> _Cells:
    return {
        "JOB": short(row.job),
        "STATE": state(row),
        "SETTING": against_original(row, accounts.caps),
        "SLOWER": percent(row.slowdown),
        "BOUND": percent(row.slowdown_bound),
        "BUDGET": of_budget(row.budget),
        "SAVING": percent(row.saving),
        "SAVED": UNKNOWN if row.saved is None else joules_either(row.saved),
        "BETWEEN": between(row),
        "PAIRS": str(row.pairs),
        "SINCE": lasting(max(0, now.mono - row.since.mono)),
    }


def state(row: TuningRow) -> str:
    """The state; "advice" where that is all that is given."""
    if row.decision.reason is DecisionReason.ADVICE:
        return "advice"
    advised = not row.applied and row.decision.move in (Move.PROBE, Move.HOLD)
    return f"{row.state} (advice)" if advised else str(row.state)


def short(text: str) -> str:
    """A name on one line, not too long."""
    shown = printable(text)
    return shown if len(shown) <= _WIDEST else f"{shown[: _WIDEST - 1]}…"


def _aligned(table: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Columns wide enough; those under a title of figures flush right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [title in _FIGURES for title in table[0]]
    for row in table:
        yield "  ".join(
            f"{cell:>{width}}" if figure else f"{cell:<{width}}"
            for figure, cell, width in zip(right, row, widths, strict=True)
        )


def wrapped(text: str, width: int | None, indent: str) -> Iterator[str]:
    """``text`` on as many lines as ``width`` asks for; on one if there is no width."""
    if width is None:
        yield f"{indent}{text}".rstrip()
        return
    yield from textwrap.wrap(
        text,
        max(40, width),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def moment(wall: int) -> str:
    """Unix nanoseconds in local time, to the second, the offset said."""
    return f"{datetime.fromtimestamp(wall // 10**9, UTC).astimezone():%Y-%m-%d %H:%M:%S %z}"
