"""The explanation of one job's tuning: units, settings, slowdown account, reasons and remedies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from wattspan.cli.caps import cap_lines
from wattspan.cli.formatting import UNKNOWN, TableColumn, duration_text, local_time, table_lines
from wattspan.cli.tune.text import (
    against_original,
    budget_text,
    caps_of,
    declaration_sentences,
    load_sentences,
    originals,
    passed_knob_sentences,
    percent,
    pipeline_lines,
    saved_text,
    setting_text,
    sort_rows,
    state_text,
    summary_lines,
    wrap_lines,
)
from wattspan.model import (
    CapRow,
    DecisionReason,
    Instant,
    Move,
    SettingResult,
    TuningAccounts,
    TuningRow,
)
from wattspan.tuning.decisions.report import CAUSES
from wattspan.tuning.serialization import row_to_json
from wattspan.util.files import located_pages
from wattspan.util.text import printable


class ReasonExplanation(Struct, frozen=True, forbid_unknown_fields=True):
    """``then`` is the next automatic step, ``do`` a remedy, or ""; both are sentences.

    ``means`` is empty if the clause in the decision's own sentence explains the reason.
    """

    then: str
    do: str = ""
    means: str = ""


_TEXTS = msgspec.toml.decode(
    Path(__file__).with_name("reasons.toml").read_bytes(),
    type=dict[Literal["reasons", "tracking"], dict[DecisionReason, ReasonExplanation]],
)
REASON_EXPLANATIONS = _TEXTS["reasons"]
"""For every reason."""
TRACKING_EXPLANATIONS = _TEXTS["tracking"]
"""For reasons with another meaning in the decisions of load tracking."""


def explanation(row: TuningRow) -> ReasonExplanation:
    """The explanation of the reason of a job's decision."""
    reason = row.decision.reason
    tracking = TRACKING_EXPLANATIONS if row.load is not None else {}
    found = tracking.get(reason) or REASON_EXPLANATIONS[reason]
    return msgspec.structs.replace(found, do=located_pages(found.do))


def meaning(reason: DecisionReason) -> str:
    """A sentence."""
    cause = CAUSES.get(reason, "")
    return REASON_EXPLANATIONS[reason].means or f"{cause[:1].upper()}{cause[1:]}."


# ------------------------------------------------------------------------------------ one job


def explain_facts(row: TuningRow, accounts: TuningAccounts, now: Instant) -> dict[str, Any]:
    """The row as JSON, with its explanation."""
    explained = explanation(row)
    return {
        **row_to_json(row),
        "means": explained.means or meaning(row.decision.reason),
        "then": explained.then,
        "remedy": explained.do,
        "not_lower": why_not_lower(row),
        "not_higher": why_not_higher(row, accounts),
        "held_by": [cap_text(cap, now.mono) for cap in caps_of(row, accounts)],
    }


def explain_all(accounts: TuningAccounts, now: Instant, width: int | None) -> Iterator[str]:
    """The state of tuning, and the explanation of each job."""
    yield from summary_lines(accounts)
    for row in sort_rows(accounts.rows):
        yield ""
        yield from explain_lines(row, accounts, now, width)
    if not accounts.rows:
        yield "No job yet: see `wattspan tune status`."


