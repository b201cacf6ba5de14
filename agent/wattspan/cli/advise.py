"""``wattspan advise``: what would save GPU energy, from the running agent."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

import click

from wattspan.api.estimates import ADVICE_PATH
from wattspan.cli.formatting import (
    UNKNOWN,
    TableColumn,
    duration_text,
    joules_text,
    table_lines,
    watts,
)
from wattspan.cli.options import (
    ConfigurationOptions,
    config_options,
    echo_error,
    echo_result,
    json_option,
)
from wattspan.model import StaticBasis
from wattspan.ports import WattspanError
from wattspan.service.configuration import ask_agent
from wattspan.util.text import printable

_REFUSALS = {
    "few_windows": "less than a minute with waiting spans of the board's only user",
    "no_spread": "the share of waiting time hardly varies",
    "uncertain": "power varies too much for a precise result",
    "not_lower": "waiting draws as much power as work",
}


@click.command(name="advise")
@click.argument("service", default="", required=False)
@json_option
@config_options
def command(service: str, configuration: ConfigurationOptions, as_json: bool) -> None:
    """Advise what would save GPU energy, with joules and a confidence.

    From the facts of the running agent since its start. With SERVICE only advice about this
    service. Nothing is advised where a figure is not known; the reasons are listed if there is no
    advice at all.
    """
    config = configuration.load(client=True).config
    parameters = {"service": service} if service else {}
    found = ask_agent(config, ADVICE_PATH, parameters)
    if service and service not in found["services"] and not found["advice"]:
        near = difflib.get_close_matches(service, found["services"], n=1)
        known = ", ".join(map(printable, found["services"])) or "none"
        remedy = f"Did you mean {printable(near[0])}?" if near else f"Known: {known}."
        raise WattspanError(
            f"Service {printable(service)!r} has used no GPU alone since the agent's start. "
            + remedy
        )
    echo_result(found, advice_lines(found), as_json=as_json)
    if not as_json and found.get("restricted"):
        echo_error(
            "Left out: advice about processes of other users. `sudo wattspan advise` shows it."
        )


def advice_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines for people of a response of ``GET /v1/advice``."""
    if found["emulated"]:
        yield "EMULATED: these are figures of an emulated host, not of real hardware."
        yield ""
    if not found["advice"]:
        yield "No advice since the start of the agent:"
        for reason in found["no_advice"]:
            yield f"  {printable(reason['sentence'])}"
    for one in found["advice"]:
        joules = joules_text(one["joules"])
        low, high = joules_text(one["low_joules"]), joules_text(one["high_joules"])
        span = f" ({low} to {high})" if one["low_joules"] != one["high_joules"] else ""
        observed = duration_text(round(one["observed_seconds"] * 1e9))
        yield f"{joules}{span} in {observed}, confidence {one['confidence']}, {one['provenance']}"
        yield f"  {printable(one['sentence'])}"
        idle = one.get("idle_joules")
        if idle is not None:
            rest = joules_text(one["joules"] - idle)
            yield (
                f"  Of it {rest} are energy of its spans, and {joules_text(idle)} idle energy of"
                " the board, as `wattspan report` counts them."
            )
    if found["boards"]:
        yield ""
        yield from table_lines(_BOARD_COLUMNS, found["boards"], max_width=90)


def _watts(power: float | None) -> str:
    return UNKNOWN if power is None else f"{watts(power)} W"


def _static_watts(board: Mapping[str, Any]) -> str:
    fitted = board["static_basis"] == StaticBasis.FITTED
    error = f" ±{board['fitted_half_width_watts']:.1f} W" if fitted else ""
    return _watts(board["static_watts"]) + error


def _static_basis(board: Mapping[str, Any]) -> str:
    basis = board["static_basis"]
    how = (basis or "unknown").replace("_", " ")
    if board["fit_refused"] and basis != StaticBasis.CONFIGURED:
        how += f": {_REFUSALS.get(board['fit_refused'], board['fit_refused'])}"
    elif basis == StaticBasis.FITTED and board["fitted_celsius"]:
        low, high = board["fitted_celsius"]
        how += f" at {low} to {high} °C"
    return how


_BOARD_COLUMNS = (
    TableColumn("board", itemgetter("hw_name"), left=True),
    TableColumn("static", _static_watts),
    TableColumn("how", _static_basis, left=True),
    TableColumn("idle", lambda board: _watts(board["idle_watts"])),
    TableColumn("figures", itemgetter("provenance"), left=True),
)
