"""Plugins, good and bad, for entry points to point at."""

from __future__ import annotations

from typing import Any

from wattspan.model.settings import Table
from wattspan.ports import (
    ActuatorPlugin,
    CounterSource,
    Exporter,
    ExporterContext,
    ExporterPlugin,
    SourceContext,
    SourceError,
    SourcePlugin,
)
from wattspan.testing import ReplaySource


class Empty(Table, frozen=True):
    """No settings."""


class Unresolvable(Table, frozen=True):
    """An annotation without meaning."""

    key: "NoSuchType" = 0  # type: ignore[name-defined]  # noqa: F821, UP037


class Knob(Table, frozen=True):
    """One thing to set."""

    rate: int = 1


OPENED: list[ReplaySource] = []


def _source(settings: Any, context: SourceContext) -> CounterSource:
    source = ReplaySource([])
    OPENED.append(source)
    return source


def _refuse(settings: Any, context: SourceContext) -> CounterSource:
    raise SourceError("Cannot read it: it is not here. Put it there.")


def _crash(settings: Any, context: SourceContext) -> CounterSource:
    raise ZeroDivisionError("oops")


def _crash_exporter(settings: Any, context: ExporterContext) -> Exporter:
    raise ZeroDivisionError("oops")


good = SourcePlugin(Empty, _source)
actuators = ActuatorPlugin(lambda context: ())
knob = SourcePlugin(Knob, lambda settings, context: None)
refusing = SourcePlugin(Empty, _refuse)
crashing = SourcePlugin(Empty, _crash)
crashing_exporter = ExporterPlugin(Empty, _crash_exporter)
no_table = SourcePlugin(dict, _source)  # type: ignore[arg-type]
unresolvable = SourcePlugin(Unresolvable, _source)
not_a_plugin = "a string"
