"""Texts of tuning figures, and the lines of ``wattspan tune`` except its explanations."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from wattspan.cli.formatting import (
    UNKNOWN,
    TableColumn,
    duration_text,
    joules,
    local_time,
    table_lines,
)
from wattspan.model import (
    SECOND,
    CapRow,
    DecisionReason,
    Instant,
    JobPartner,
    Knob,
    Move,
    ObjectiveFigures,
    PipelineFigures,
    RecordedDecision,
    RequestedTerms,
    TuningAccounts,
    TuningRow,
    TuningTerms,
)
from wattspan.tuning.decisions.report import InstanceRange, best_range, cause_text, instance_ranges
from wattspan.tuning.decisions.unit_detection import MIN_OBSERVATION, MIN_SPANS
from wattspan.tuning.serialization import setting_number, unit
from wattspan.util.text import clean_label, printable

_MAX_NAME = 40

# ------------------------------------------------------------------------------------- figures


def percent(ratio: float | None) -> str:
    """``"3.1%"``; a dash if it is unknown."""
    if ratio is None:
        return UNKNOWN
    text = f"{100 * ratio:.1f}"
    return f"{'0.0' if float(text) == 0 else text}%"


def budget_text(budget: float) -> str:
    """``"5%"``, without needless digits."""
    return f"{100 * budget:.4g}%"


def job_budget_text(row: TuningRow) -> str:
    """The slowdown budget of a job; a dash for a tracked job, which has latency limits instead."""
    return budget_text(row.budget) if row.load is None else UNKNOWN


def setting_text(knob: Knob, value: int | None) -> str:
    """``"560 W"``, ``"1410 MHz"``."""
    return UNKNOWN if value is None else f"{_number(knob, value)} {unit(knob)}"


def against_original(row: TuningRow, caps: Iterable[CapRow] = ()) -> str:
    """``"560 of 700 W"``: the requested and the original settings, as ranges over devices.

    The original alone if no setting is requested, or only as advice.
    """
    before = originals(row, caps)
    requested = set(row.decision.caps.values()) if row.applied else set()
    if not requested:
        return _range_text(row.knob, before.values())
    if not before:
        return _range_text(row.knob, requested)
    original = _range_text(row.knob, before.values())
    return f"{_range_text(row.knob, requested).rpartition(' ')[0]} of {original}"


def originals(row: TuningRow, caps: Iterable[CapRow] = ()) -> Mapping[str, int]:
    """The known original settings of the job's devices."""
    found: dict[str, int] = {}
    for cap in caps:
        key = cap.state.key
        if key.knob is not row.knob or key.device not in row.devices:
            continue
        original = cap.original
        if original is None and not cap.holder:  # without a holder, the present one is original
            original = cap.state.requested
        if original is not None:
            found[key.device] = original
    return {**found, **row.original}


def saved_text(row: TuningRow) -> str:
    """``"12.3 kJ (9.80 kJ to 14.9 kJ)"``."""
    interval = "" if row.saved is None else _saved_interval(row)
    return " ".join(filter(None, (signed_joules(row.saved), interval)))


def _saved_interval(row: TuningRow) -> str:
    if row.saved_low is None or row.saved_high is None:
        return ""
    return f"({signed_joules(row.saved_low)} to {signed_joules(row.saved_high)})"


def signed_joules(microjoules: int | None) -> str:
    """As ``joules``, with a sign for losses."""
    if microjoules is not None and microjoules < 0:
        return f"-{joules(-microjoules)}"
    return joules(microjoules)


def caps_of(row: TuningRow, accounts: TuningAccounts) -> list[CapRow]:
    """The caps of the job's devices, first those of its knob."""
    found = [cap for cap in accounts.caps if cap.state.key.device in row.devices]
    return sorted(found, key=lambda cap: (cap.state.key.knob is not row.knob, cap.state.key))


def state_text(row: TuningRow) -> str:
    """The state, or "advice" where decisions are only advice."""
    if row.decision.reason is DecisionReason.ADVICE:
        return "advice"
    advised = not row.applied and row.decision.move in (Move.PROBE, Move.HOLD)
    return f"{row.state} (advice)" if advised else str(row.state)


