"""``wattspan pipeline``: clocks for pipeline-parallel training, computed from a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wattspan.cli.formatting import joules_text, table_lines
from wattspan.cli.options import echo_error, echo_json, json_option
from wattspan.ports import WattspanError
from wattspan.util.text import printable

if TYPE_CHECKING:
    from wattspan.tuning.pipeline.files import StoredPlan
    from wattspan.tuning.pipeline.frontier import PipelineFrontier, PipelineModel
    from wattspan.tuning.pipeline.plan import ClockPlan

_SCHEDULES = ("gpipe", "1f1b", "interleaved")

F = TypeVar("F", bound=Callable[..., Any])


class PipelineDeclinedError(WattspanError):
    """The pipeline cannot be planned, for a reason that the message names."""


@contextmanager
def _declining() -> Iterator[None]:
    from wattspan.tuning.pipeline.dag import BadPipelineError

    try:
        yield
    except BadPipelineError as error:
        raise PipelineDeclinedError(f"bad_pipeline: {error}") from None


files_argument = click.argument(
    "files",
    metavar="PROFILE...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
)
watts_option = click.option(
    "--blocking-watts",
    type=click.FloatRange(min=0),
    required=True,
    help="Power of a GPU while it waits for another rank, W: about 70 on an A40, 85 on an A100.",
)
output_option = click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write to this file. [default: standard output]",
)


def model_options(function: F) -> F:
    """The profile and the pipeline, which together are the model of a plan."""
    for option in (
        click.option(
            "--ranks",
            type=click.IntRange(min=1),
            help="Ranks of an interleaved pipeline. [default: one for each stage]",
        ),
        click.option(
            "--schedule",
            type=click.Choice(_SCHEDULES),
            help="Order of the instructions on a rank. [default: 1f1b]",
        ),
        click.option(
            "--microbatches",
            type=click.IntRange(min=1),
            help="Micro-batches of one iteration.",
        ),
        click.option(
            "--spans",
            type=click.Path(path_type=Path, dir_okay=False),
            help="A table of executed instructions, from which the order is taken instead of "
            "--schedule, --microbatches and --ranks.",
        ),
        watts_option,
        files_argument,
    ):
        option(function)
    return function


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
    from wattspan.tuning.pipeline.files import profile_text, write_file

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
    if as_json:
        echo_json({"blocking_watts": blocking_watts, "instructions": facts})
        return
    rows = [("stage", "instruction", "MHz", "time", "energy", "cheapest MHz", "time", "energy")]
    for one in facts:
        high, low = one["highest"], one["cheapest"]
        rows.append(
            (
                str(one["stage"]),
                str(one["instruction"]),
                str(high["mhz"]),
                _milliseconds(high["seconds"]),
                joules_text(high["joules"]),
                str(low["mhz"]),
                _change(low["seconds"], high["seconds"]),
                _change(low["joules"], high["joules"]),
            )
        )
    _echo(table_lines(rows, left=(1,)))


@command.command()
@model_options
@click.option(
    "--points",
    type=click.IntRange(2, 1000),
    default=12,
    show_default=True,
    help="Iteration times to show.",
)
@json_option
def frontier(
    files: tuple[Path, ...],
    blocking_watts: float,
    points: int,
    as_json: bool,
    **pipeline: Any,
) -> None:
    """Show the least energy for every iteration time, with a clock for each instruction.

    ENERGY is that of all GPUs, relative to the highest clock. BOUND is a proven bound: no clocks
    save more.
    """
    with _declining():
        model = _model(files, blocking_watts, **pipeline)
        uncapped, found = _uncapped(model), _frontier(model)
        step = (found.longest - found.shortest) / (points - 1)
        times = [found.shortest + number * step for number in range(points - 1)]
        optima = [found.at(seconds) for seconds in (*times, found.longest)]
    if as_json:
        echo_json(
            {
                "uncapped": {"seconds": uncapped.seconds, "joules": uncapped.joules},
                "points": [
                    {"seconds": one.seconds, "joules": one.joules, "least_joules": one.bound}
                    for one in optima
                ],
            }
        )
        return
    rows = [("ITERATION", "TIME", "ENERGY", "", "BOUND")]
    rows += [
        (
            f"{one.seconds:.3f} s",
            _change(one.seconds, uncapped.seconds),
            joules_text(one.joules),
            _change(one.joules, uncapped.joules),
            _change(one.bound, uncapped.joules),
        )
        for one in optima
    ]
    _echo([_uncapped_text(uncapped), *table_lines(rows, left=())])


@command.command()
@model_options
@click.option(
    "--max-slowdown",
    type=click.FloatRange(min=0),
    default=0.01,
    show_default=True,
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
    show_default=True,
    help="One clock for each rank, or one for each instruction.",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(("text", "json", "zeus")),
    default="text",
    show_default=True,
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
    from wattspan.tuning.pipeline.files import plan_json, write_file, zeus_text

    with _declining():
        model = _model(files, blocking_watts, **pipeline)
        stored, orders = _plan(model, max_slowdown, straggler, each)
    if file_format == "zeus":
        text = zeus_text(orders)
    elif file_format == "json":
        text = plan_json(stored)
    else:
        text = "".join(f"{line}\n" for line in _plan_lines(stored))
    if output is None:
        click.echo(text, nl=False)
    else:
        write_file(output, text)


@command.command()
@click.argument("file", metavar="PLAN", type=click.Path(path_type=Path, dir_okay=False))
@json_option
def show(file: Path, as_json: bool) -> None:
    """Show a plan that `wattspan pipeline plan --format json` wrote."""
    import msgspec

    from wattspan.tuning.pipeline.files import read_plan

    stored = read_plan(file)
    if as_json:
        echo_json(msgspec.to_builtins(stored))
        return
    _echo(_plan_lines(stored))


# ------------------------------------------------------------------------------- computation


def _read(files: Sequence[Path]) -> Any:
    from wattspan.tuning.pipeline.files import read_profile

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
    from wattspan.tuning.pipeline.dag import PipelineSchedule, scheduled
    from wattspan.tuning.pipeline.files import read_spans
    from wattspan.tuning.pipeline.frontier import PipelineModel
    from wattspan.tuning.pipeline.iterations import observed

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


def _frontier(model: PipelineModel) -> PipelineFrontier:
    from wattspan.tuning.pipeline.frontier import PipelineFrontier

    return PipelineFrontier(model)


def _uncapped(model: PipelineModel) -> ClockPlan:
    from wattspan.tuning.pipeline.plan import RankClocks

    return RankClocks(model).fastest


def _plan(
    model: PipelineModel,
    max_slowdown: float,
    straggler: float | None,
    each: str,
) -> tuple[StoredPlan, list[list[tuple[str, int]]]]:
    from wattspan.tuning.pipeline.dag import recognised
    from wattspan.tuning.pipeline.files import StoredPlan
    from wattspan.tuning.pipeline.plan import (
        RankClocks,
        instruction_plan,
        rank_orders,
        target_iteration,
    )

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
        whole = _frontier(model)
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
    if plan.wait_until_seconds:
        waiting = f", all waiting for a pipeline of {plan.wait_until_seconds:.3f} s"
    else:
        waiting = ""
    lines = [
        f"{plan.schedule}, {plan.stages} stages on {plan.ranks} ranks, {plan.microbatches}"
        f" micro-batches, {plan.blocking_watts:g} W blocking{waiting}",
        f"{plan.uncapped_seconds:.3f} s and {joules_text(plan.uncapped_joules)} at the highest"
        " clock",
        f"{plan.seconds:.3f} s ({_change(plan.seconds, plan.uncapped_seconds)}) and"
        f" {joules_text(plan.joules)} ({_change(plan.joules, plan.uncapped_joules)}) by this plan",
        "Computed from a profile, not measured.",
        "",
    ]
    rows = [("RANK", "MHz")]
    for rank, clocks in enumerate(plan.clocks_mhz):
        rows.append((str(rank), str(clocks) if isinstance(clocks, int) else _ranges(clocks)))
    return [*lines, *table_lines(rows, left=(1,))]


def _ranges(clocks: Sequence[tuple[str, int]]) -> str:
    """The range of clocks by the name of the instructions, and the number of changes."""
    by_name: dict[str, list[int]] = {}
    for name, mhz in clocks:
        by_name.setdefault(name, []).append(mhz)
    ranges = ", ".join(f"{name} {min(of)}-{max(of)}" for name, of in sorted(by_name.items()))
    changes = sum(one != other for (_, one), (_, other) in pairwise(clocks))
    return f"{ranges}; {changes} changes"


def _uncapped_text(uncapped: ClockPlan) -> str:
    return (
        f"{uncapped.seconds:.3f} s and {joules_text(uncapped.joules)} at the highest clock,"
        " computed from the profile"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _change(value: float, reference: float) -> str:
    return f"{value / reference - 1:+.1%}" if reference else "-"


def _echo(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(printable(line))
