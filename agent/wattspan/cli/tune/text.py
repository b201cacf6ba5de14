"""The figures of tuning for people, the same in the live view and in `wattspan tune`.

How jobs stand, and what was decided, as lines for people.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from wattspan.cli.formatting import UNKNOWN, duration_text, joules
from wattspan.model import (
    CapRow,
    DecisionReason,
    Instant,
    Knob,
    Move,
    RecordedDecision,
    TuningAccounts,
    TuningRow,
)
from wattspan.tuning.serialization import unit
from wattspan.util.text import printable


def percent(part: float | None, *, least: str = "") -> str:
    """``"3.1%"`` of a part of 1, with ``least`` before a known one; a dash if it is unknown."""
    if part is None:
        return UNKNOWN
    text = f"{100 * part:.1f}"
    return f"{least}{'0.0' if float(text) == 0 else text}%"


def budget_text(budget: float) -> str:
    """``"5%"``: what an operator wrote, without needless digits."""
    return f"{100 * budget:.4g}%"


def setting_text(knob: Knob, value: int | None) -> str:
    """``"560 W"``, ``"1410 MHz"``."""
    return UNKNOWN if value is None else f"{_number(knob, value)} {unit(knob)}"


def against_original(row: TuningRow, caps: Iterable[CapRow] = ()) -> str:
    """``"560 of 700 W"``: what is asked for now, against what stood before us.

    Several devices are told by their range; the original alone if nothing is asked for, or if
    it was only advised.
    """
    before = originals(row, caps)
    asked = set(row.decision.caps.values()) if row.applied else set()
    if not asked:
        return _range_text(row.knob, before.values())
    if not before:
        return _range_text(row.knob, asked)
    whole = _range_text(row.knob, before.values())
    return f"{_range_text(row.knob, asked).rpartition(' ')[0]} of {whole}"


def originals(row: TuningRow, caps: Iterable[CapRow] = ()) -> Mapping[str, int]:
    """What stood on each of the job's devices before us, as far as anybody knows."""
    found: dict[str, int] = {}
    for cap in caps:
        key = cap.state.key
        if key.knob is not row.knob or key.device not in row.devices:
            continue
        stood = cap.original
        if stood is None and not cap.holder:  # nobody holds it: what stands is the original
            stood = cap.state.requested
        if stood is not None:
            found[key.device] = stood
    return {**found, **row.original}


def saved_text(row: TuningRow) -> str:
    """``"12.3 kJ (9.80 kJ to 14.9 kJ)"``."""
    if row.saved is None:
        return UNKNOWN
    return " ".join(filter(None, (signed_joules(row.saved), saved_interval(row))))


def saved_interval(row: TuningRow) -> str:
    """``"(9.80 kJ to 14.9 kJ)"``: the interval of what was saved; "" if it is unknown."""
    if row.saved_low is None or row.saved_high is None:
        return ""
    return f"({signed_joules(row.saved_low)} to {signed_joules(row.saved_high)})"


def signed_joules(microjoules: int) -> str:
    """As ``joules``; what was lost instead of saved has its sign."""
    return f"-{joules(-microjoules)}" if microjoules < 0 else joules(microjoules)


def caps_of(row: TuningRow, accounts: TuningAccounts) -> list[CapRow]:
    """The caps of the job's devices, those of its own knob first."""
    found = [cap for cap in accounts.caps if cap.state.key.device in row.devices]
    return sorted(found, key=lambda cap: (cap.state.key.knob is not row.knob, cap.state.key))


def _range_text(knob: Knob, values: Iterable[int]) -> str:
    known = sorted(set(values))
    if not known:
        return UNKNOWN
    if len(known) == 1:
        return setting_text(knob, known[0])
    return f"{_number(knob, known[0])}-{setting_text(knob, known[-1])}"


def _number(knob: Knob, value: int) -> str:
    return str(value) if knob is Knob.GPU_CLOCK else f"{value / 1000:.4g}"


EMULATED_NOTICE = "EMULATED: these are figures of an emulated host and true of no machine."
_WIDEST = 40


