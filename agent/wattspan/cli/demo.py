"""The part of the demo that is tuned: which job, how, and what a step of it costs just now.

``wattspan demo``: everything at work, on an emulated host, within seconds.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from wattspan import __version__
from wattspan.cli import formatting
from wattspan.cli.options import DurationType
from wattspan.config import AutotuneSettings, CapsSettings, Config, TunedJobSettings
from wattspan.model import SECOND, DomainAccount, Knob, Microjoules, Snapshot
from wattspan.model.settings import Duration
from wattspan.ports import ExporterError, WattspanError
from wattspan.service.systemd import stop_on_signals
from wattspan.util.text import printable

if TYPE_CHECKING:
    from wattspan.api.snapshot import SnapshotDocument
    from wattspan.emulation.host import EmulatedHost
    from wattspan.emulation.profiles import DemoJob, HostProfile
    from wattspan.ports import Clock
    from wattspan.service.agent import Agent
    from wattspan.service.configuration import LoadedConfiguration


BUDGET = 0.05
STEP = "train_step"
RECENT = 15 * SECOND
"""Steps of so long are enough for a mean, and few enough to see it fall."""

WATCH = (
    "Watch {span} of {service}: within some minutes each step costs less energy, while the job "
    "stays within {budget:.0%} of its speed; TUNING says how and why."
)


def tuned_job(profile: HostProfile) -> DemoJob | None:
    """The training job of a profile: the first that tells of steps."""
    return next((job for job in profile.jobs if job.spans == "steps"), None)


def service_of(job: DemoJob) -> str:
    return job.service or job.name


def with_tuning(config: Config, profile: HostProfile) -> Config:
    """``config``, and the profile's training job is tuned: in short blocks, for short patience."""
    job = tuned_job(profile)
    if job is None:
        return config
    named = TunedJobSettings(service=service_of(job), span=STEP, work="samples")
    tuned = AutotuneSettings(
        mode="apply",
        max_slowdown=BUDGET,
        knobs=(Knob.GPU_POWER,) if profile.gpus else (Knob.CPU_POWER,),
        job=(named,),
        block=Duration.parse("2s"),
        block_units=5,
        settle=Duration.parse("500ms"),
        settle_units=3,
        dwell=Duration.parse("1m"),
    )
    return replace(config, autotune=tuned, caps=CapsSettings(capper=True, users=()))


def tuning_hint(profile: HostProfile) -> str:
    """One sentence for the viewer; "" where nothing is tuned."""
    job = tuned_job(profile)
    if job is None:
        return ""
    return WATCH.format(span=STEP, service=service_of(job), budget=BUDGET)


class _StepTotals(NamedTuple):
    """What had come up to a time: steps, how long they took, and the devices' accounts."""

    at: int  # all of the devices are settled up to here
    steps: int
    time: int
    accounts: tuple[DomainAccount, ...]


@dataclass(slots=True)
class StepCost:
    """What a step costs its devices just now, idle power included, beside what one cost at first.

    Steps follow one another without a break, so that is power times how long a step takes; what
    spans tell late, and energy that nobody can be charged with, then makes no difference. Power
    is energy over how far it is settled: that may be further behind the clock now than before.
    """

    service: str
    _sums: deque[_StepTotals] = field(default_factory=deque)
    _first: tuple[float, float] | None = None

    def see(self, snapshot: Snapshot) -> str:
        """One line about the newest steps; "" while there are too few."""
        now = self._sum(snapshot)
        if now is None:
            return ""
        self._sums.append(now)
        while len(self._sums) > 2 and now.at - self._sums[1].at >= RECENT:
            self._sums.popleft()
        since = self._sums[0]
        steps, elapsed = now.steps - since.steps, now.at - since.at
        power = _power(since, now)
        if elapsed < RECENT or not steps or power is None:
            return ""
        time = (now.time - since.time) / steps
        cost = power * time, time
        self._first = self._first or cost
        return f"A step just now: {_cost_text(cost)}; at first: {_cost_text(self._first)}."

    def _sum(self, snapshot: Snapshot) -> _StepTotals | None:
        tuned = (row for row in snapshot.tuning.rows if row.service == self.service)
        devices = next((row.devices for row in tuned), ())
        steps = (r for r in snapshot.spans.rows if (r.service, r.name) == (self.service, STEP))
        row = next(steps, None)
        if row is None or not devices:
            return None
        accounts = tuple(one for one in snapshot.domains if one.domain.id in devices)
        settled = [one.settled.mono for one in accounts if one.settled is not None]
        if not settled or len(settled) < len(devices):
            return None
        return _StepTotals(min(settled), row.count, row.time, accounts)


def _power(since: _StepTotals, now: _StepTotals) -> float | None:
    """Microjoules a nanosecond of all devices, while it is known; None if it never is of one."""
    power, before = 0.0, {account.domain.id: account for account in since.accounts}
    for account in now.accounts:
        past = before.get(account.domain.id)
        if past is None or past.settled is None or account.settled is None:
            return None
        gaps = sum(account.gaps.values()) - sum(past.gaps.values())
        known = account.settled.mono - past.settled.mono - gaps
        if known < SECOND:
            return None
        power += (account.energy - past.energy) / known
    return power


