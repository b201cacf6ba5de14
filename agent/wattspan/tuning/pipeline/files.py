"""Profiles, spans and plans of pipelines in files. A plan is data and is never executed."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from wattspan.ports import WattspanError
from wattspan.tuning.pipeline.costs import ClockPoint, PipelineProfile, ProfileRow, profile_of
from wattspan.tuning.pipeline.dag import (
    MAX_INSTRUCTIONS,
    CostKey,
    InstructionKind,
    PipelineInstruction,
)
from wattspan.tuning.pipeline.iterations import InstructionSpan
from wattspan.util.files import UnsuitableFileError, read_regular, replace_file

VERSION: Final = 1
MAX_FILE_BYTES: Final = 64 << 20
MAX_STAGES: Final = 1024
MAX_MHZ: Final = 10_000

COLUMNS: Final = ("stage", "instruction", "frequency", "time", "energy")
"""Columns of a profile, as Zeus writes it: MHz, seconds, joules. `iteration` is optional."""

SPAN_COLUMNS: Final = ("iteration", "rank", "stage", "instruction", "microbatch", "start", "end")
"""Columns of executed instructions: start and end in seconds."""

_ITERATION: Final = "iteration"
_MAX_ITERATION: Final = 2**53
_KINDS: Final = {kind.value: kind for kind in InstructionKind}


T = TypeVar("T")


class PipelineFileError(WattspanError):
    """A profile or a plan cannot be read or written."""


class StoredPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan with the pipeline that it is for; all figures are computed from a profile.

    ``clocks_mhz`` has the clock of each rank, or the names and clocks of each rank's instructions
    in their order. ``uncapped_seconds`` and ``uncapped_joules`` are those of the highest clock.
    """

    version: int = VERSION
    schedule: str
    stages: int
    ranks: int
    microbatches: int
    blocking_watts: float
    each: Literal["rank", "instruction"]
    clocks_mhz: list[int | list[tuple[str, int]]]
    seconds: float
    joules: float
    wait_until_seconds: float = 0.0
    uncapped_seconds: float
    uncapped_joules: float


def read_profile(paths: Iterable[Path]) -> tuple[PipelineProfile, tuple[str, ...]]:
    """The profile in one or several files, and the names of instructions that are not planned.

    PipelineFileError, BadPipelineError.
    """
    left_out: dict[str, None] = {}
    needed = "a stage from 0, a frequency in MHz, a time in seconds and an energy in joules"
    files = [_table(path, COLUMNS, _row, needed, left_out) for path in paths]
    return profile_of(files), tuple(left_out)


def read_spans(path: Path) -> list[InstructionSpan]:
    """The executions of instructions in a file; PipelineFileError.

    Instructions other than forward and backward are left out.
    """
    needed = (
        "an iteration, a rank, a stage and a micro-batch from 0, and a start and an end in seconds"
    )
    return _table(path, SPAN_COLUMNS, _span, needed, {})


def _table(
    path: Path,
    columns: Sequence[str],
    parse: Callable[[dict[str, str]], T],
    needed: str,
    left_out: dict[str, None],
) -> list[T]:
    """The rows of a table by the names of its columns, and in ``left_out`` other instructions."""
    try:
        text = _content(path).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        missing = [name for name in columns if name not in (reader.fieldnames or ())]
        if missing:
            raise PipelineFileError(
                f"Cannot read {path}: it has no column {', '.join(missing)}. The columns are"
                f" {', '.join(columns)}."
            )
        rows = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise PipelineFileError(
            f"Cannot read {path}: it is no table of comma-separated values ({error})."
        ) from None
    found = []
    for number, row in rows:
        if row["instruction"] not in _KINDS:
            left_out[str(row["instruction"])] = None
            continue
        try:
            found.append(parse(row))
        except (TypeError, ValueError) as error:
            raise PipelineFileError(
                f"Cannot read {path}: line {number} is invalid ({error}). It needs {needed}."
            ) from None
    return found