def _range_text(knob: Knob, values: Iterable[int]) -> str:
    known = sorted(set(values))
    if not known:
        return UNKNOWN
    if len(known) == 1:
        return setting_text(knob, known[0])
    return f"{_number(knob, known[0])}-{setting_text(knob, known[-1])}"


def _number(knob: Knob, value: int) -> str:
    return str(value) if knob is Knob.GPU_CLOCK else f"{value / 1000:.4g}"


# --------------------------------------------------------------------------------- declarations


def decision_text(row: TuningRow) -> str:
    """The sentence of the decision, the passed knobs, and the answer to a declaration."""
    sentences = [row.decision.sentence, *passed_knob_sentences(row)]
    if row.declared is not None:
        sentences.append(f'Declared as "{row.declared.name}": {row.declared.decision}.')
    return printable(" ".join(sentences))


def passed_knob_sentences(row: TuningRow) -> list[str]:
    """The reason against each knob that comes before the present one."""
    return [
        f"{knob} is not tuned: {cause_text(reason)}." for knob, reason in row.passed_knobs.items()
    ]


def declaration_sentences(row: TuningRow) -> list[str]:
    """The terms that an application asked for, those that it was given, and the reason."""
    declared = row.declared
    if declared is None:
        return []
    asked = _terms_text(declared.asked) or "nothing but the operator's terms"
    given = declared.given
    return [
        f'User {declared.uid} declared "{declared.name}" and asked for {asked}.',
        f"Given, as {declared.decision}: {_terms_text(given)}; mode {given.mode}.",
        declared.reason,
    ]


def _terms_text(terms: RequestedTerms | TuningTerms) -> str:
    parts = []
    if terms.max_slowdown is not None:
        parts.append(f"a budget of {budget_text(terms.max_slowdown)}")
    if terms.objective is not None:
        weight = f" (eta {terms.eta:g})" if terms.objective == "cost" and terms.eta else ""
        parts.append(f"the objective {terms.objective}{weight}")
    if terms.knobs is not None:
        parts.append(f"the knobs {', '.join(terms.knobs) or 'none'}")
    if terms.first_watts is not None:
        parts.append(f"{terms.first_watts:g} W first")
    if terms.floor_watts is not None:
        parts.append(f"{terms.floor_watts:g} W or more")
    return ", ".join(parts)


# --------------------------------------------------------------------------------------- lines

_OPTIONAL_COLUMNS = ("", "PAIRS", "SINCE", "SAVED", "BUDGET", "HEADROOM", "LOAD")
"""Columns that narrow terminals omit, in this order; `explain` shows them."""


def status_lines(accounts: TuningAccounts, now: Instant, width: int | None) -> Iterator[str]:
    """A line for each job; its sentence is at the end, or below if ``width`` is too small.

    Below them are the ranks of pipelines, and the other hosts of jobs. ``width`` None is
    unlimited, as for a program that reads lines.
    """
    yield from summary_lines(accounts)
    if not accounts.rows:
        yield (
            f"No job yet: it begins once a process has sent {MIN_SPANS} spans of one name in at "
            f"least {MIN_OBSERVATION // SECOND} s. `wattspan top --by span` shows those received."
        )
        return
    rows = sort_rows(accounts.rows)
    yield ""
    lines = _fitting_table(rows, accounts, now, width)
    sentences = ["", *map(decision_text, rows)]
    yield from _with_sentences(lines, sentences, width)
    for row in rows:
        if row.pipelines or row.partners:
            yield ""
            yield clean_label(row.job, _MAX_NAME)
            yield from pipeline_lines(row)


