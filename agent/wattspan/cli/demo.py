"""``wattspan demo``: the whole agent on an emulated host, with a tuned training job."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wattspan import __version__
from wattspan.cli.options import DURATION, echo_error
from wattspan.clock import SystemClock
from wattspan.config import (
    AutotuneSettings,
    CapsSettings,
    Config,
    FlagValue,
    TunedJobSettings,
    load,
)
from wattspan.model import SECOND, Knob
from wattspan.model.settings import Duration
from wattspan.plugins import discover
from wattspan.ports import ExporterError, WattspanError
from wattspan.service.configuration import LoadedConfiguration
from wattspan.service.systemd import stop_on_signals

if TYPE_CHECKING:
    from wattspan.api.snapshot_document import SnapshotDocument
    from wattspan.emulation.host import DemoJob, EmulatedHost, HostProfile
    from wattspan.service.agent import Agent

BUDGET = 0.05
DECLARED_BUDGET = 0.1
"""The budget that the training job asks for; the configuration limits it to ``BUDGET``."""

STEP = "train_step"

LOWEST_GPU_LIMIT = 0.88
"""Lowest limit of a GPU relative to its default.

Its slowdown is clearly within ``BUDGET``, so that it is certified in little more than a minute.
Limits with a slowdown close to the budget save more, and take longer to certify.
"""


def tuned_job(profile: HostProfile) -> DemoJob | None:
    """The training job of a profile: the first with spans of steps."""
    return next((job for job in profile.jobs if job.spans == "steps"), None)


def with_tuning(config: Config, profile: HostProfile) -> Config:
    """``config`` with tuning of the profile's training job, in short blocks."""
    job = tuned_job(profile)
    if job is None:
        return config
    # Its kind is stated: detecting it would take the first ten seconds.
    named = TunedJobSettings(service=job.name, span=STEP, work="samples", kind="steps")
    tuned = AutotuneSettings(
        mode="apply",
        max_slowdown=BUDGET,
        knobs=(Knob.GPU_POWER,) if profile.gpus else (Knob.CPU_POWER,),
        job=(named,),
        floor=LOWEST_GPU_LIMIT if profile.gpus else AutotuneSettings().floor,
        block_units=5,
        settle=Duration.parse("500ms"),
        dwell=Duration.parse("1m"),
    )
    return replace(config, autotune=tuned, caps=CapsSettings(capper=True, users=()))


def tuning_hint(profile: HostProfile) -> str:
    """One sentence about the tuned job; "" if there is none."""
    job = tuned_job(profile)
    if job is None:
        return ""
    return (
        f"The agent tunes {job.name}: within minutes its {STEP} needs less energy, "
        f"with at most {BUDGET:.0%} slowdown. The job declares itself and asks for "
        f"{DECLARED_BUDGET:.0%}. The TUNING table shows the decisions."
    )


LISTEN = "127.0.0.1:9949"
OTLP, TRACES = "otlp.sock", "/v1/traces"
IDLE_TIME = Duration.parse("4500ms")  # before the jobs begin: enough for the idle baselines
SETTLE_TIME = Duration.parse("5s")  # after their start: they have rows with GPU energy by then
PRINT_INTERVAL = Duration.parse("5s")
# Example values of no real tariff or grid.
CURRENCY, PRICE, INTENSITY = "Example", 0.30, 400.0  # a kilowatt-hour; grams
EXAMPLES = (
    f"Cost and carbon use example values: {PRICE:.2f} {CURRENCY} and {INTENSITY:.0f} g CO2e per "
    "kilowatt-hour."
)


@click.command(name="demo")
@click.option("--profile", default="two-socket-h100", help="Emulated host.")
@click.option(
    "--listen",
    default=LISTEN,
    help="Address for /metrics; if its port is in use, a free one is chosen.",
)
@click.option(
    "--duration", type=DURATION, help="End after this time. Default: end with q or Ctrl-C."
)
@click.option("--plain", is_flag=True, help="Print one table after the other, as if to a file.")
@click.option("--no-tune", is_flag=True, help="Do not change the emulated power limits.")
def command(
    profile: str, listen: str, duration: Duration | None, plain: bool, no_tune: bool
) -> None:
    """Run the agent on an emulated host: no privileges, counters or GPU needed.

    The hardware is emulated, and so are all figures. Two real processes, a trainer and a server,
    keep this machine's CPUs slightly busy; the emulated counters follow their CPU time. They send
    OpenTelemetry spans, so the energy of training steps, requests and tokens is shown as well.
    Cost and emissions use an example price and intensity.

    The agent tunes the trainer: it lowers the power limit of its emulated board as long as that
    saves energy with at most 5 % slowdown. At the end it restores all limits.
    """
    from wattspan.emulation.host import EmulatedHost, profile_named

    end = None if duration is None else SystemClock().monotonic() + duration
    chosen = profile_named(profile)
    with stop_on_signals() as request, contextlib.ExitStack() as stack:
        click.echo(f"EMULATED: {chosen.about}. All figures are emulated.")
        try:
            host = stack.enter_context(EmulatedHost(chosen))
        except WattspanError:
            # Ctrl-C in a terminal also ends a host that is not in its own session yet.
            if request.requested:
                return
            raise
        if request.requested:
            return
        agent = _start(host, listen, tune=not no_tune)
        stack.callback(agent.stop)
        request.register(agent.request_stop, wake=agent.wake)
        for address in metrics_addresses(agent):
            click.echo(f"See it: {address.removesuffix('metrics')}")
            click.echo(f"Metrics: curl {address}")
        for address in agent.addresses:
            if address.startswith("http://") and address.endswith(TRACES):
                endpoint = address.removesuffix(TRACES)
                click.echo(f"Send spans of your own: OTEL_EXPORTER_OTLP_ENDPOINT={endpoint}")
                break
        click.echo(EXAMPLES)
        if not no_tune and (sentence := tuning_hint(chosen)):
            click.echo(sentence)
        run_jobs(host, agent, end, plain=plain)
    if agent.failure is not None:
        raise WattspanError(
            "The demo ended because one of its parts failed; see the messages above."
        )
    click.echo("Done. The emulated host and its files are removed.")


