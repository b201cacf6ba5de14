"""What can go wrong when a figure is read; the measured program's work is not touched by it."""

from __future__ import annotations


class MeasurementError(Exception):
    """A figure that cannot be had: the thing, the cause, the remedy, in its message."""


class AgentUnavailableError(MeasurementError):
    """No agent answers on this host."""


class RefusedError(MeasurementError):
    """The agent does not answer this question."""


class NotMeasuredError(MeasurementError):
    """Nothing was measured where a figure is asked for; it is unknown, and not zero."""


class WindowError(RuntimeError):
    """A window is used out of order: begun twice, ended before it was begun, read while open."""
