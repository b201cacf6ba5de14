"""``wattspan frontier``: which setting of a command to run, from its measured time and energy."""

from __future__ import annotations

import csv
import io
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import click

from wattspan.cli.frontier.tables import (
    autotune_lines,
    configuration_lines,
    recommendation_facts,
    recommendation_lines,
    study_facts,
    study_lines,
    study_note,
    trial_rows,
)
from wattspan.cli.options import (
    DURATION,
    FILE,
    ConfigurationOptions,
    config_options,
    echo_error,
    echo_json,
    json_option,
    with_options,
)
from wattspan.clock import SystemClock
from wattspan.frontier.recommendation import DEFAULT_TOLERANCE, Frontier
from wattspan.frontier.schedule import DEFAULT_LONGEST, TrialSchedule
from wattspan.frontier.trials import (
    Study,
    StudyFile,
    StudyFileError,
    grid,
    parse_clocks,
    parse_parameter,
    parse_powers,
    substituted,
)
from wattspan.frontier.work import MIN_WINDOW, UnitSpan, parse_unit
from wattspan.model import SECOND
from wattspan.model.settings import Duration
from wattspan.ports import ConfigError, WattspanError
from wattspan.service.configuration import agent_directories

DEFAULT_FILE = "frontier.json"

study_argument = click.argument("file", type=FILE, default=DEFAULT_FILE)


@click.group(name="frontier")
def command() -> None:
    """Measure a command at several settings, and recommend one."""


