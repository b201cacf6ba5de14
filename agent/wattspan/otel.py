"""Instrumentation of applications with OpenTelemetry; imports nothing of the agent.

``opentelemetry-instrument`` calls :func:`instrument`; code that sets up its own SDK calls it once,
after its provider is set::

    wattspan.otel.instrument()

This module never blocks an application and never raises into it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from wattspan.sdk.span_processor import SpanProcessor

__all__ = ["SpanProcessor", "instrument"]


def __getattr__(name: str) -> Any:
    if name == "SpanProcessor":  # imports the SDK
        from wattspan.sdk.span_processor import SpanProcessor

        return SpanProcessor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def instrument(provider: TracerProvider | None = None) -> bool:
    """Report the spans of ``provider``, by default the global one, to the agent on this host.

    Returns whether they are reported; False under ``WATTSPAN_DISABLED=1`` or without a provider
    of the SDK. Idempotent; never raises. With ``WATTSPAN_DEBUG=1`` a line of log gives the reason
    for False.
    """
    try:
        obstacle = _attach(provider)
    except Exception as error:  # noqa: BLE001 - the application must not fail
        obstacle = f"{type(error).__name__}: {error}"
    if obstacle and os.environ.get("WATTSPAN_DEBUG"):
        import logging

        logging.getLogger("wattspan").warning("Spans are not reported to the agent: %s", obstacle)
    return not obstacle


def _attach(provider: TracerProvider | None) -> str:
    """Add a processor to the provider; returns the obstacle, or ""."""
    if disabled():
        return "WATTSPAN_DISABLED is set"
    from opentelemetry import trace

    found = provider or trace.get_tracer_provider()
    if not hasattr(found, "add_span_processor"):
        return f"{type(found).__name__} is no TracerProvider of the SDK; set one up first"
    from wattspan.sdk import span_processor

    return span_processor.attach(found)


def disabled() -> bool:
    return os.environ.get("WATTSPAN_DISABLED", "").lower() in ("1", "true", "yes", "on")