def status_lines(accounts: TuningAccounts, now: Instant, width: int | None) -> Iterator[str]:
    """A line a job. Its sentence stands at the end, or below where ``width`` has no room for it.

    ``width`` None is room for everything, as for a program that reads lines.
    """
    yield from summary_lines(accounts)
    if not accounts.rows:
        yield "No job yet: no span that is a unit of work has come. See `wattspan top --by span`."
        return
    rows = sort_rows(accounts.rows)
    yield ""
    lines = list(_aligned(_fit_columns(rows, accounts, now, width)))
    sentences = ["", *(printable(row.decision.sentence) for row in rows)]
    longest = max(len(f"{a}  {b}") for a, b in zip(lines, sentences, strict=True))
    for line, sentence in zip(lines, sentences, strict=True):
        if width is None or longest <= width:
            yield f"{line}  {sentence}".rstrip()
        else:
            yield line.rstrip()
            yield from wrap_lines(sentence, width, "  ")


def sort_rows(rows: Iterable[TuningRow]) -> list[TuningRow]:
    """By name, so that jobs do not change places."""
    return sorted(rows, key=lambda row: (row.job, row.knob))


def summary_lines(accounts: TuningAccounts) -> Iterator[str]:
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
            local_time(decided.at.wall),
            truncate(decided.job),
            decided.decision.move.value,
            decided.decision.reason.value,
            _requested_settings(decided),
        )
        for decided in decisions
    ]
    for line, decided in zip(_aligned(cells), decisions, strict=True):
        sentence = printable(decided.decision.sentence)
        if width is None or len(line) + len(sentence) + 2 <= width:
            yield f"{line}  {sentence}".rstrip()
        else:
            yield line.rstrip()
            yield from wrap_lines(sentence, width, "  ")


def _requested_settings(decided: RecordedDecision) -> str:
    """The settings a decision asked for; in brackets if it was not carried out."""
    values = sorted(set(decided.decision.caps.values()))
    if not values:
        return ""
    told = "-".join(
        setting_text(decided.knob, value) for value in dict.fromkeys((values[0], values[-1]))
    )
    return told if decided.applied else f"({told})"


# ------------------------------------------------------------------------------------ the table

_Cells = dict[str, str]
_NUMERIC_COLUMNS = ("SLOWER", "BOUND", "BUDGET", "SAVING", "SAVED", "PAIRS", "SINCE")
_LEAST = ("BETWEEN", "PAIRS", "SINCE", "SAVED", "BUDGET")
"""What a narrow terminal does without, in this order: `explain` tells it."""


def _fit_columns(
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
        "JOB": truncate(row.job),
        "STATE": state_text(row),
        "SETTING": against_original(row, accounts.caps),
        "SLOWER": percent(row.slowdown),
        "BOUND": percent(row.slowdown_bound),
        "BUDGET": budget_text(row.budget),
        "SAVING": percent(row.saving),
        "SAVED": UNKNOWN if row.saved is None else signed_joules(row.saved),
        "BETWEEN": saved_interval(row),
        "PAIRS": str(row.pairs),
        "SINCE": duration_text(max(0, now.mono - row.since.mono)),
    }


def state_text(row: TuningRow) -> str:
    """The state; "advice" where that is all that is given."""
    if row.decision.reason is DecisionReason.ADVICE:
        return "advice"
    advised = not row.applied and row.decision.move in (Move.PROBE, Move.HOLD)
    return f"{row.state} (advice)" if advised else str(row.state)


def truncate(text: str) -> str:
    """A name on one line, not too long."""
    shown = printable(text)
    return shown if len(shown) <= _WIDEST else f"{shown[: _WIDEST - 1]}…"


def _aligned(table: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Columns wide enough; those under a title of figures flush right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [title in _NUMERIC_COLUMNS for title in table[0]]
    for row in table:
        yield "  ".join(
            f"{cell:>{width}}" if figure else f"{cell:<{width}}"
            for figure, cell, width in zip(right, row, widths, strict=True)
        )


def wrap_lines(text: str, width: int | None, indent: str) -> Iterator[str]:
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


def local_time(wall: int) -> str:
    """Unix nanoseconds in local time, to the second, the offset said."""
    return f"{datetime.fromtimestamp(wall // 10**9, UTC).astimezone():%Y-%m-%d %H:%M:%S %z}"
