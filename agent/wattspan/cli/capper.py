"""``wattspan capper``: the one process that writes limits, until it is told to stop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wattspan.cli.options import config_options, load_without_plugins
from wattspan.model import SECOND
from wattspan.ports import WattspanError
from wattspan.service.systemd import hangup_reloads, stop_on_signals

if TYPE_CHECKING:
    from wattspan.capper.devices import ConcurrentActuator
    from wattspan.config import Config
    from wattspan.model import Knob
    from wattspan.ports import Clock
    from wattspan.service.systemd import SystemdNotifier, Watchdog

STARTUP_TIMEOUT = 60 * SECOND
"""What a start or an end may take: a driver may have boards to wake, and refuse for a while."""

Log = Callable[[str], None]

emulated_option = click.option(
    "--emulated",
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    hidden=True,
    help="Set limits of the emulated host in DIR, and of nothing else.",
)


@click.command(name="capper")
@config_options
@emulated_option
@click.option("--follow-stdin", is_flag=True, hidden=True, help="End when standard input does.")
def command(
    config_file: Path | None, settings: tuple[str, ...], emulated: Path | None, follow_stdin: bool
) -> None:
    """Set power limits for those who may ask, and give the original ones back.

    This is the only part of wattspan that writes to hardware. It answers on a Unix socket in the
    run directory, or on the one that its service manager hands over, keeps a journal in the state
    directory, and restores every limit when it ends, when its tuner does, and when it starts
    after a crash. SIGHUP has a service read its configuration again; what is held stays.
    """
    from wattspan.service.socket_activation import inherited_unix_socket
    from wattspan.service.systemd import SystemdNotifier, Watchdog

    notify, listening = SystemdNotifier.taken(os.environ), inherited_unix_socket(os.environ)

    def load() -> Config:
        return load_without_plugins(config_file, settings)

    reload = hangup_reloads(managed=notify.heard)
    with stop_on_signals(patiently=True, reload=reload) as request:
        from wattspan.capper.paths import capper_socket_path, open_capper_host
        from wattspan.capper.process import Capper, enabled_knobs
        from wattspan.capper.server import refuse_connections
        from wattspan.cli.run import loggers
        from wattspan.clock import SystemClock
        from wattspan.service.configuration import run_directory

        clock = SystemClock()
        try:
            config = load()
        except WattspanError:
            if listening is not None:
                # Whoever waits would have it started again at once, and for ever.
                refuse_connections(
                    listening.socket, "The capper cannot start; its journal says why."
                )
            raise
        tell, warn = loggers(config.agent.log_level)
        notify.patience(STARTUP_TIMEOUT)
        turned = CapperStatus(notify, Watchdog(notify, clock), lambda: capper.status)
        capper = Capper(
            open_capper_host(Path(config.agent.state_dir), emulated),
            capper_socket_path(run_directory(config), emulated=emulated is not None),
            config,
            lambda: open_isolated_actuators(enabled_knobs(config), emulated, clock),
            clock,
            warn,
            alive=turned,
            inherited=listening,
        )
        reloading = CapperReload(config, load, capper.reconfigure, turned, tell, warn, clock)
        if follow_stdin:
            capper.server.follow(0)
        request.register(capper.server.stop, lambda: capper.server.ask(reloading))
        tell(f"Serving {capper.address}")
        troubles = capper.run(ending=turned.ending)
    if troubles:
        raise click.exceptions.Exit(6)


@dataclass(slots=True)
class CapperStatus:
    """Tells the service manager what a turn of the capper's loop means, the first one above all."""

    notify: SystemdNotifier
    watchdog: Watchdog
    status: Callable[[], str]
    refused: str = ""
    begun: bool = False

    def __call__(self) -> None:
        if not self.begun:
            self.ready()
        self.watchdog()
        if self.notify.heard:
            self.notify.status(self._sentence())

    def ready(self) -> None:
        self.begun = True
        self.notify.ready(self._sentence())

    def ending(self) -> None:
        self.notify.stopping()
        self.notify.patience(STARTUP_TIMEOUT)

    def _sentence(self) -> str:
        return " ".join(part for part in (self.refused, self.status()) if part)


@dataclass(slots=True)
class CapperReload:
    """Reads the capper's configuration again, called from its loop. Nothing held is given back."""

    config: Config
    load: Callable[[], Config]
    apply: Callable[[Config], None]
    turned: CapperStatus
    tell: Log
    warn: Log
    clock: Clock

    def __call__(self) -> None:
        self.turned.notify.reloading(self.clock.monotonic())
        try:
            fresh = self.load()
        except WattspanError as error:
            faults = str(error).splitlines()
            for fault in faults:
                self.warn(f"Not reloaded: {fault}")
            self.warn("The configuration of before goes on.")
            self.turned.refused = f"Not reloaded: {faults[0]}"
        else:
            self._take_over(fresh)
        self.turned.ready()

    def _take_over(self, fresh: Config) -> None:
        from wattspan.capper.process import needs_restart

        waiting = needs_restart(self.config, fresh)
        logging.getLogger("wattspan").setLevel(fresh.agent.log_level.upper())
        self.apply(fresh)
        self.turned.refused = ""
        if waiting:
            self.turned.refused = f"{', '.join(waiting)} changed and needs a restart."
            self.warn(
                f"{', '.join(waiting)} changed: it holds from the next start of the capper on;"
                " everything else holds now."
            )
        self.tell("Reloaded; what was held stays.")


def open_isolated_actuators(
    knobs: Collection[Knob], emulated: Path | None, clock: Clock
) -> Sequence[ConcurrentActuator]:
    """``knobs`` of this host, or of the emulated one in ``emulated``, each device isolated."""
    from wattspan.capper.actuators import open_actuators
    from wattspan.capper.workers import isolate_actuators

    if emulated is None:
        return isolate_actuators(open_actuators(knobs, clock=clock), clock)
    from wattspan.emulation.nvml import EmulatedNvml

    gpus = emulated / "gpus"
    nvml = EmulatedNvml(gpus, clock) if gpus.exists() else None
    sysfs = emulated / "sys"
    opened = open_actuators(knobs, nvml=nvml, sysfs=sysfs, clock=clock, emulated=True)
    return isolate_actuators(opened, clock)
