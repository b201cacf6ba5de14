"""``wattspan capper``: the one process that writes limits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wattspan.cli.options import ConfigurationOptions, config_options
from wattspan.cli.run import Log, loggers
from wattspan.clock import SystemClock
from wattspan.config import Config
from wattspan.model import SECOND, Knob
from wattspan.ports import Clock, WattspanError
from wattspan.service.configuration import run_directory
from wattspan.service.systemd import (
    SystemdNotifier,
    Watchdog,
    hangup_reloads,
    inherited_unix_socket,
    stop_on_signals,
)

if TYPE_CHECKING:
    from wattspan.capper.devices import ConcurrentActuator

STARTUP_TIMEOUT = 60 * SECOND
"""The time for a start or an end: a driver may have to wake its boards first."""

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
def command(configuration: ConfigurationOptions, emulated: Path | None, follow_stdin: bool) -> None:
    """Set power limits for permitted users, and restore the original ones.

    This is the only part of wattspan that writes to hardware. It answers on a Unix socket in the
    run directory, or on the socket that its service manager passes, keeps a journal in the state
    directory, and restores every limit when it ends, when its tuner ends, and when it starts
    after a crash. On SIGHUP a service reads its configuration again; limits stay in force.
    """
    load = configuration.load_without_plugins
    notify = SystemdNotifier.from_environment(os.environ)
    listening = inherited_unix_socket(os.environ)
    reload = hangup_reloads(managed=notify.available)
    with stop_on_signals(patiently=True, reload=reload) as request:
        from wattspan.capper.host_directory import HostClaim, capper_socket_path, open_capper_host
        from wattspan.capper.process import Capper, enabled_knobs, restore_former
        from wattspan.capper.server import refuse_connections

        clock = SystemClock()
        try:
            config = load()
        except WattspanError:
            if listening is not None:
                # Waiting clients would make systemd start it again at once, and for ever.
                refuse_connections(
                    listening.socket,
                    "The capper cannot start; the cause is in the system's journal of its unit.",
                )
            raise
        info, warn = loggers(config.agent.log_level)
        notify.extend_timeout(STARTUP_TIMEOUT)
        status = CapperStatus(notify, Watchdog(notify, clock), lambda: capper.status)
        with ExitStack() as stack:
            try:
                host = open_capper_host(Path(config.agent.state_dir), emulated)
                claim = None
                if emulated is None:  # emulated hosts share no device
                    claim = HostClaim(Path(config.caps.host_dir))
                    stack.callback(claim.release)
                    every = partial(
                        open_isolated_actuators, tuple(Knob), None, clock, config.caps.actuators
                    )
                    restore_former(claim, host, config, every, clock, warn)
                capper = Capper(
                    host,
                    capper_socket_path(run_directory(config), emulated=emulated is not None),
                    config,
                    lambda: open_isolated_actuators(
                        enabled_knobs(config), emulated, clock, config.caps.actuators
                    ),
                    clock,
                    warn,
                    alive=status,
                    inherited=listening,
                    claim=claim,
                    agent=os.getppid() if follow_stdin else 0,
                )
            except WattspanError as error:
                if listening is not None:
                    refuse_connections(listening.socket, str(error))
                raise
            reloading = CapperReload(config, load, capper.reconfigure, status, info, warn, clock)
            if follow_stdin:
                capper.server.follow(0)
            request.register(capper.server.stop, lambda: capper.server.ask(reloading))
            info(f"Serving {capper.address}")
            troubles = capper.run(ending=status.ending)
    if troubles:
        raise click.exceptions.Exit(6)


@dataclass(slots=True)
class CapperStatus:
    """Reports each turn of the capper's loop to the service manager."""

    notify: SystemdNotifier
    watchdog: Watchdog
    status: Callable[[], str]
    not_applied: str = ""
    begun: bool = False

    def __call__(self) -> None:
        if not self.begun:
            self.ready()
        self.watchdog()
        if self.notify.available:
            self.notify.status(self._sentence())

    def ready(self) -> None:
        self.begun = True
        self.notify.ready(self._sentence())

    def ending(self) -> None:
        self.notify.stopping()
        self.notify.extend_timeout(STARTUP_TIMEOUT)

    def _sentence(self) -> str:
        return f"{self.not_applied} {self.status()}".strip()


@dataclass(slots=True)
class CapperReload:
    """Reads the capper's configuration again, called from its loop. Limits stay in force."""

    config: Config
    load: Callable[[], Config]
    apply: Callable[[Config], None]
    status: CapperStatus
    log: Log
    warn: Log
    clock: Clock

    def __call__(self) -> None:
        from wattspan.capper.process import needs_restart

        self.status.notify.reloading(self.clock.monotonic())
        self.status.not_applied = ""
        try:
            fresh = self.load()
        except WattspanError as error:
            faults = str(error).splitlines()
            for fault in faults:
                self.warn(f"Not reloaded: {fault}")
            self.warn("The former configuration stays in force.")
            self.status.not_applied = f"Not reloaded: {faults[0]}"
        else:
            logging.getLogger("wattspan").setLevel(fresh.agent.log_level.upper())
            self.apply(fresh)
            if waiting := ", ".join(needs_restart(self.config, fresh)):
                self.status.not_applied = f"{waiting} changed and needs a restart."
                self.warn(
                    f"{waiting} changed: it applies from the next start of the capper on;"
                    " everything else applies now."
                )
            self.log("Reloaded; limits stay in force.")
        self.status.ready()


def open_isolated_actuators(
    knobs: Collection[Knob], emulated: Path | None, clock: Clock, plugins: Collection[str] = ()
) -> Sequence[ConcurrentActuator]:
    """``knobs`` of this host, or of the emulated one in ``emulated``, each device isolated.

    ``plugins`` are the names of those that the configuration permits. ConfigError.
    """
    from wattspan.capper.devices import isolate_actuators
    from wattspan.capper.workers import open_actuators
    from wattspan.plugins import load_actuators

    if emulated is None:
        named = load_actuators(plugins)
        opened = open_actuators(knobs, clock=clock, plugins=named, awaits=True)
        return isolate_actuators(opened, clock)
    from wattspan.emulation.amdsmi import EmulatedAmdSmi
    from wattspan.emulation.gpu_file import AMD_GPUS, NVIDIA_GPUS
    from wattspan.emulation.nvml import EmulatedNvml

    gpus, amd_gpus = emulated / NVIDIA_GPUS, emulated / AMD_GPUS
    opened = open_actuators(
        knobs,
        nvml=EmulatedNvml(gpus, clock) if gpus.exists() else None,
        sysfs=emulated / "sys",
        clock=clock,
        emulated=True,
        amdsmi=EmulatedAmdSmi(amd_gpus, clock) if amd_gpus.exists() else None,
    )
    return isolate_actuators(opened, clock)
