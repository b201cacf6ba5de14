"""``wattspan demo``: everything at work, on an emulated host, within seconds."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wattspan.cli.duration import DurationType
from wattspan.cli.signals import stop_on_signals
from wattspan.model.settings import Duration
from wattspan.ports import ExporterError, WattspanError
from wattspan.util.text import printable

if TYPE_CHECKING:
    from wattspan.cli.demo_tuning import StepCost
    from wattspan.cli.options import Loaded
    from wattspan.emulation.host import EmulatedHost
    from wattspan.emulation.profiles import HostProfile
    from wattspan.ports import Clock
    from wattspan.service.agent import Agent

LISTEN = "127.0.0.1:9949"
OTLP, TRACES = "otlp.sock", "/v1/traces"
AT_REST = Duration.parse("4500ms")  # before the jobs begin: enough for the idle baselines
SETTLED = Duration.parse("5s")  # after: jobs have rows by then, with GPU energy booked in them
EVERY = Duration.parse("5s")
# No tariff and no grid: a currency of this name is taken for nobody's.
CURRENCY, PRICE, INTENSITY = "Example", 0.30, 400.0  # a kilowatt-hour; grams
EXAMPLES = (
    f"Cost and carbon: by an example, {PRICE:.2f} {CURRENCY} and {INTENSITY:.0f} g CO2e a "
    "kilowatt-hour; nobody's tariff, no grid's intensity."
)


@click.command(name="demo")
@click.option(
    "--profile", default="two-socket-h100", show_default=True, help="The emulated host to show."
)
@click.option(
    "--listen",
    default=LISTEN,
    show_default=True,
    help="Where to serve /metrics; if its port is in use, another one is taken.",
)
@click.option(
    "--duration",
    type=DurationType(),
    help="End after this time. Without it: when you press q or Ctrl-C.",
)
@click.option("--plain", is_flag=True, help="Print tables one after the other, as to a file.")
@click.option("--no-tune", is_flag=True, help="Leave the emulated power limits alone.")
def command(
    profile: str, listen: str, duration: Duration | None, plain: bool, no_tune: bool
) -> None:
    """Show everything working on an emulated host: no rights, no counters, no GPU needed.

    The host's hardware and so every figure is emulated. Two real processes, a trainer and a
    server, keep this machine's CPUs a little busy; the emulated counters follow that. They send
    OpenTelemetry spans, so what a training step, a request and a token cost is shown as well.
    What energy costs and emits is reckoned by an example price and intensity.

    The trainer is tuned: its emulated board gets lower power limits, as long as that saves energy
    and costs no more than 5 % of speed. At the end every limit is what it was.
    """
    from wattspan.cli.demo_tuning import StepCost, service_of, tuned_job, what_to_watch
    from wattspan.clock import SystemClock
    from wattspan.emulation.host import EmulatedHost
    from wattspan.emulation.profiles import profile_named

    clock = SystemClock()
    end = None if duration is None else clock.monotonic() + duration
    chosen = profile_named(profile)
    with stop_on_signals() as request, contextlib.ExitStack() as stack:
        click.echo(f"EMULATED: {chosen.about}. No figure is true of any machine.")
        try:
            host = stack.enter_context(EmulatedHost(chosen))
        except WattspanError:
            # Before it is in a session of its own, Ctrl-C in a terminal ends it as well.
            if request.asked:
                return
            raise
        if request.asked:
            return
        agent = _start(host, listen, tune=not no_tune)
        stack.callback(agent.stop)
        request.tell(agent.request_stop)
        for address in metrics(agent):
            click.echo(f"See it: {address.removesuffix('metrics')}")
            click.echo(f"Metrics: curl {address}")
        for address in agent.addresses:
            if address.startswith("http://") and address.endswith(TRACES):
                endpoint = address.removesuffix(TRACES)
                click.echo(f"Send spans of your own: OTEL_EXPORTER_OTLP_ENDPOINT={endpoint}")
        click.echo(EXAMPLES)
        if not no_tune and (sentence := what_to_watch(chosen)):
            click.echo(sentence)
        show = _live if not plain and sys.stdin.isatty() and sys.stdout.isatty() else _plain
        job = None if no_tune else tuned_job(chosen)
        cost = None if job is None else StepCost(service_of(job))
        show(Demo(chosen, host, agent, clock, end, cost))
    if agent.failure is not None:
        raise WattspanError("The demo ended because a part of it failed, as said above.")
    click.echo("Done: the emulated host and its files are gone.")


@dataclass(slots=True)
class Demo:
    """A demo under way: first the host rests, then its jobs work."""

    profile: HostProfile
    host: EmulatedHost
    agent: Agent
    clock: Clock
    end: int | None
    cost: StepCost | None = None
    at_work: str = ""

    def begin(self) -> str:
        """Start the jobs; the sentence that says so."""
        started = self.host.start_jobs(run_dir(self.host) / OTLP)
        jobs = ", ".join(f"{name} (pid {pid})" for name, pid in started.items())
        self.at_work = f"At work now: {jobs}."
        return self.at_work

    def step(self) -> str:
        """What a step of the tuned job costs just now; "" where nothing is tuned."""
        if self.cost is None:
            return ""
        return self.cost.see(self.agent.view())

    def left(self, most: int) -> float:
        """Seconds until ``most`` ns are over, or the demo."""
        if self.end is not None:
            most = max(0, min(most, self.end - self.clock.monotonic()))
        return most / 1e9


RESTING = "At rest for a moment, to learn what it draws by doing nothing."


def _plain(demo: Demo) -> None:
    """One table after the other, until the end; at least one."""
    from rich.console import Console

    from wattspan.cli.controls import Options
    from wattspan.cli.live import print_once

    click.echo(RESTING)
    if demo.agent.wait(demo.left(AT_REST)):
        return
    click.echo(demo.begin())
    console, over = Console(), demo.agent.wait(demo.left(SETTLED))
    while not over:
        click.echo()
        print_once(demo.agent.view, Options(brief=True), console)
        if step := demo.step():
            click.echo(step)
        over = demo.left(EVERY) <= 0 or demo.agent.wait(demo.left(EVERY))


def _live(demo: Demo) -> None:
    """The live view, from the start."""
    from rich.console import Console

    from wattspan.cli.controls import Options
    from wattspan.cli.keyboard import Keyboard
    from wattspan.cli.live import watch

    begin_at = demo.clock.monotonic() + AT_REST

    def running() -> bool:
        if not demo.at_work and demo.clock.monotonic() >= begin_at:
            demo.begin()
        return not demo.agent.wait(0) and demo.left(EVERY) > 0

    where = ", ".join(address.removesuffix("metrics") for address in metrics(demo.agent))
    with Keyboard() as keys:
        watch(
            demo.agent.view,
            Options(),
            clock=demo.clock,
            console=Console(),
            keys=keys,
            interval=Duration.parse("1s"),
            running=running,
            note=lambda: f"{where}  {demo.step() or demo.at_work or RESTING}",
        )


def _start(host: EmulatedHost, listen: str, *, tune: bool) -> Agent:
    """A running agent, listening at ``listen`` or, if that port is in use, at one that is free."""
    try:
        return _agent(host, listen, tune=tune)
    except ExporterError as first:
        address = listen.rpartition(":")[0]
        try:
            return _agent(host, f"{address}:0", tune=tune)
        except ExporterError:
            raise first from None


def _agent(host: EmulatedHost, listen: str, *, tune: bool) -> Agent:
    from wattspan.cli.compose import build_agent

    loaded = _configuration(host, listen, tune=tune)
    agent = build_agent(
        loaded.config,
        loaded.plugins,
        log=lambda sentence: click.echo(f"wattspan: {printable(sentence)}", err=True),
        emulated=host,
    )
    agent.start()
    return agent


def metrics(agent: Agent) -> list[str]:
    """Where figures can be scraped."""
    return [address for address in agent.addresses if address.endswith("/metrics")]


def run_dir(host: EmulatedHost) -> Path:
    """Where the demo's agent has its sockets: beside what it measures, gone with it."""
    return host.directory / "run"


def _configuration(host: EmulatedHost, listen: str, *, tune: bool) -> Loaded:
    """The defaults but for tuning and examples: it depends on no configuration of this machine."""
    from wattspan.cli.demo_tuning import with_tuning
    from wattspan.cli.options import Loaded
    from wattspan.config import FlagValue, load
    from wattspan.plugins import discover

    plugins = discover()
    flags = {
        "agent.state_dir": FlagValue("demo", str(host.directory / "state")),
        "agent.run_dir": FlagValue("demo", str(run_dir(host))),
        "agent.log_level": FlagValue("demo", "warning"),
        "exporters.prometheus.listen": FlagValue("--listen", listen),
        "cost.currency": FlagValue("demo", CURRENCY),
        "cost.price": FlagValue("demo", PRICE),
        "carbon.intensity": FlagValue("demo", INTENSITY),
    }
    config = load(None, environ={}, flags=flags, schema=plugins.schema, default=Path(os.devnull))
    return Loaded(with_tuning(config, host.profile) if tune else config, plugins)