def summary_lines(accounts: TuningAccounts) -> Iterator[str]:
    """The state of tuning on the host."""
    modes = {"advise": "advise: no limit is written", "apply": "apply: limits are written"}
    parts = [modes.get(accounts.mode, accounts.mode)]
    capper = accounts.capper
    if capper.answers:
        parts.append(f"{capper.writes} writes, {capper.restores} restores")
        if capper.resets:
            parts.append(f"{capper.resets} resets of devices")
    if accounts.ceiling is not None:
        parts.append(f"the host's ceiling is {accounts.ceiling / 1000:.4g} W")
    yield "; ".join(parts)
    if capper.answers is False:
        yield f"! {capper.trouble or 'The capper does not answer.'}"
    elif capper.shared:
        yield f"The capper of another agent, on {capper.shared}, writes the limits."


def sort_rows(rows: Iterable[TuningRow]) -> list[TuningRow]:
    return sorted(rows, key=lambda row: (row.job, row.knob))


def history_lines(decisions: Sequence[RecordedDecision], width: int | None) -> list[str]:
    """A line for each decision, in the given order; sentences as in :func:`status_lines`."""
    columns = (
        TableColumn("", lambda one: local_time(one.at.wall // 10**9), left=True),
        TableColumn("", lambda one: clean_label(one.job, _MAX_NAME), left=True),
        TableColumn("", lambda one: one.decision.move.value, left=True),
        TableColumn("", lambda one: one.decision.reason.value, left=True),
        TableColumn("", _requested_settings, left=True),
    )
    sentences = [printable(one.decision.sentence) for one in decisions]
    return list(_with_sentences(table_lines(columns, decisions), sentences, width))


def _requested_settings(decided: RecordedDecision) -> str:
    """The requested settings; in brackets if they were not applied."""
    if not decided.decision.caps:
        return ""
    text = _range_text(decided.knob, decided.decision.caps.values())
    return text if decided.applied else f"({text})"


def _fitting_table(
    rows: Sequence[TuningRow], accounts: TuningAccounts, now: Instant, width: int | None
) -> list[str]:
    """The lines of the table, with as many columns as fit."""
    load = (TableColumn("LOAD", _load_text), TableColumn("HEADROOM", _headroom_text))
    columns = [
        TableColumn("JOB", lambda row: clean_label(row.job, _MAX_NAME), left=True),
        TableColumn("STATE", state_text, left=True),
        TableColumn("SETTING", lambda row: against_original(row, accounts.caps), left=True),
        TableColumn("SLOWER", lambda row: percent(row.slowdown)),
        TableColumn("BOUND", lambda row: percent(row.slowdown_bound)),
        TableColumn("BUDGET", job_budget_text),
        *(load if any(row.load for row in rows) else ()),
        TableColumn("SAVING", lambda row: percent(row.saving)),
        TableColumn("SAVED", lambda row: signed_joules(row.saved)),
        TableColumn("", _saved_interval, left=True),
        TableColumn("PAIRS", lambda row: str(row.pairs)),
        TableColumn("SINCE", lambda row: duration_text(max(0, now.mono - row.since.mono))),
    ]
    lines = table_lines(columns, rows)
    for title in _OPTIONAL_COLUMNS:
        if width is None or max(map(len, lines)) <= width:
            break
        columns = [one for one in columns if one.title != title]
        lines = table_lines(columns, rows)
    return lines


def _load_text(row: TuningRow) -> str:
    """The load with the end of its bin."""
    return UNKNOWN if row.load is None else f"{row.load.load:.1f} of {row.load.bin_bound:g}"


def _headroom_text(row: TuningRow) -> str:
    headroom = None if row.load is None else row.load.headroom
    return UNKNOWN if headroom is None else f"{headroom:.1f}x"


def load_sentences(row: TuningRow) -> list[str]:
    """Load, headroom and misses of a tracked job."""
    load = row.load
    if load is None:
        return []
    found = [f"Load {load.load:.1f}; the load bin ends at {load.bin_bound:g} requests in flight."]
    if load.headroom == 0:
        found.append("The present setting is not certified at any load yet.")
    elif load.headroom is not None:
        found.append(
            f"The present setting is certified up to {load.headroom:.1f} times the present load."
        )
    return found + [_misses_sentence(one) for one in load.objectives]


def _misses_sentence(one: ObjectiveFigures) -> str:
    if one.miss_ratio is None:
        return f"{one.name}: no request has reported this latency yet."
    return (
        f"{one.name}: {percent(one.miss_ratio)} of {one.requests} requests took longer than "
        f"{one.limit_seconds:g} s, of {percent(one.allowed)} permitted."
    )


# ------------------------------------------------------------------------------------ pipelines

_RANK_COLUMNS = (
    TableColumn("RANK", lambda place: str(place[0])),
    TableColumn("DEVICE", lambda place: place[1].device, left=True),
    TableColumn("CLOCK", lambda place: setting_text(Knob.GPU_CLOCK, place[1].clock)),
    TableColumn("PLAN", lambda place: setting_text(Knob.GPU_CLOCK, place[1].planned)),
    TableColumn("WAITING", lambda place: percent(place[1].waiting)),
    TableColumn("SAVED", lambda place: signed_joules(place[1].saved)),
)


def pipeline_lines(row: TuningRow) -> Iterator[str]:
    """For each pipeline of a job its iteration times, its reason, and a table of its ranks.

    Below them is a sentence for each other host of the job.
    """
    for number, pipeline in enumerate(row.pipelines):
        if number:
            yield ""
        yield pipeline_sentence(pipeline)
        if pipeline.name:  # the only pipeline's sentence is that of the job
            yield printable(pipeline.sentence)
        ranks = table_lines(_RANK_COLUMNS, enumerate(pipeline.ranks))
        yield from (f"  {line}" for line in ranks)
    for number, partner in enumerate(row.partners):
        if not number and row.pipelines:
            yield ""
        yield f"{_partner_label(partner)}: {printable(partner.sentence)}"


def _partner_label(partner: JobPartner) -> str:
    """The name of another host, the age of its record, and its pipeline that is the straggler."""
    notes = ["not used"] * (not partner.used)
    if partner.age is not None:
        notes.append(f"record of {duration_text(partner.age)} ago")
    if partner.straggler:
        notes.append(f"pipeline {clean_label(partner.straggler, _MAX_NAME)} is the straggler")
    host = f"Host {clean_label(partner.host, _MAX_NAME)}" if partner.host else "Other hosts"
    return f"{host} ({', '.join(notes)})" if notes else host


def pipeline_sentence(pipeline: PipelineFigures) -> str:
    """The iteration times of a pipeline, and the reason of its clocks."""
    name = f"Pipeline {clean_label(pipeline.name, _MAX_NAME)}" if pipeline.name else "The pipeline"
    text = f"{name}, {pipeline.reason}"
    if pipeline.unit_time is None:
        return f"{text}: no complete iteration yet."
    text += f": an iteration takes {_iteration_time(pipeline.unit_time)}"
    if pipeline.original_time is not None:
        text += f", {_iteration_time(pipeline.original_time)} at the original clocks"
    if pipeline.straggler_time is not None:
        text += f", and waits for one of {_iteration_time(pipeline.straggler_time)}"
    return f"{text}."


def _iteration_time(nanoseconds: int) -> str:
    """``"0.931 s"``: slowdowns of pipelines are small."""
    return f"{nanoseconds / 1e9:.3g} s"


def _with_sentences(
    lines: Sequence[str], sentences: Sequence[str], width: int | None
) -> Iterator[str]:
    """Each line with its sentence, after it where all fit into ``width``, or below."""
    margin = max(map(len, lines)) + 2
    beside = width is None or margin + max(map(len, sentences)) <= width
    for line, sentence in zip(lines, sentences, strict=True):
        if beside:
            yield f"{line:<{margin}}{sentence}".rstrip()
        else:
            yield line
            yield from wrap_lines(sentence, width, "  ")


def wrap_lines(text: str, width: int | None, indent: str) -> Iterator[str]:
    """``text`` in lines of at most ``width``; in one line without a width."""
    yield from textwrap.wrap(
        text,
        sys.maxsize if width is None else max(40, width),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


# ------------------------------------------------------------------------------------ instances

NOT_TRACKED = (
    "The load of no job is tracked, so no number of instances can be compared. Set"
    ' `control = "track"` for the job of a server in [[autotune.job]].'
)
_LIMITS = {True: "kept", False: "missed", None: "not certain"}


def recommendation_lines(accounts: TuningAccounts, instances: int) -> Iterator[str]:
    """A table of the numbers of instances of each tracked job, and the best one."""
    rows = [row for row in sort_rows(accounts.rows) if row.load is not None]
    if not rows:
        yield NOT_TRACKED
    for number, row in enumerate(rows):
        if number:
            yield ""
        yield from _instance_lines(row, instances)


def recommendation_facts(row: TuningRow, instances: int) -> dict[str, Any] | None:
    """The JSON form for one job; None if its load is not tracked."""
    if row.load is None:
        return None
    ranges = instance_ranges(row.load, instances)
    best = best_range(ranges)
    return {
        "job": row.job,
        "unit": unit(row.knob),
        "instances": instances,
        "load": row.load.load,
        "ranges": [_range_facts(row.knob, one) for one in ranges],
        "recommended": None if best is None else _range_facts(row.knob, best),
    }


def _range_facts(knob: Knob, one: InstanceRange) -> dict[str, Any]:
    return {
        "least_instances": one.least,
        "most_instances": one.most,
        "bin_bound": one.bin.bin_bound,
        "setting": setting_number(knob, one.bin.setting),
        "kept": one.bin.kept,
        "requests": one.bin.requests,
        "joules_per_token": one.bin.joules_per_token,
        "energy_change": one.change,
    }


def _instance_lines(row: TuningRow, instances: int) -> Iterator[str]:
    load = row.load
    assert load is not None  # noqa: S101 - rows without a load are left out
    each = f"{instances} instances of" if instances > 1 else "1 instance of"
    yield f"{row.job}: {each} load {load.load:.1f}"
    ranges = instance_ranges(load, instances)
    if not ranges:
        yield "No figure yet: no request is in flight, or no load bin has ended requests."
        return
    best = best_range(ranges)
    columns = (
        TableColumn("INSTANCES", _instances_text),
        TableColumn("LOAD OF EACH", partial(_load_of_each, load.load * instances)),
        TableColumn("SETTING", lambda one: setting_text(row.knob, one.bin.setting), left=True),
        TableColumn("LIMITS", lambda one: _LIMITS[one.bin.kept], left=True),
        TableColumn("REQUESTS", lambda one: str(one.bin.requests)),
        TableColumn("J/TOKEN", _joules_per_token),
        TableColumn("ENERGY", lambda one: _change_text(one.change)),
    )
    for one, line in zip([None, *ranges], table_lines(columns, ranges), strict=True):
        yield f"{' ' if one is None or one is not best else '*'} {line}".rstrip()
    if best is None:
        yield "No recommendation: no load bin has certain latencies and known energy per token yet."
        return
    yield (
        f"* is the least energy within the latency limits: INSTANCES {_instances_text(best)},"
        f" ENERGY {_change_text(best.change)}. Nothing is changed: a load balancer or a scheduler"
        " sets the number of instances. Loads that were never met have no line."
    )


def _joules_per_token(one: InstanceRange) -> str:
    energy = one.bin.joules_per_token
    return UNKNOWN if energy is None else f"{energy:.3g}"


def _instances_text(one: InstanceRange) -> str:
    if one.most is None:
        return f"{one.least} or more"
    return str(one.least) if one.most == one.least else f"{one.least} to {one.most}"


def _load_of_each(total: float, one: InstanceRange) -> str:
    most = total / one.least
    if one.most is None:
        return f"{most:.1f} or less"
    return f"{most:.1f}" if one.most == one.least else f"{total / one.most:.1f} to {most:.1f}"


def _change_text(change: float | None) -> str:
    if change is None:
        return UNKNOWN
    text = percent(change)
    return text if text.startswith(("-", "0.0")) else f"+{text}"
