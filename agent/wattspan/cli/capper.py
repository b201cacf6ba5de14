"""``wattspan capper``: the one process that writes limits, until it is told to stop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wattspan.cli.options import config_options, load_configuration
from wattspan.cli.signals import stop_on_signals

if TYPE_CHECKING:
    from wattspan.config import Config
    from wattspan.ports import Actuator, Clock

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
    run directory, keeps a journal in the state directory, and restores every limit when it ends,
    when its tuner does, and when it starts after a crash.
    """
    with stop_on_signals(patiently=True) as request:
        loaded = load_configuration(config_file, settings)
        from wattspan.capper.notify import Notify
        from wattspan.capper.place import open_place
        from wattspan.capper.process import Capper
        from wattspan.cli.run import loggers
        from wattspan.cli.run_directory import run_directory
        from wattspan.clock import SystemClock

        config, clock, notify = loaded.config, SystemClock(), Notify(os.environ)
        tell, warn = loggers(config.agent.log_level)
        said = ["READY=1"]
        capper = Capper(
            open_place(Path(config.agent.state_dir), emulated),
            run_directory(config),
            config,
            lambda: actuators(config, emulated, clock),
            clock,
            warn,
            alive=lambda: notify(said.pop() if said else "WATCHDOG=1"),
        )
        if follow_stdin:
            capper.server.follow(0)
        request.tell(capper.server.stop)
        tell(f"Serving {capper.address}")
        troubles = capper.run()
        notify("STOPPING=1")
    if troubles:
        raise click.exceptions.Exit(6)


def actuators(config: Config, emulated: Path | None, clock: Clock) -> Sequence[Actuator]:
    """The knobs of this host, or of the emulated one in ``emulated``."""
    from wattspan.actuators.opening import open_actuators
    from wattspan.capper.process import knobs_of

    knobs = knobs_of(config)
    if emulated is None:
        return open_actuators(knobs, clock=clock)
    from wattspan.emulation.nvml import EmulatedNvml

    gpus = emulated / "gpus"
    nvml = EmulatedNvml(gpus, clock) if gpus.exists() else None
    return open_actuators(knobs, nvml=nvml, sysfs=emulated / "sys", clock=clock, emulated=True)