@command.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="\b\nAn example:\n  wattspan frontier run --power 100%..60%/5 --param batch=16,32 "
    "--unit 'stdout:samples=(\\d+)' \\\n      -- python train.py --batch-size {batch}",
)
@click.option("--power", metavar="LIMITS", help="Power limits, such as 100%..60%/5 or 300W,250W.")
@click.option("--clock", metavar="MHZ,...", help="Locked GPU clocks in MHz, such as 1980,1500.")
@click.option(
    "--param",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE,...",
    help="Values of {NAME} in the command; the first one is the baseline's. Repeatable.",
)
@click.option(
    "--unit",
    required=True,
    metavar="UNIT",
    help="The completed units of work. stdout:REGEX: the lines of the command's output that match; "
    "a group is the number of units in a line. span:NAME: the spans of this name that the command "
    "sends by OTLP; span:NAME:ATTRIBUTE: the number of units is an attribute.",
)
@click.option("--repeat", type=click.IntRange(1, 100), default=3, help="Trials of each setting.")
@click.option(
    "--warm-up", type=DURATION, default="5s", help="Time from the start of a trial to its window."
)
@click.option(
    "--window", type=DURATION, default="10s", help="Measured time of a trial, 5 s at least."
)
@click.option("--trial-limit", type=DURATION, default="10m", help="Longest time of one trial.")
@click.option(
    "--longest",
    type=click.FloatRange(min=1),
    default=DEFAULT_LONGEST,
    help="Follow a knob no further above this time relative to the baseline.",
)
@click.option(
    "--max-slowdown",
    type=click.FloatRange(min=0),
    help="Spend the trials on the settings that may be recommended for this slowdown: 0.05 is 5 %.",
)
@click.option(
    "--time-budget",
    type=DURATION,
    help="Time for all trials of the study. Those with the most expected gain are run first. "
    "[default: all trials]",
)
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="ID",
    help="Measure and set this device only, by id, GPU index or UUID. Repeatable. "
    "[default: the GPUs; without any, all devices]",
)
@click.option("--output", "-o", "file", type=FILE, default=DEFAULT_FILE, help="File of the trials.")
@click.option(
    "--resume", is_flag=True, help="Continue the study in the file; failed trials are tried again."
)
@click.option("--verbose", is_flag=True, help="Show the output of the command.")
@config_options
@click.argument("words", metavar="CMD [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(
    context: click.Context,
    words: tuple[str, ...],
    power: str | None,
    clock: str | None,
    parameters: tuple[str, ...],
    unit: str,
    repeat: int,
    warm_up: Duration,
    window: Duration,
    trial_limit: Duration,
    longest: float,
    max_slowdown: float | None,
    time_budget: Duration | None,
    devices: tuple[str, ...],
    file: Path,
    resume: bool,
    verbose: bool,
    configuration: ConfigurationOptions,
) -> None:
    """Run a command at several settings, and keep the time and energy of its work.

    Each trial starts the command, waits for the warm-up, measures whole units of work for the
    window, and ends the command. The first setting is the baseline: original limits and the first
    value of each parameter. The trials are kept in a file after each one.

    Needs a running agent. Limits are set by the capper, which restores the original ones after
    each trial, also if this command is killed. Without a capper, only parameters are compared.
    """
    # Sockets, threads and progress bars: the other commands and the help need none.
    from wattspan.cli.frontier import measurement
    from wattspan.cli.measure import RunningAgentClient, process_identity
    from wattspan.frontier.runner import Durations, TrialRunner
    from wattspan.frontier.span_units import SpanReceiver

    units = parse_unit(unit)
    choices = dict(map(parse_parameter, parameters))
    settings = grid(
        parse_powers(power) if power else [], parse_clocks(clock) if clock else [], choices
    )
    for setting in settings:
        substituted(words, dict(setting.parameters))
    if window < MIN_WINDOW:
        raise ConfigError(f"--window {window}: a window has {MIN_WINDOW // SECOND} s at least.")
    if trial_limit <= warm_up + window:
        raise ConfigError(f"--trial-limit {trial_limit}: it is above --warm-up and --window.")
    if time_budget is not None and time_budget < 2 * (warm_up + window):
        raise ConfigError(
            f"--time-budget {time_budget}: two trials need {Duration(2 * (warm_up + window))} at"
            " least, that of the baseline and another one. Give more, or a shorter --window."
        )
    kept = StudyFile(file)
    if not resume and file.exists():
        raise StudyFileError(
            f"{file} exists. Continue it with --resume, or name another file with --output."
        )
    config = configuration.load_without_plugins(client=True)
    directories = agent_directories(config)
    system_clock = SystemClock()
    host = measurement.measured_host(devices, system_clock, directories)
    settings, settable = measurement.settable_here(configuration, settings, host)
    study = Study(
        created_unix=system_clock.now().wall / SECOND,
        host=host.name,
        driver=host.driver,
        emulated=host.emulated,
        command=list(words),
        unit=unit,
        devices=measurement.described(host.devices, settable),
        settings=settings,
        repeat=repeat,
        window_seconds=window / SECOND,
        warm_up_seconds=warm_up / SECOND,
    )
    if resume:
        study = kept.read().continued(study)
    coarse = measurement.resolution_warning(host, window / SECOND)
    for sentence in filter(None, (measurement.idle_warning(host), coarse)):
        echo_error(f"warning: {sentence}")
    warm_up_time, window_time = study.warm_up_seconds * SECOND, study.window_seconds * SECOND
    runner = TrialRunner(
        study.command,
        SpanReceiver(units, system_clock, directories) if isinstance(units, UnitSpan) else units,
        Durations(round(warm_up_time), round(window_time), trial_limit),
        measurement.AgentTrialMeter(host.devices, RunningAgentClient(directories), directories),
        measurement.leases(configuration, settable),
        system_clock,
        process_identity,
        partial(click.echo, err=True) if verbose else lambda line: None,
    )
    schedule = TrialSchedule(
        longest,
        max_slowdown=max_slowdown,
        resumed=len(study.trials),
        time_budget=None if time_budget is None else time_budget / SECOND,
    )
    study = measurement.carry_out(study, schedule, runner.run, kept)
    click.echo("\n".join(study_lines(Frontier(study))))
    if not study.usable():
        trouble = measurement.trial_trouble(study.trials[-1])
        raise WattspanError(f"No trial succeeded. The last one: {trouble}")
    context.exit(0)


# ---------------------------------------------------------------------------------- a study


@command.command()
@study_argument
@json_option
def show(file: Path, as_json: bool) -> None:
    """Show the settings of a study, their time and energy, and the frontier."""
    found = Frontier.load(file)
    if as_json:
        echo_json(study_facts(found))
    else:
        click.echo("\n".join(study_lines(found)))


