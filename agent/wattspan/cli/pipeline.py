"""``wattspan pipeline``: clocks for pipeline-parallel training, computed from a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import click
import msgspec

from wattspan.cli.formatting import UNKNOWN, TableColumn, joules_text, table_lines
from wattspan.cli.options import FILE, echo_error, echo_result, json_option, with_options
from wattspan.ports import WattspanError
from wattspan.tuning.pipeline.dag import BadPipelineError, PipelineSchedule, recognised, scheduled
from wattspan.tuning.pipeline.files import (
    StoredPlan,
    plan_json,
    profile_text,
    read_plan,
    read_profile,
    read_spans,
    write_file,
    zeus_text,
)
from wattspan.tuning.pipeline.frontier import PipelineFrontier, PipelineModel
from wattspan.tuning.pipeline.iterations import observed
from wattspan.tuning.pipeline.plan import (
    RankClocks,
    instruction_plan,
    rank_orders,
    target_iteration,
)
from wattspan.util.text import printable


class PipelineDeclinedError(WattspanError):
    """The pipeline cannot be planned, for a reason that the message names."""


@contextmanager
def _declining() -> Iterator[None]:
    try:
        yield
    except BadPipelineError as error:
        raise PipelineDeclinedError(f"bad_pipeline: {error}") from None


files_argument = click.argument("files", metavar="PROFILE...", nargs=-1, required=True, type=FILE)
watts_option = click.option(
    "--blocking-watts",
    type=click.FloatRange(min=0),
    required=True,
    help="Power of a GPU while it waits for another rank, W: about 70 on an A40, 85 on an A100.",
)
output_option = click.option(
    "--output", "-o", type=FILE, help="Write to this file. [default: standard output]"
)


model_options = with_options(
    files_argument,
    watts_option,
    click.option(
        "--spans",
        type=FILE,
        help="A table of executed instructions, from which the order is taken instead of "
        "--schedule, --microbatches and --ranks.",
    ),
    click.option(
        "--microbatches", type=click.IntRange(min=1), help="Micro-batches of one iteration."
    ),
    click.option(
        "--schedule",
        type=click.Choice(("gpipe", "1f1b", "interleaved")),
        help="Order of the instructions on a rank. [default: 1f1b]",
    ),
    click.option(
        "--ranks",
        type=click.IntRange(min=1),
        help="Ranks of an interleaved pipeline. [default: one for each stage]",
    ),
)
"""The profile and the pipeline, which together are the model of a plan."""


@click.group(name="pipeline")
def command() -> None:
    """Plan clocks for pipeline-parallel training, from a profile.

    A profile is a table with the columns stage, instruction (forward or backward), frequency (MHz),
    time (s) and energy (J), as Zeus writes it. Energies of several profiles of the same pipeline
    are scaled to each other. Nothing is applied to a GPU.
    """


@command.command()
@files_argument
@watts_option
@output_option
@json_option
def profile(
    files: tuple[Path, ...], blocking_watts: float, output: Path | None, as_json: bool
) -> None:
    """Check profiles, and show each stage at the highest clock and at its cheapest one.

    The cheapest clock has the least energy beyond the blocking power. With --output, the profiles
    are combined in one file.
    """
    with _declining():
        known = _read(files)
        costs = known.costs(blocking_watts)
    facts = []
    for key in sorted(costs, key=lambda one: (one.stage, one.kind.value)):
        cost = costs[key]
        highest, cheapest = cost.by_clock[known.clocks[-1]], min(cost.points, key=cost.cost)
        facts.append(
            {
                "stage": key.stage,
                "instruction": key.kind.value,
                "highest": highest._asdict(),
                "cheapest": cheapest._asdict(),
            }
        )
    if output is not None:
        write_file(output, profile_text(known))
    lines = table_lines(_STAGE_COLUMNS, facts)
    echo_result({"blocking_watts": blocking_watts, "instructions": facts}, lines, as_json=as_json)


@command.command()
@model_options
@click.option("--points", type=click.IntRange(2, 1000), default=12, help="Iteration times to show.")
@json_option
def frontier(
    files: tuple[Path, ...], blocking_watts: float, points: int, as_json: bool, **pipeline: Any
) -> None:
    """Show the least energy for every iteration time, with a clock for each instruction.

    ENERGY is that of all GPUs, relative to the highest clock. BOUND is a proven bound: no clocks
    save more.
    """
    with _declining():
        model = _model(files, blocking_watts, **pipeline)
        uncapped, found = RankClocks(model).fastest, PipelineFrontier(model)
        step = (found.longest - found.shortest) / (points - 1)
        times = [found.shortest + number * step for number in range(points - 1)]
        optima = [found.at(seconds) for seconds in (*times, found.longest)]
    columns = (
        TableColumn("ITERATION", lambda one: f"{one['seconds']:.3f} s"),
        TableColumn("TIME", lambda one: _change(one["seconds"], uncapped.seconds)),
        TableColumn("ENERGY", lambda one: joules_text(one["joules"])),
        TableColumn("", lambda one: _change(one["joules"], uncapped.joules)),
        TableColumn("BOUND", lambda one: _change(one["least_joules"], uncapped.joules)),
    )
    found_points = [
        {"seconds": one.seconds, "joules": one.joules, "least_joules": one.bound} for one in optima
    ]
    facts = {
        "uncapped": {"seconds": uncapped.seconds, "joules": uncapped.joules},
        "points": found_points,
    }
    head = (
        f"{uncapped.seconds:.3f} s and {joules_text(uncapped.joules)} at the highest clock,"
        " computed from the profile"
    )
    echo_result(facts, [head, *table_lines(columns, found_points)], as_json=as_json)


@command.command()
@model_options
@click.option(
    "--max-slowdown",
    type=click.FloatRange(min=0),
    default=0.01,
    help="Longest iteration relative to the highest clock: 0.01 is 1 %.",
)
@click.option(
    "--straggler",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Iteration time of a slower pipeline that this one waits for, instead of --max-slowdown.",
)
@click.option(
    "--each",
    type=click.Choice(("rank", "instruction")),
    default="rank",
    help="One clock for each rank, or one for each instruction.",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(("text", "json", "zeus")),
    default="text",
    help="A table, a plan for `wattspan pipeline show`, or a plan for Zeus's controller.",
)
@output_option
def plan(
    files: tuple[Path, ...],
    blocking_watts: float,
    max_slowdown: float,
    straggler: float | None,
    each: str,
    file_format: str,
    output: Path | None,
    **pipeline: Any,
) -> None:
    """Compute the clocks with the least energy within a slowdown or beside a straggler.

    Clocks that change with each instruction need a controller inside the training process, such as
    Zeus's PipelineFrequencyOptimizer, which loads the format zeus from a file that ends in .py.
    """
    with _declining():
        model = _model(files, blocking_watts, **pipeline)
        stored, orders = _plan(model, max_slowdown, straggler, each)
    match file_format:
        case "zeus":
            text = zeus_text(orders)
        case "json":
            text = plan_json(stored)
        case _:
            text = "".join(f"{line}\n" for line in _plan_lines(stored))
    if output is None:
        click.echo(text, nl=False)
    else:
        write_file(output, text)


@command.command()
@click.argument("file", metavar="PLAN", type=FILE)
@json_option
def show(file: Path, as_json: bool) -> None:
    """Show a plan that `wattspan pipeline plan --format json` wrote."""
    stored = read_plan(file)
    echo_result(msgspec.to_builtins(stored), _plan_lines(stored), as_json=as_json)


# ------------------------------------------------------------------------------- computation


def _read(files: Sequence[Path]) -> Any:
    profile, left_out = read_profile(files)
    if left_out:
        echo_error(
            f"warning: Instructions other than forward and backward are not planned: "
            f"{', '.join(map(printable, left_out[:5]))}."
        )
    return profile


def _model(
    files: Sequence[Path],
    blocking_watts: float,
    *,
    spans: Path | None,
    microbatches: int | None,
    schedule: str | None,
    ranks: int | None,
) -> PipelineModel:
    named = schedule is not None or microbatches is not None or ranks is not None
    if named if spans is not None else microbatches is None:
        raise click.UsageError(
            "Give the pipeline by --microbatches, --schedule and --ranks, or by --spans."
        )
    profile = _read(files)
    if spans is not None:
        dag = observed(read_spans(spans))
    else:
        known = PipelineSchedule(schedule or "1f1b")
        dag = scheduled(known, profile.stage_count, microbatches or 0, ranks)
    return PipelineModel(dag, profile, blocking_watts)


def _plan(
    model: PipelineModel, max_slowdown: float, straggler: float | None, each: str
) -> tuple[StoredPlan, list[list[tuple[str, int]]]]:
    wait = straggler or 0.0
    reference = RankClocks(model, wait)
    uncapped = reference.fastest
    limit = uncapped.seconds * (1 + max_slowdown) if straggler is None else straggler
    clocks: list[int | list[tuple[str, int]]]
    if each == "rank":
        found = reference.best(limit)
        orders = rank_orders(model, found.clocks)
        clocks, seconds, joules = list(found.clocks), found.seconds, found.joules
    else:
        whole = PipelineFrontier(model)
        point = whole.at(target_iteration(whole, limit, wait))
        of_each = instruction_plan(model, point, wait)
        orders = rank_orders(model, of_each.clocks)
        clocks, seconds, joules = [*orders], of_each.seconds, of_each.joules
    dag = model.dag
    schedule = recognised(dag.orders)
    stored = StoredPlan(
        schedule="observed" if schedule is None else schedule.value,
        stages=dag.stage_count,
        ranks=dag.rank_count,
        microbatches=dag.microbatch_count,
        blocking_watts=model.blocking_watts,
        each="rank" if each == "rank" else "instruction",
        clocks_mhz=clocks,
        seconds=seconds,
        joules=joules,
        wait_until_seconds=wait,
        uncapped_seconds=uncapped.seconds,
        uncapped_joules=uncapped.joules,
    )
    return stored, orders


# ------------------------------------------------------------------------------------- output


def _plan_lines(plan: StoredPlan) -> list[str]:
    waiting = ""
    if plan.wait_until_seconds:
        waiting = f", all waiting for a pipeline of {plan.wait_until_seconds:.3f} s"
    columns = (
        TableColumn("RANK", lambda one: str(one[0])),
        TableColumn("MHz", lambda one: _clock_text(one[1]), left=True),
    )
    return [
        f"{plan.schedule}, {plan.stages} stages on {plan.ranks} ranks, {plan.microbatches}"
        f" micro-batches, {plan.blocking_watts:g} W blocking{waiting}",
        f"{plan.uncapped_seconds:.3f} s and {joules_text(plan.uncapped_joules)} at the highest"
        " clock",
        f"{plan.seconds:.3f} s ({_change(plan.seconds, plan.uncapped_seconds)}) and"
        f" {joules_text(plan.joules)} ({_change(plan.joules, plan.uncapped_joules)}) by this plan",
        "Computed from a profile, not measured.",
        "",
        *table_lines(columns, enumerate(plan.clocks_mhz)),
    ]


def _clock_text(clocks: int | Sequence[tuple[str, int]]) -> str:
    """One clock, or the range of clocks by the name of the instructions, and their changes."""
    if isinstance(clocks, int):
        return str(clocks)
    by_name: dict[str, list[int]] = {}
    for name, mhz in clocks:
        by_name.setdefault(name, []).append(mhz)
    ranges = ", ".join(f"{name} {min(of)}-{max(of)}" for name, of in sorted(by_name.items()))
    changes = sum(one != other for (_, one), (_, other) in pairwise(clocks))
    return f"{ranges}; {changes} changes"


def _change(value: float, reference: float) -> str:
    return f"{value / reference - 1:+.1%}" if reference else UNKNOWN


def _change_of(stage: dict[str, Any], key: str) -> str:
    return _change(stage["cheapest"][key], stage["highest"][key])


_STAGE_COLUMNS = (
    TableColumn("stage", itemgetter("stage")),
    TableColumn("instruction", itemgetter("instruction"), left=True),
    TableColumn("MHz", lambda one: one["highest"]["mhz"]),
    TableColumn("time", lambda one: f"{one['highest']['seconds'] * 1e3:.1f} ms"),
    TableColumn("energy", lambda one: joules_text(one["highest"]["joules"])),
    TableColumn("cheapest MHz", lambda one: one["cheapest"]["mhz"]),
    TableColumn("time", lambda one: _change_of(one, "seconds")),
    TableColumn("energy", lambda one: _change_of(one, "joules")),
)