def _span(row: dict[str, str]) -> InstructionSpan:
    start, end = float(row["start"]), float(row["end"])
    if not -1e12 < start < end < 1e12:  # false for NaN
        raise ValueError(f"start {start:g}, end {end:g}")
    return InstructionSpan(
        _whole(row[_ITERATION], _ITERATION, 0, _MAX_ITERATION),
        _whole(row["rank"], "rank", 0, MAX_STAGES - 1),
        PipelineInstruction(
            _whole(row["stage"], "stage", 0, MAX_STAGES - 1),
            _KINDS[row["instruction"]],
            _whole(row["microbatch"], "microbatch", 0, MAX_INSTRUCTIONS - 1),
        ),
        start,
        end,
    )


def _row(row: dict[str, str]) -> ProfileRow:
    stage = _whole(row["stage"], "stage", 0, MAX_STAGES - 1)
    mhz = _whole(row["frequency"], "frequency", 1, MAX_MHZ)
    seconds, joules = float(row["time"]), float(row["energy"])
    for name, value in (("time", seconds), ("energy", joules)):
        if not 1e-9 <= value < 1e9:  # false for NaN
            raise ValueError(f"{name} {value:g}")
    iteration = (
        _whole(row[_ITERATION], _ITERATION, 0, _MAX_ITERATION) if row.get(_ITERATION) else None
    )
    return ProfileRow(
        CostKey(stage, _KINDS[row["instruction"]]), ClockPoint(mhz, seconds, joules), iteration
    )


def _whole(text: str, name: str, least: int, most: int) -> int:
    value = float(text)
    if not least <= value <= most or value != int(value):
        raise ValueError(f"{name} {text}")
    return int(value)


def profile_text(profile: PipelineProfile) -> str:
    """The table of a profile, with the columns of Zeus."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for key, points in sorted(
        profile.points.items(), key=lambda one: (one[0].stage, one[0].kind.value)
    ):
        for point in points:
            writer.writerow(
                (key.stage, key.kind.value, point.mhz, repr(point.seconds), repr(point.joules))
            )
    return out.getvalue()


def plan_json(plan: StoredPlan) -> str:
    """The plan as this project's JSON."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1).decode() + "\n"


def zeus_text(orders: Sequence[Sequence[tuple[str, int]]]) -> str:
    """The plan as Zeus's pipeline frequency optimizer loads it: a list of pairs for each rank.

    Only numbers and the two names of instructions occur in it, because Zeus evaluates the file.
    """
    lines = [
        "[" + ", ".join(f"('{_KINDS[name].value}', {int(mhz)})" for name, mhz in order) + "],\n"
        for order in orders
    ]
    return "[\n" + "".join(lines) + "]\n"


def read_plan(path: Path) -> StoredPlan:
    """The plan in a file of ``plan_json``; PipelineFileError."""
    try:
        plan = msgspec.json.decode(_content(path), type=StoredPlan)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _no_plan(path, str(error)) from None
    if plan.version != VERSION:
        raise _no_plan(path, f"version {plan.version}, and this release reads {VERSION}")
    if len(plan.clocks_mhz) != plan.ranks:
        raise _no_plan(path, f"clocks of {len(plan.clocks_mhz)} ranks, and there are {plan.ranks}")
    if any(isinstance(one, int) != (plan.each == "rank") for one in plan.clocks_mhz):
        raise _no_plan(path, f"its clocks are not by {plan.each}")
    return plan


def write_file(path: Path, text: str) -> None:
    """Replace the file; PipelineFileError."""
    try:
        replace_file(path, text.encode(), path.with_name(f".{path.name}.draft"))
    except OSError as error:
        cause = (error.strerror or str(error)).lower()
        raise PipelineFileError(
            f"Cannot write {path}: {cause}. Name a file in a directory that can be written."
        ) from None


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_FILE_BYTES).content
    except UnsuitableFileError as error:
        raise PipelineFileError(f"Cannot read {path}: {error.strerror}.") from None
    except OSError as error:
        cause = (error.strerror or str(error)).lower()
        raise PipelineFileError(f"Cannot read {path}: {cause}.") from None


def _no_plan(path: Path, cause: str) -> PipelineFileError:
    return PipelineFileError(
        f"Cannot read {path}: it is no plan ({cause}). Name a file that `wattspan pipeline plan`"
        " wrote as JSON."
    )