constraint_options = with_options(
    click.option(
        "--tolerance",
        type=float,
        default=DEFAULT_TOLERANCE,
        help="Relative excess over a limit that the upper bound of an interval may have.",
    ),
    click.option(
        "--eta", type=float, help="Weight of energy against time, from 0 to 1, as in Zeus."
    ),
    click.option("--watts", type=float, help="Mean power at most; the fastest setting is wanted."),
    click.option(
        "--energy-budget",
        type=float,
        metavar="JOULES",
        help="Energy of a unit at most; the fastest setting is wanted.",
    ),
    click.option("--deadline", type=DURATION, help="Mean time of a unit at most."),
    click.option(
        "--max-slowdown", type=float, help="Longer than the baseline at most by this: 0.05 is 5 %."
    ),
)
"""The options of a recommendation."""


@command.command()
@study_argument
@constraint_options
@click.option(
    "--as",
    "form",
    type=click.Choice(["text", "config", "autotune", "command"]),
    default="text",
    help="The result: sentences, a configuration with fixed limits, one for the tuner, or the "
    "command line.",
)
@json_option
def recommend(
    file: Path, deadline: Duration | None, form: str, as_json: bool, **limits: Any
) -> None:
    """Recommend the setting with the least energy that keeps the constraints with confidence.

    Only measured settings are recommended. A setting keeps a constraint if its estimate does, and
    the upper bound of its one-sided 95 % confidence interval exceeds it by --tolerance at most.
    """
    max_slowdown, eta = limits["max_slowdown"], limits["eta"]
    if form == "autotune":
        _check_tunable(max_slowdown, deadline, limits["energy_budget"], limits["watts"])
    found = Frontier.load(file)
    try:
        seconds = None if deadline is None else deadline / SECOND
        chosen = found.recommend(deadline=seconds, **limits)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        echo_json(recommendation_facts(chosen))
        return
    match form:
        case "config":
            lines = configuration_lines(found.study, chosen.setting)
        case "autotune":
            lines = autotune_lines(found.study, chosen.setting, max_slowdown, eta)
        case "command":
            lines = [shlex.join(substituted(found.study.command, dict(chosen.setting.parameters)))]
        case _:
            lines = recommendation_lines(found.study, chosen)
    click.echo("\n".join(lines))


def _check_tunable(max_slowdown: float | None, *others: object) -> None:
    """UsageError if the tuner cannot keep these constraints."""
    if max_slowdown is None or not 0 < max_slowdown <= 1:
        raise click.UsageError(
            "--as autotune needs --max-slowdown above 0 and at most 1, such as 0.05: the tuner"
            " keeps a slowdown budget."
        )
    if any(one is not None for one in others):
        raise click.UsageError(
            "The tuner keeps a slowdown budget only. Give --as autotune without --deadline,"
            " --energy-budget and --watts, or use --as config."
        )


@command.command()
@study_argument
@click.option(
    "--output",
    "-o",
    type=click.File("w", encoding="utf-8", lazy=True),
    default="-",
    show_default=False,
    help="The SVG file. [default: standard output]",
)
def plot(file: Path, output: Any) -> None:
    """Draw energy over time of all settings as one self-contained SVG."""
    from wattspan.frontier.plot import plot as drawn

    found = Frontier.load(file)
    study = found.study
    if not found.estimates.measured:
        raise WattspanError(f"No trial can be used in {file}. Run the study on with --resume.")
    title = f"Time and energy of {shlex.join(study.command)}"
    click.echo(drawn(found.estimates, title, study_note(study), "unit of work"), output, nl=False)


@command.command()
@study_argument
@click.option(
    "--format",
    "form",
    type=click.Choice(["json", "csv"]),
    default="json",
    help="All trials and estimates, or the trials as a table.",
)
def export(file: Path, form: str) -> None:
    """Print a study: JSON with trials, estimates and frontier, or the trials as CSV."""
    found = Frontier.load(file)
    if form == "json":
        echo_json(study_facts(found))
        return
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(trial_rows(found.study))
    click.echo(text.getvalue(), nl=False)