def explain_lines(
    row: TuningRow, accounts: TuningAccounts, now: Instant, width: int | None
) -> Iterator[str]:
    explained = explanation(row)
    age = duration_text(max(0, now.mono - row.since.mono))
    since = f"{local_time(row.since.wall // 10**9)} ({age})"
    yield f"{printable(row.job)}, {row.knob}: {state_text(row)} since {since}"
    yield from wrap_lines(printable(row.decision.sentence), width, "  ")
    for title, sentences in (
        ("Declaration", list(map(printable, declaration_sentences(row)))),
        ("Observations", _observation_lines(row)),
        ("Load", load_sentences(row)),
        ("Setting", _setting_lines(row, accounts)),
        ("Ledger", _cost_lines(row)),
        (
            "Why this setting",
            [
                explained.means,
                why_not_lower(row),
                why_not_higher(row, accounts),
                *passed_knob_sentences(row),
            ],
        ),
        ("Next", [explained.then]),
        ("What you can do", [explained.do]),
        ("Caps", [cap_text(cap, now.mono) for cap in caps_of(row, accounts)]),
    ):
        shown = [sentence for sentence in sentences if sentence]
        if title == "Ledger" and row.tried:
            yield from ("", "Tried", *(f"  {line}" for line in _trial_lines(row)))
        if title == "Ledger" and (row.pipelines or row.partners):
            name = "Pipelines" if row.pipelines else "Hosts"
            yield from ("", name, *(f"  {line}".rstrip() for line in pipeline_lines(row)))
        if shown:
            yield from ("", title)
            for sentence in shown:
                yield from wrap_lines(sentence, width, "  ")


def _observation_lines(row: TuningRow) -> list[str]:
    devices = ", ".join(map(printable, row.devices)) or "no known device"
    of = printable(" of ".join(filter(None, (row.span, row.service)))) or "the job"
    pairs = ""
    if row.pairs:
        pairs = f"; {row.pairs} pairs of blocks, one at a setting and one at the original"
    found = [f"{row.units} units of work ({of}), on {devices}{pairs}."]
    if row.committed is not None:
        time = duration_text(row.committed)
        found.append(f"The first setting was certified {time} after the first unit.")
    return found


def _setting_lines(row: TuningRow, accounts: TuningAccounts) -> list[str]:
    text = against_original(row, accounts.caps)
    if not row.decision.caps:
        original = f"The original, {text}" if text != UNKNOWN else "The original"
        compared = _current_setting(row)
        if compared is not None:
            return [f"{original}, to compare {setting_text(row.knob, compared)} with it."]
        return [f"{original}."]
    if row.applied:
        return [f"{text} on {', '.join(map(printable, row.decision.caps))}."]
    advised = ", ".join(
        f"{setting_text(row.knob, value)} on {printable(device)}"
        for device, value in row.decision.caps.items()
    )
    return [f"The original, {text}. Advised: {advised}."]


def _trial_lines(row: TuningRow) -> list[str]:
    held = _current_setting(row)

    def notes(tried: SettingResult) -> str:
        applies = {"certified": tried.certified, "now": tried.setting == held}
        return ", ".join(note for note, true in applies.items() if true)

    columns = (
        TableColumn("setting", lambda tried: setting_text(row.knob, tried.setting)),
        TableColumn("slower", lambda tried: percent(tried.slowdown)),
        TableColumn("bound", lambda tried: percent(tried.bound)),
        TableColumn("saving", lambda tried: percent(tried.saving)),
        TableColumn("pairs", lambda tried: str(tried.pairs)),
        TableColumn("", notes, left=True),
    )
    return table_lines(columns, sorted(row.tried, key=lambda one: -one.setting))


def _cost_lines(row: TuningRow) -> list[str]:
    found = []
    if row.lost is not None:
        of = ""
        if row.allowance is not None:
            of = (
                f" of {duration_text(row.allowance)} permitted by the budget of "
                f"{budget_text(row.budget)}"
            )
        found.append(
            f"Lost so far: {duration_text(max(0, row.lost))}{of}; "
            f"{duration_text(row.exploration)} of it by measuring settings."
        )
    elif row.exploration:
        found.append(f"Lost by measuring settings: {duration_text(row.exploration)}.")
    if row.slowdown is not None:
        found.append(
            f"The whole run: {_slowdown_text(row.slowdown)}{_bound(row, row.slowdown_bound)} of a"
            f" budget of {budget_text(row.budget)}."
        )
    if row.held_slowdown is not None:
        found.append(
            f"The setting held: {_slowdown_text(row.held_slowdown)}{_bound(row, row.held_bound)},"
            f" {percent(row.saving)} less energy for the same work."
        )
    if row.saved is not None:
        found.append(f"Saved: {saved_text(row)}.")
    return found


