"""What instrumented applications load: light, and nothing of the agent.

``opentelemetry-instrument`` finds :func:`instrument` by itself; code that sets up its own SDK
calls it once, after its provider is set::

    wattspan.otel.instrument()

An application never waits for this module, and never fails because of it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from wattspan.sdk.span_processor import SpanProcessor

__all__ = ["SpanProcessor", "instrument"]


def __getattr__(name: str) -> Any:
    if name == "SpanProcessor":  # loads the SDK, which an application that asks for it has loaded
        from wattspan.sdk.span_processor import SpanProcessor

        return SpanProcessor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def instrument(provider: TracerProvider | None = None) -> bool:
    """Tell the agent on this host of every span of ``provider``, by default the global one.

    Returns whether it is told of them now; False under ``WATTSPAN_DISABLED=1`` or without a
    provider of the SDK. May be called any number of times, and never raises; with
    ``WATTSPAN_DEBUG=1`` a line of log says why it did nothing.
    """
    try:
        why_not = _attach(provider)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is not the application's fault
        why_not = f"{type(error).__name__}: {error}"
    if why_not and os.environ.get("WATTSPAN_DEBUG"):
        import logging

        logging.getLogger("wattspan").warning("Spans are not told to the agent: %s", why_not)
    return not why_not


def _attach(provider: TracerProvider | None) -> str:
    """Add a processor to the provider; returns why that cannot be, "" if it was done."""
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
