"""``wattspan recurring``: the batch size of the next run of a recurring job, for shell scripts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from wattspan.cli.formatting import UNKNOWN, joules_text, table_lines
from wattspan.cli.options import echo_json, json_option
from wattspan.http.messages import HttpRequest
from wattspan.http.sockets import Peer
from wattspan.model import Consumer
from wattspan.ports import WattspanError
from wattspan.processes.procfs import ProcFs
from wattspan.util.text import printable

_OUTCOMES = ("reached", "missed")

F = TypeVar("F", bound=Callable[..., Any])


def store_option(function: F) -> F:
    return click.option(
        "--store",
        type=click.Path(path_type=Path, dir_okay=False),
        help="A file of runs instead of the agent's store, for jobs that move between hosts.",
    )(function)


@click.group(name="recurring")
def command() -> None:
    """Choose the batch size of recurring trainings, and show what the runs have cost."""


@command.command("next")
@click.argument("job")
@click.option("--batch-sizes", metavar="N,N,...", help="The batch sizes to choose from.")
@click.option("--default", "default", type=int, help="The batch size without an optimizer.")
@click.option("--target", type=float, help="The target metric.")
@click.option("--lower-is-better", is_flag=True, help="The metric falls towards the target.")
@click.option("--max-epochs", type=click.IntRange(min=1), help="The last epoch of a run.")
@click.option("--eta", type=float, default=0.5, show_default=True, help="Weight of energy.")
@click.option("--beta", type=float, default=2.0, show_default=True, help="Stop above this cost.")
@click.option("--gpus", default="", help="The GPUs of the job, such as `2 x NVIDIA H100`.")
@store_option
@json_option
def next_(
    job: str,
    batch_sizes: str | None,
    default: int | None,
    target: float | None,
    lower_is_better: bool,
    max_epochs: int | None,
    eta: float,
    beta: float,
    gpus: str,
    store: Path | None,
    as_json: bool,
) -> None:
    """Begin a run of JOB and print its batch size.

    The first run needs --batch-sizes, --default, --target and --max-epochs; later ones may leave
    them out. The run belongs to the calling process, usually a shell: if that ends without
    `wattspan recurring report`, the run is lost and does not count.
    """
    terms = None
    given = (batch_sizes, default, target, max_epochs)
    if any(one is not None for one in given):
        if batch_sizes is None or default is None or target is None or max_epochs is None:
            raise click.UsageError(
                "The terms of a job are --batch-sizes, --default, --target and --max-epochs: "
                "give all of them or none."
            )
        terms = {
            "batch_sizes": _sizes(batch_sizes),
            "default_batch_size": default,
            "target_metric": target,
            "higher_is_better_metric": not lower_is_better,
            "max_epochs": max_epochs,
            "eta_knob": eta,
            "beta_knob": beta,
        }
    body = {"job": job, "gpus": gpus, "pid": os.getppid()}
    found = _runs(store).next(body if terms is None else {**body, "terms": terms})
    if as_json:
        echo_json(found)
        return
    click.echo(found["batch_size"])


@command.command()
@click.argument("job")
@click.argument("outcome", type=click.Choice(_OUTCOMES))
@click.option("--epochs", type=click.IntRange(min=0), default=0, help="Epochs of the run.")
@click.option("--joules", type=click.FloatRange(min=0), required=True, help="Energy of the run.")
@click.option("--seconds", type=click.FloatRange(min=0), required=True, help="Time of the run.")
@click.option(
    "--power", type=click.FloatRange(min=0), required=True, help="Highest power of the devices, W."
)
@click.option("--run", type=click.IntRange(min=1), help="The run. [default: the newest of JOB]")
@store_option
@json_option
def report(
    job: str,
    outcome: str,
    epochs: int,
    joules: float,
    seconds: float,
    power: float,
    run: int | None,
    store: Path | None,
    as_json: bool,
) -> None:
    """Record the end of a run of JOB: its target metric was reached or missed."""
    runs = _runs(store)
    found = runs.report(
        {
            "run": run or _newest(runs, job),
            "outcome": "converged" if outcome == "reached" else "missed",
            "energy_joules": joules,
            "seconds": seconds,
            "power_watts": power,
            "epochs": epochs,
        }
    )
    if as_json:
        echo_json(found)
        return
    click.echo("Recorded." if found["recorded"] else "This run had been recorded before.")


@command.command()
@click.argument("job", required=False)
@store_option
@json_option
def status(job: str | None, store: Path | None, as_json: bool) -> None:
    """Show the runs of JOB, or of all jobs, by batch size, and if the search is worth its cost."""
    found = _runs(store).status(job)
    if as_json:
        echo_json(found)
        return
    if not found["jobs"]:
        click.echo("There are no recurring jobs yet: see `wattspan recurring next --help`.")
    for number, one in enumerate(found["jobs"]):
        if number:
            click.echo()
        for line in _status_lines(one):
            click.echo(printable(line))
    if found["hidden_jobs"]:
        click.echo(f"\n{found['hidden_jobs']} further jobs have older runs: name one to see it.")


@command.command()
@click.argument("job")
@store_option
@json_option
def forget(job: str, store: Path | None, as_json: bool) -> None:
    """Delete all runs of JOB, on all GPUs."""
    found = _runs(store).forget(job)
    if as_json:
        echo_json(found)
        return
    click.echo(f"The runs of {printable(job)} are deleted.")


_PHASES = {
    "pruning": "every size is tried, and those that miss the target or cost too much are left out",
    "sampling": "sizes are chosen by the costs so far",
}


def _status_lines(job: Mapping[str, Any]) -> list[str]:
    title = f"{job['job']} on {job['gpus']}" if job["gpus"] else job["job"]
    # The agent may be older than this command.
    running = {one["batch_size"]: one.get("running", 0) for one in job["sizes"]}
    others = ", ".join(
        f"{count} {state}"
        for state, count in (
            (_running(running, job["running"]), job["running"]),
            ("lost", sum(one.get("lost", 0) for one in job["sizes"])),
        )
        if count
    )
    rows = [("batch size", "runs", "reached", "cost/run", "energy/run")]
    rows += [
        (
            str(one["batch_size"]),
            str(one["runs"] + running[one["batch_size"]]),
            str(one["reached"]),
            UNKNOWN if one["cost_joules"] is None else joules_text(one["cost_joules"]),
            UNKNOWN if one["energy_joules"] is None else joules_text(one["energy_joules"]),
        )
        for one in job["sizes"]
    ]
    runs = f"{job['runs']} run{'' if job['runs'] == 1 else 's'}{f' ({others})' if others else ''}"
    head = f"{title}: {runs}, {job['phase']}: {_PHASES[job['phase']]}"
    return [head, *table_lines(rows, left=()), *_cost_note(job["terms"]), job["sentence"]]


def _running(sizes: Mapping[int, int], count: int) -> str:
    found = ", ".join(str(size) for size, number in sizes.items() if number)
    return f"running with batch size {found}" if found and count else "running"


def _cost_note(terms: Mapping[str, Any]) -> list[str]:
    """The meaning of the cost, which is energy only for an eta of 1."""
    eta = terms["eta_knob"]
    if eta == 1:
        return []
    return [f"The cost is {eta:g} x energy + {1 - eta:g} x time x highest power of the devices."]


def _sizes(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{text!r} are no numbers; write for example 32,64,128", param_hint="--batch-sizes"
        ) from None


def _newest(runs: _AgentRuns | _FileRuns, job: str) -> int:
    open_runs = [one["newest_run"] for one in runs.status(job)["jobs"]]
    newest = max((one for one in open_runs if one is not None), default=None)
    if newest is None:
        raise WattspanError(
            f"Job {printable(job)} has no open run: its process has ended, or the run was "
            "reported. Begin one with `wattspan recurring next`."
        )
    return int(newest)


# ------------------------------------------------------------------------------- where runs are


def _runs(store: Path | None) -> _AgentRuns | _FileRuns:
    return _AgentRuns() if store is None else _FileRuns(store)


class _AgentRuns:
    """The runs in the store of the agent."""

    def next(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._post("next", body)

    def report(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._post("report", body)

    def forget(self, job: str) -> dict[str, Any]:
        return self._post("forget", {"job": job})

    def status(self, job: str | None) -> dict[str, Any]:
        from wattspan.sdk.client import request_json

        return request_json("/v1/recurring/status", {} if job is None else {"job": job})

    def _post(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        from wattspan.recurring.optimizer import ask_agent

        return ask_agent(name, body)


class _FileRuns:
    """The runs in a file, which is read and written as the agent does it."""

    def __init__(self, path: Path) -> None:
        from wattspan.api.recurring import RecurringHandler
        from wattspan.clock import SystemClock
        from wattspan.recurring.optimizer import FILE_OWNER, this_host

        self._handler = RecurringHandler(
            path, _LocalProcesses(), lambda _: FILE_OWNER, SystemClock(), host=this_host()
        )
        self._peer = Peer(pid=os.getpid(), uid=FILE_OWNER.user, principal=FILE_OWNER)

    def next(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._ask("POST", "next", body)

    def report(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._ask("POST", "report", body)

    def forget(self, job: str) -> dict[str, Any]:
        return self._ask("POST", "forget", {"job": job})

    def status(self, job: str | None) -> dict[str, Any]:
        return self._ask("GET", "status", None, {} if job is None else {"job": job})

    def _ask(
        self,
        method: str,
        name: str,
        body: dict[str, Any] | None,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        from wattspan.api.recurring import RECURRING_PATH
        from wattspan.api.requests import ProblemError

        sent = b"" if body is None else json.dumps(body).encode()
        path = f"{RECURRING_PATH}/{name}"
        request = HttpRequest(method, path, dict(query or {}), {}, sent, self._peer)
        try:
            answer: dict[str, Any] = json.loads(self._handler.respond(request).body)
        except ProblemError as problem:
            raise WattspanError(str(problem)) from None
        return answer


class _LocalProcesses:
    """The processes of this host."""

    def identify(self, pid: int) -> Consumer | None:
        stat = ProcFs().stat(pid)
        return None if stat is None else Consumer(pid, stat.started)

    def describe(self, consumer: Consumer) -> None:
        """Nothing: the file holds no names of processes."""
