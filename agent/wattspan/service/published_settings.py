"""The settings that the running agent publishes for clients: its addresses, and no secret."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wattspan import __version__
from wattspan.config import PublishedAgent, publish, withdraw
from wattspan.config.published import PUBLISHED_KEYS
from wattspan.model.settings import to_plain
from wattspan.service.configuration import run_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from wattspan.config import Config


def published_agent(config: Config, addresses: Sequence[str], *, emulated: bool) -> PublishedAgent:
    """The settings that clients need; ``addresses`` are those on which the agent listens."""
    settings: dict[str, str | bool] = {}
    for where, table in config.tables.items():
        for name, value in to_plain(table).items():
            if f"{where}.{name}" in PUBLISHED_KEYS:
                settings[f"{where}.{name}"] = value
    settings["agent.run_dir"] = str(run_directory(config).absolute())
    listen = "exporters.prometheus.listen"
    if listen in settings:  # the port may have been chosen by the kernel
        settings[listen] = _listening(addresses)
    return PublishedAgent("", __version__, os.getpid(), emulated, settings)


def _listening(addresses: Sequence[str]) -> str:
    """The address of the metrics; "" without a listener."""
    for address in addresses:
        if address.startswith(("http://", "https://")) and address.endswith("/metrics"):
            return address.partition("://")[2].removesuffix("/metrics")
    return ""


def publish_settings(
    config: Config, addresses: Sequence[str], log: Callable[[str], None], *, emulated: bool
) -> None:
    """Write them into the run directory, if the agent has one; a failure is logged only."""
    directory = run_directory(config)
    if not directory.is_dir():  # without any Unix socket
        return
    try:
        publish(directory, published_agent(config, addresses, emulated=emulated))
    except OSError as error:
        log(
            f"Cannot write agent.json in {directory}: {error.strerror}. Commands of users who may"
            " not read the configuration do not find this agent."
        )


def withdraw_settings(config: Config) -> None:
    """Remove them, unless another agent has replaced them."""
    withdraw(run_directory(config), os.getpid())
