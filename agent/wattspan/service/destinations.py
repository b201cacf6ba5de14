"""The collectors and receivers of a configuration."""

from __future__ import annotations

from collections.abc import Iterator

from wattspan.config import Config
from wattspan.otlp.destination import (
    METRICS,
    Destination,
    as_grpc,
    parse_destination,
)
from wattspan.otlp.opening import address_errors


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
        yield from address_errors(spans.forward, spans.forward_headers)