def _cost_text(cost: tuple[float, float]) -> str:
    energy, time = cost
    return f"{formatting.joules(Microjoules(round(energy)))} in {time / 1e6:.0f} ms"


LISTEN = "127.0.0.1:9949"
OTLP, TRACES = "otlp.sock", "/v1/traces"
IDLE_TIME = Duration.parse("4500ms")  # before the jobs begin: enough for the idle baselines
SETTLE_TIME = Duration.parse("5s")  # after: jobs have rows by then, with GPU energy booked in them
PRINT_INTERVAL = Duration.parse("5s")
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
        request.register(agent.request_stop)
        for address in metrics_addresses(agent):
            click.echo(f"See it: {address.removesuffix('metrics')}")
            click.echo(f"Metrics: curl {address}")
        for address in agent.addresses:
            if address.startswith("http://") and address.endswith(TRACES):
                endpoint = address.removesuffix(TRACES)
                click.echo(f"Send spans of your own: OTEL_EXPORTER_OTLP_ENDPOINT={endpoint}")
        click.echo(EXAMPLES)
        if not no_tune and (sentence := tuning_hint(chosen)):
            click.echo(sentence)
        show = _live if not plain and sys.stdin.isatty() and sys.stdout.isatty() else _plain
        job = None if no_tune else tuned_job(chosen)
        cost = None if job is None else StepCost(service_of(job))
        show(DemoSession(chosen, host, agent, clock, end, cost))
    if agent.failure is not None:
        raise WattspanError("The demo ended because a part of it failed, as said above.")
    click.echo("Done: the emulated host and its files are gone.")


@dataclass(slots=True)
class DemoSession:
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

    def document(self) -> SnapshotDocument:
        """The newest snapshot, as ``wattspan top`` shows it."""
        from wattspan.api.snapshot import snapshot_document

        return snapshot_document(self.agent.view(), __version__)

    def left(self, most: int) -> float:
        """Seconds until ``most`` ns are over, or the demo."""
        if self.end is not None:
            most = max(0, min(most, self.end - self.clock.monotonic()))
        return most / 1e9


IDLE_NOTICE = "At rest for a moment, to learn what it draws by doing nothing."


def _plain(demo: DemoSession) -> None:
    """One table after the other, until the end; at least one."""
    from rich.console import Console

    from wattspan.cli.top.controls import ViewOptions
    from wattspan.cli.top.view import print_once

    click.echo(IDLE_NOTICE)
    if demo.agent.wait(demo.left(IDLE_TIME)):
        return
    click.echo(demo.begin())
    console, over = Console(), demo.agent.wait(demo.left(SETTLE_TIME))
    while not over:
        click.echo()
        print_once(demo.document, ViewOptions(brief=True), console)
        if step := demo.step():
            click.echo(step)
        over = demo.left(PRINT_INTERVAL) <= 0 or demo.agent.wait(demo.left(PRINT_INTERVAL))


def _live(demo: DemoSession) -> None:
    """The live view, from the start."""
    from rich.console import Console

    from wattspan.cli.top.controls import Keyboard, ViewOptions
    from wattspan.cli.top.view import watch

    begin_at = demo.clock.monotonic() + IDLE_TIME

    def running() -> bool:
        if not demo.at_work and demo.clock.monotonic() >= begin_at:
            demo.begin()
        return not demo.agent.wait(0) and demo.left(PRINT_INTERVAL) > 0

    where = ", ".join(address.removesuffix("metrics") for address in metrics_addresses(demo.agent))
    with Keyboard() as keys:
        watch(
            demo.document,
            ViewOptions(),
            clock=demo.clock,
            console=Console(),
            keys=keys,
            interval=Duration.parse("1s"),
            running=running,
            note=lambda: f"{where}  {demo.step() or demo.at_work or IDLE_NOTICE}",
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
    from wattspan.service.assembly import build_agent

    loaded = _configuration(host, listen, tune=tune)
    agent = build_agent(
        loaded.config,
        loaded.plugins,
        log=lambda sentence: click.echo(f"wattspan: {printable(sentence)}", err=True),
        emulated=host,
    )
    agent.start()
    return agent


def metrics_addresses(agent: Agent) -> list[str]:
    """Where figures can be scraped."""
    return [address for address in agent.addresses if address.endswith("/metrics")]


def run_dir(host: EmulatedHost) -> Path:
    """Where the demo's agent has its sockets: beside what it measures, gone with it."""
    return host.directory / "run"


def _configuration(host: EmulatedHost, listen: str, *, tune: bool) -> LoadedConfiguration:
    """The defaults but for tuning and examples: it depends on no configuration of this machine."""
    from wattspan.config import FlagValue, load
    from wattspan.plugins import discover
    from wattspan.service.configuration import LoadedConfiguration

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
    return LoadedConfiguration(with_tuning(config, host.profile) if tune else config, plugins)