def run_jobs(host: EmulatedHost, agent: Agent, end: int | None, *, plain: bool) -> None:
    """Run and show the jobs, after a period of idle, until ``end`` or a request to stop."""
    from rich.console import Console

    from wattspan.api.snapshot_document import snapshot_document
    from wattspan.cli.top.controls import Keyboard, ViewOptions
    from wattspan.cli.top.view import print_once, watch

    clock, console = SystemClock(), Console()

    def left(most: int) -> float:
        """Seconds until ``most`` ns have passed, or until the end."""
        return (most if end is None else max(0, min(most, end - clock.monotonic()))) / 1e9

    def view() -> SnapshotDocument:
        return snapshot_document(agent.view(), __version__)

    click.echo("The host is idle for a few seconds: the agent learns its idle power.")
    if agent.wait(left(IDLE_TIME)):
        return
    started = host.start_jobs(run_dir(host) / OTLP, DECLARED_BUDGET)
    jobs = ", ".join(f"{name} (pid {pid})" for name, pid in started.items())
    click.echo(f"Running jobs: {jobs}.")
    if plain or not (sys.stdin.isatty() and sys.stdout.isatty()):
        over = agent.wait(left(SETTLE_TIME))
        while not over:
            click.echo()
            print_once(view, ViewOptions(brief=True), console)
            over = left(PRINT_INTERVAL) <= 0 or agent.wait(left(PRINT_INTERVAL))
        return
    where = ", ".join(address.removesuffix("metrics") for address in metrics_addresses(agent))
    with Keyboard() as keys:
        watch(
            view,
            ViewOptions(),
            clock=clock,
            console=console,
            keys=keys,
            interval=SECOND,
            running=lambda: not agent.wait(0) and left(PRINT_INTERVAL) > 0,
            notice=lambda: f"{where}  Running jobs: {jobs}.",
        )


def _start(host: EmulatedHost, listen: str, *, tune: bool) -> Agent:
    """A running agent at ``listen`` or, if that fails, at a free port of the same address."""
    try:
        return _agent(host, listen, tune=tune)
    except ExporterError as first:
        try:
            return _agent(host, f"{listen.rpartition(':')[0]}:0", tune=tune)
        except ExporterError:
            raise first from None


def _agent(host: EmulatedHost, listen: str, *, tune: bool) -> Agent:
    from wattspan.service.assembly import build_agent

    loaded = _configuration(host, listen, tune=tune)
    agent = build_agent(loaded.config, loaded.plugins, log=echo_error, emulated=host)
    agent.start()
    return agent


def metrics_addresses(agent: Agent) -> list[str]:
    """The addresses of the metrics."""
    return [address for address in agent.addresses if address.endswith("/metrics")]


def run_dir(host: EmulatedHost) -> Path:
    """The directory of the agent's sockets, removed with the emulated host."""
    return host.directory / "run"


def _configuration(host: EmulatedHost, listen: str, *, tune: bool) -> LoadedConfiguration:
    """The default configuration with tuning and examples, independent of this machine's."""
    plugins, law = discover(), host.profile.law
    flags = {
        "agent.state_dir": FlagValue("demo", str(host.directory / "state")),
        "agent.run_dir": FlagValue("demo", str(run_dir(host))),
        "agent.log_level": FlagValue("demo", "warning"),
        "exporters.prometheus.listen": FlagValue("--listen", listen),
        # This machine may never be at rest.
        "processes.cpu_idle_watts": FlagValue("demo", law.package_idle / 1000),
        "processes.memory_idle_watts": FlagValue("demo", law.dram_idle / 1000),
        "cost.currency": FlagValue("demo", CURRENCY),
        "cost.price": FlagValue("demo", PRICE),
        "carbon.intensity": FlagValue("demo", INTENSITY),
    }
    config = load(None, environ={}, flags=flags, schema=plugins.schema, default=Path(os.devnull))
    return LoadedConfiguration(with_tuning(config, host.profile) if tune else config, plugins)
