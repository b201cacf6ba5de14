"""The loaded configuration: its emulated host, directories, sockets, collectors and clients."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from wattspan import __version__
from wattspan.config import (
    AgentSettings,
    Config,
    EmulationSettings,
    PublishedAgent,
    SpansSettings,
    publish,
    withdraw,
)
from wattspan.config.published import PUBLISHED_KEYS
from wattspan.model.settings import Listen, to_plain
from wattspan.otlp.destination import (
    METRICS,
    Destination,
    as_grpc,
    leads_to,
    parse_destination,
)
from wattspan.plugins import Plugins
from wattspan.ports import ConfigError, error_sentences

if TYPE_CHECKING:
    from wattspan.capper.host_directory import HostDirectory
    from wattspan.capper.protocol import CapperAddress, CapperClient
    from wattspan.emulation.host import EmulatedHost
    from wattspan.ports import Clock


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
    from wattspan.emulation.host import EmulatedHost, profile_named

    with EmulatedHost(profile_named(settings.profile), period=settings.counters) as host:
        yield host


def host_name(emulated: EmulatedHost | None) -> str:
    """The name of this host, or of an emulated one."""
    return socket.gethostname() if emulated is None else f"emulated-{emulated.profile.name}"


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


def ask_agent(
    config: Config, path: str, parameters: Mapping[str, str] | None = None, patience: float = 0.0
) -> dict[str, Any]:
    """The document at ``path`` of the running agent. MeasurementError, as of ``request_json``."""
    from wattspan.sdk.client import request_json  # http.client is not needed by `run`

    directories = agent_directories(config)
    return request_json(path, parameters or {}, patience=patience, directories=directories)


def capper_client(
    config: Config,
    clock: Clock,
    who: str,
    *,
    timeout: float,
    emulated: bool | None = None,
    shared: bool = True,
) -> CapperClient:
    """A client of the capper of this host, or of an emulated host, for one thread.

    ``emulated`` is None for a command that does not know which one its agent measures. With
    ``shared``, an agent or command with a run directory of its own also uses the capper of another
    agent: a host needs one capper, because two would take each other's limits for foreign ones.
    """
    from wattspan.capper.host_directory import HostDirectory
    from wattspan.capper.protocol import CapperClient

    if config.emulation.profile:
        emulated = True
    host = None if emulated else HostDirectory(Path(config.caps.host_dir))
    return CapperClient(
        lambda: capper_addresses(config, host, emulated=emulated, shared=shared),
        clock,
        who=who,
        timeout=timeout,
        held=lambda: host.holder_text if host is not None else "",
    )


def capper_addresses(
    config: Config,
    host: HostDirectory | None,
    *,
    emulated: bool | None = None,
    shared: bool = True,
) -> tuple[CapperAddress, ...]:
    """The sockets on which the capper may listen, in the order in which to try them.

    The system's socket is the last one: a connection to it starts the system's capper, which must
    not happen while another agent's capper serves.
    """
    from wattspan.capper.host_directory import SYSTEM_RUN, capper_socket_path
    from wattspan.capper.protocol import CapperAddress

    configured = config.agent.run_dir != AgentSettings().run_dir
    own = run_directory(config)
    kinds = (False, True) if emulated is None else (emulated,)
    directories = [own] if configured else [own, SYSTEM_RUN]
    places = [
        CapperAddress(capper_socket_path(directory, emulated=kind))
        for directory in directories
        for kind in kinds
    ]
    serving = host.address() if host is not None and (shared or not configured) else None
    if serving is not None:
        serving = serving._replace(shared=serving.path not in [place.path for place in places])
        places.insert(0 if own == SYSTEM_RUN else 1, serving)
    found: dict[Path, CapperAddress] = {}
    for place in places:
        found.setdefault(place.path, place)
    return tuple(found.values())


def destinations(config: Config) -> Iterator[Destination]:
    """The configured collector of spans and receiver of metrics; ConfigError."""
    if config.spans.forward:
        yield parse_destination(config.spans.forward)
    if (receiver := metrics_destination(config)) is not None:
        yield receiver


def second_listener(config: Config) -> Listen | None:
    """The other address of "localhost", if the receiver of spans has the default address.

    None also without IPv6, and if a destination of the configuration is there.
    """
    from wattspan.http.sockets import other_loopback

    http = config.spans.http
    if "spans.http" in config.origins and http != SpansSettings().http:
        return None
    other = other_loopback(http) if http else None
    with contextlib.suppress(ConfigError):  # which the user of the destination reports
        if other and any(leads_to(one, f"http://{other}") for one in destinations(config)):
            return None
    return other


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
        from wattspan.otlp.destination import can_examine, forward_headers
        from wattspan.otlp.http_transport import address_errors  # imports ssl

        yield from address_errors(spans.forward, spans.forward_headers)
        if spans.forward_headers_file and can_examine(spans.forward_headers_file):
            inline = msgspec.structs.replace(spans, forward_headers="")
            yield from error_sentences(lambda: forward_headers(inline))


# ------------------------------------------------------------------------- settings for clients


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
