"""``wattspan recurring``: the batch size of the next run of a recurring job, for shell scripts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from wattspan.cli.formatting import TableColumn, joules_text, table_lines
from wattspan.cli.options import (
    FILE,
    ConfigurationOptions,
    config_options,
    echo_result,
    json_option,
)
from wattspan.ports import WattspanError
from wattspan.sdk.client import request_json
from wattspan.service.configuration import agent_directories
from wattspan.util.text import printable

_OUTCOMES = {"reached": "converged", "missed": "missed"}
_AMOUNT = click.FloatRange(min=0)

store_option = click.option(
    "--store",
    type=FILE,
    help="A file of runs instead of the agent's store, for jobs that move between hosts.",
)


@click.group(name="recurring")
def command() -> None:
    """Choose the batch size of recurring trainings, and show what the runs have cost."""


@command.command("next")
@click.argument("job")
@click.option("--batch-sizes", metavar="N,N,...", help="The batch sizes to choose from.")
@click.option(
    "--default", "default_batch_size", type=int, help="The batch size without an optimizer."
)
@click.option("--target", "target_metric", type=float, help="The target metric.")
@click.option("--lower-is-better", is_flag=True, help="The metric falls towards the target.")
@click.option("--max-epochs", type=click.IntRange(min=1), help="The last epoch of a run.")
@click.option("--eta", type=float, default=0.5, help="Weight of energy.")
@click.option("--beta", type=float, default=2.0, help="Stop above this cost.")
@click.option(
    "--gpus", default="", show_default=False, help="The GPUs of the job, such as `2 x NVIDIA H100`."
)
@store_option
@config_options
@json_option
def next_(
    job: str,
    lower_is_better: bool,
    eta: float,
    beta: float,
    gpus: str,
    store: Path | None,
    configuration: ConfigurationOptions,
    as_json: bool,
    **terms: Any,
) -> None:
    """Begin a run of JOB and print its batch size.

    The first run needs --batch-sizes, --default, --target and --max-epochs; later ones may leave
    them out. The run belongs to the calling process, usually a shell: if that ends without
    `wattspan recurring report`, the run is lost and does not count.
    """
    body: dict[str, Any] = {"job": job, "gpus": gpus, "pid": os.getppid()}
    given = [term is not None for term in terms.values()]
    if any(given):
        if not all(given):
            raise click.UsageError(
                "The terms of a job are --batch-sizes, --default, --target and --max-epochs: "
                "give all of them or none."
            )
        sizes = {"batch_sizes": _sizes(terms["batch_sizes"])}
        knobs = {"eta_knob": eta, "beta_knob": beta}
        body["terms"] = terms | sizes | knobs | {"higher_is_better_metric": not lower_is_better}
    found = _ask(store, configuration, "next", body)
    echo_result(found, [str(found["batch_size"])], as_json=as_json)


@command.command()
@click.argument("job")
@click.argument("outcome", type=click.Choice(list(_OUTCOMES)))
@click.option(
    "--epochs", type=click.IntRange(min=0), default=0, show_default=False, help="Epochs of the run."
)
@click.option("--joules", "energy_joules", type=_AMOUNT, required=True, help="Energy of the run.")
@click.option("--seconds", type=_AMOUNT, required=True, help="Time of the run.")
@click.option(
    "--power", "power_watts", type=_AMOUNT, required=True,
    help="Highest power of the devices, W.",
)  # fmt: skip
@click.option("--run", type=click.IntRange(min=1), help="The run. [default: the newest of JOB]")
@store_option
@config_options
@json_option
def report(
    job: str,
    outcome: str,
    run: int | None,
    store: Path | None,
    configuration: ConfigurationOptions,
    as_json: bool,
    **figures: Any,
) -> None:
    """Record the end of a run of JOB: its target metric was reached or missed."""
    key = run or _newest(store, configuration, job)
    ended = {"run": key, "outcome": _OUTCOMES[outcome], **figures}
    found = _ask(store, configuration, "report", ended)
    sentence = "Recorded." if found["recorded"] else "This run had been recorded before."
    echo_result(found, [sentence], as_json=as_json)


@command.command()
@click.argument("job", required=False)
@store_option
@config_options
@json_option
def status(
    job: str | None, store: Path | None, configuration: ConfigurationOptions, as_json: bool
) -> None:
    """Show the runs of JOB, or of all jobs, by batch size, and if the search is worth its cost."""
    found = _ask(store, configuration, "status", {} if job is None else {"job": job})
    echo_result(found, _status_lines(found), as_json=as_json)


@command.command()
@click.argument("job")
@store_option
@config_options
@json_option
def forget(
    job: str, store: Path | None, configuration: ConfigurationOptions, as_json: bool
) -> None:
    """Delete all runs of JOB, on all GPUs."""
    found = _ask(store, configuration, "forget", {"job": job})
    echo_result(found, [f"The runs of {job} are deleted."], as_json=as_json)


_PHASES = {
    "pruning": "every size is tried, and those that miss the target or cost too much are left out",
    "sampling": "sizes are chosen by the costs so far",
}


def _status_lines(found: Mapping[str, Any]) -> Iterator[str]:
    if not found["jobs"]:
        yield "There are no recurring jobs yet: see `wattspan recurring next --help`."
    for number, one in enumerate(found["jobs"]):
        if number:
            yield ""
        yield from _job_lines(one)
    if found["hidden_jobs"]:
        yield ""
        yield f"{found['hidden_jobs']} further jobs have older runs: name one to see it."


def _job_lines(job: Mapping[str, Any]) -> Iterator[str]:
    title = f"{job['job']} on {job['gpus']}" if job["gpus"] else job["job"]
    # The agent may be older than this command.
    running = {one["batch_size"]: one.get("running", 0) for one in job["sizes"]}
    counts = {
        _running(running, job["running"]): job["running"],
        "lost": sum(one.get("lost", 0) for one in job["sizes"]),
    }
    others = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    runs = f"{job['runs']} run{'' if job['runs'] == 1 else 's'}{f' ({others})' if others else ''}"
    yield f"{title}: {runs}, {job['phase']}: {_PHASES[job['phase']]}"
    columns = (
        TableColumn("batch size", itemgetter("batch_size")),
        TableColumn("runs", lambda one: one["runs"] + running[one["batch_size"]]),
        TableColumn("reached", itemgetter("reached")),
        TableColumn("cost/run", lambda one: joules_text(one["cost_joules"])),
        TableColumn("energy/run", lambda one: joules_text(one["energy_joules"])),
    )
    yield from table_lines(columns, job["sizes"])
    eta = job["terms"]["eta_knob"]
    if eta != 1:  # the cost is more than energy
        yield f"The cost is {eta:g} x energy + {1 - eta:g} x time x highest power of the devices."
    yield job["sentence"]


def _running(sizes: Mapping[int, int], count: int) -> str:
    found = ", ".join(str(size) for size, number in sizes.items() if number)
    return f"running with batch size {found}" if found and count else "running"


def _sizes(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{text!r} are no numbers; write for example 32,64,128", param_hint="--batch-sizes"
        ) from None


def _newest(store: Path | None, configuration: ConfigurationOptions, job: str) -> int:
    jobs = _ask(store, configuration, "status", {"job": job})["jobs"]
    open_runs = [one["newest_run"] for one in jobs]
    newest = max((one for one in open_runs if one is not None), default=None)
    if newest is None:
        raise WattspanError(
            f"Job {printable(job)} has no open run: its process has ended, or the run was "
            "reported. Begin one with `wattspan recurring next`."
        )
    return int(newest)


# ------------------------------------------------------------------------------- where runs are


def _ask(
    store: Path | None, configuration: ConfigurationOptions, name: str, facts: dict[str, Any]
) -> dict[str, Any]:
    """The agent's answer to a request; with ``store``, the answer that it would give by it."""
    from wattspan.recurring.optimizer import FILE_OWNER, ask_agent, this_host

    reads = name == "status"
    if store is None:
        directories = agent_directories(configuration.load_without_plugins(client=True))
        if reads:
            return request_json(f"/v1/recurring/{name}", facts, directories=directories)
        return ask_agent(name, facts, directories)
    if name != "next":
        try:
            store.stat()
        except FileNotFoundError:
            raise WattspanError(
                f"There is no file {printable(str(store))}: name the one that `wattspan recurring "
                "next --store` has made."
            ) from None
        except OSError:
            pass  # the handler names the cause
    from wattspan.api.recurring import RecurringHandler
    from wattspan.api.requests import RECURRING_PATH, ProblemError
    from wattspan.clock import SystemClock
    from wattspan.http.messages import HttpRequest
    from wattspan.http.sockets import Peer
    from wattspan.processes.metadata import HostProcesses
    from wattspan.processes.procfs import ProcFs

    handler = RecurringHandler(
        store, HostProcesses(ProcFs()), lambda _: FILE_OWNER, SystemClock(), host=this_host()
    )
    peer = Peer(pid=os.getpid(), uid=FILE_OWNER.user, principal=FILE_OWNER)
    query, body = (facts, b"") if reads else ({}, json.dumps(facts).encode())
    method = "GET" if reads else "POST"
    request = HttpRequest(method, f"{RECURRING_PATH}/{name}", query, {}, body, peer)
    try:
        answer: dict[str, Any] = json.loads(handler.respond(request).body)
    except ProblemError as problem:
        raise WattspanError(str(problem)) from None
    return answer
