"""The loaded configuration: its emulated host, directories, sockets and collectors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wattspan.config import AgentSettings, Config, EmulationSettings
from wattspan.otlp.destination import METRICS, Destination, as_grpc, parse_destination
from wattspan.plugins import Plugins

if TYPE_CHECKING:
    from wattspan.emulation.host import EmulatedHost


@dataclass(frozen=True, slots=True)
class LoadedConfiguration:
    """The configuration, and the plugins that define its tables."""

    config: Config
    plugins: Plugins


@contextlib.contextmanager
def selected_emulated_host(settings: EmulationSettings) -> Iterator[EmulatedHost | None]:
    """The emulated host of ``settings``, running during the block; None for the real host."""
    if not settings.profile:
        yield None
        return
    from wattspan.emulation.host import EmulatedHost
    from wattspan.emulation.profiles import profile_named

    with EmulatedHost(profile_named(settings.profile), period=settings.counters) as host:
        yield host


def run_directory(config: Config) -> Path:
    """The agent's run directory; by default below $XDG_RUNTIME_DIR unless the user is root."""
    own = os.environ.get("XDG_RUNTIME_DIR")
    if config.agent.run_dir == AgentSettings().run_dir and os.geteuid() != 0 and own:
        return Path(own) / "wattspan"
    return Path(config.agent.run_dir)


def agent_directories(config: Config) -> tuple[str, ...]:
    """The directories to look for a running agent in, in this order."""
    from wattspan.sdk import run_directories

    defaults = tuple(run_directories())
    if os.environ.get("WATTSPAN_RUN_DIR"):
        return defaults
    return tuple(dict.fromkeys((config.agent.run_dir, *defaults)))


def capper_socket(config: Config) -> Path:
    """The capper's socket for a command of the user: the first that exists."""
    from wattspan.capper.journal import capper_socket_path

    candidates = [
        capper_socket_path(directory, emulated=emulated)
        for directory in _capper_directories(config)
        for emulated in (False, True)
    ]
    return first_existing(candidates)


def tuner_capper_socket(config: Config) -> Path:
    """The capper's socket for an agent of this host: the first that exists.

    A host needs one capper: two would take each other's limits for foreign ones. The agent of a
    user, whose run directory has none, therefore uses that of the system's agent.
    """
    from wattspan.capper.journal import capper_socket_path

    return first_existing(list(map(capper_socket_path, _capper_directories(config))))


def _capper_directories(config: Config) -> list[Path]:
    """Run directories beside which a capper of this configuration may listen."""
    from wattspan.capper.journal import SYSTEM_RUN

    own = run_directory(config)
    return [own, SYSTEM_RUN] if config.agent.run_dir == AgentSettings().run_dir else [own]


def first_existing(paths: Sequence[Path]) -> Path:
    """The first path that exists; the first one if none does."""
    return next((path for path in paths if path.exists()), paths[0])


def destinations(config: Config) -> Iterator[Destination]:
    """The configured collector of spans and receiver of metrics; ConfigError."""
    if config.spans.forward:
        yield parse_destination(config.spans.forward)
    if (receiver := metrics_destination(config)) is not None:
        yield receiver


def metrics_destination(config: Config) -> Destination | None:
    """The receiver of metrics, None without one; ConfigError for an invalid address."""
    settings = config.exporters.get("otlp")
    endpoint = getattr(settings, "endpoint", "")
    if getattr(settings, "protocol", "") == "grpc":
        endpoint = as_grpc(endpoint)
    return parse_destination(endpoint, METRICS) if endpoint else None


def forward_faults(config: Config) -> Iterator[str]:
    """A sentence for each error of the settings of forwarding; connects nowhere."""
    spans = config.spans
    if spans.enabled and spans.forward:
        from wattspan.otlp.http_transport import address_errors  # imports ssl

        yield from address_errors(spans.forward, spans.forward_headers)