def _slowdown_text(slowdown: float | None) -> str:
    """``"3.1% slower"``, or how much faster."""
    if slowdown is not None and slowdown < -0.0005:
        return f"{percent(-slowdown)} faster"
    return f"{percent(slowdown)} slower"


def _bound(row: TuningRow, bound: float | None) -> str:
    return "" if bound is None else f" ({budget_text(row.confidence)} bound {percent(bound)})"


_TRIAL_REASONS = frozenset(
    {
        DecisionReason.OVER_BUDGET,
        DecisionReason.TAIL,
        DecisionReason.TOO_NOISY,
        DecisionReason.NOT_MONOTONE,
        DecisionReason.INERT,
        DecisionReason.NO_SAVING,
    }
)
"""Reasons for the original setting that follow from the tried settings."""


def why_not_lower(row: TuningRow) -> str:
    """Reason against a lower setting; "" if none is relevant, as for a tracked job."""
    if row.load is not None or row.pipelines:
        return ""
    held = _current_setting(row)
    if held is None and row.decision.reason not in _TRIAL_REASONS:
        return ""
    lower = [one for one in row.tried if held is None or one.setting < held]
    if not lower:
        return "" if held is None else "Not lower: no lower setting was tried."
    nearest = max(lower, key=lambda one: one.setting)
    return f"Not lower: {_rejection_reason(nearest, row, held)}"


def why_not_higher(row: TuningRow, accounts: TuningAccounts) -> str:
    """Reason against a higher setting; "" at the original one, for tracked jobs and pipelines."""
    held = _current_setting(row)
    if held is None or row.load is not None or row.pipelines:
        return ""
    higher = [one for one in row.tried if one.setting > held]
    if higher:
        nearest = min(higher, key=lambda one: one.setting)
        return f"Not higher: {_rejection_reason(nearest, row, held)}"
    before = set(originals(row, accounts.caps).values())
    original = f", {setting_text(row.knob, before.pop())}," if len(before) == 1 else ""
    return f"Not higher: no setting between it and the original{original} was tried."


def _rejection_reason(other: SettingResult, row: TuningRow, held: int | None) -> str:
    """The reason against ``other``: slowdown, energy, or missing comparisons."""
    name = setting_text(row.knob, other.setting)
    slower = f"{_slowdown_text(other.slowdown)}{_bound(row, other.bound)}"
    now = next((one for one in row.tried if one.setting == held), None)
    best = now.saving if now is not None and now.saving is not None else row.saving
    if other.slowdown is not None and other.slowdown > row.budget:
        return f"{name} was {slower}, more than the budget of {budget_text(row.budget)}."
    if held is not None and other.saving is not None and best is not None and other.saving <= best:
        return (
            f"{name} saves {percent(other.saving)} of the energy, {setting_text(row.knob, held)}"
            f" {percent(best)}."
        )
    if other.bound is not None and other.bound > row.budget:
        return (
            f"{name} was {slower}, and the bound is above the budget of {budget_text(row.budget)}."
        )
    if other.slowdown is None:
        return f"{name} was not compared long enough."
    pairs = "one pair" if other.pairs == 1 else f"{other.pairs} pairs"
    return f"{name} was {slower} after {pairs}, and was not certified."


def _current_setting(row: TuningRow) -> int | None:
    """The lowest requested setting, or the one that is compared with the original now."""
    requested = min(row.decision.caps.values(), default=None)
    if requested is None and row.decision.move is Move.PROBE:
        compared = row.decision.shown.get("setting")
        return None if compared is None or compared in row.original.values() else round(compared)
    return requested


def cap_text(cap: CapRow, now: int) -> str:
    """One cap, as `wattspan caps status` shows it."""
    name = cap.state.name or cap.state.key.device
    return printable(f"{name}, {'; '.join(cap_lines(cap, now))}.")
