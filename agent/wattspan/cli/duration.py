"""Durations on the command line, written as in the configuration."""

from __future__ import annotations

import click

from wattspan.model.settings import Duration


class DurationType(click.ParamType[Duration]):
    """A duration with a unit."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Duration:
        if isinstance(value, Duration):
            return value
        try:
            return Duration.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
