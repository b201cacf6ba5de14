"""Cost and emissions of a report's energy: as cells of a table, as data, as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wattspan.attribution.cost import BILLION, billionths
from wattspan.cli.formatting import UNKNOWN, joules, share
from wattspan.config import Config
from wattspan.config.footprint import RateSettings
from wattspan.ports import ConfigError
from wattspan.storage.database import MINUTE
from wattspan.storage.rates import CARBON, COST, PeriodsBetween, RatedTotal, Weighting, rated_totals
from wattspan.util.text import printable

if TYPE_CHECKING:
    from wattspan.footprint.schedule import RatePeriod

MASS_UNITS = (("t", 10**6), ("kg", 1000), ("g", 1))
"""Units of carbon in grams; a table has one."""


def configured_valuations(config: Config) -> tuple[Weighting, ...]:
    """The rates of the present configuration, which apply to all times.

    Rates of a server or a file apply as the agent recorded them in the store.
    """
    found = (_valuation(COST, config.cost), _valuation(CARBON, config.carbon))
    return tuple(each for each in found if each is not None)


def _valuation(kind: str, table: RateSettings) -> Weighting | None:
    unit = table.unit
    if table.constant is not None:
        return Weighting(kind, unit, _constant_rate(billionths(table.constant)), steady=True)
    if table.schedule:
        from wattspan.footprint.tariff_file import read_schedule

        try:
            return Weighting(kind, unit, read_schedule(Path(table.schedule)).periods_between)
        except ConfigError as error:
            click.echo(f"wattspan: {printable(str(error))}", err=True)
            return Weighting(kind, unit, _constant_rate(None), steady=True)
    return Weighting(kind, unit) if table.url or table.file else None


def _constant_rate(rate: int | None) -> PeriodsBetween:
    def pieces(start: int, end: int) -> Iterator[RatePeriod]:
        yield end - start, rate

    return pieces


# ------------------------------------------------------------------------------------ as data


def footprint_headings(asked: Sequence[Weighting]) -> tuple[str, ...]:
    """The columns of ``footprint_values``."""
    return tuple(
        heading
        for each in asked
        for heading in (f"{each.kind}_{each.unit}", f"{each.kind}_unknown_uj")
    )


def footprint_values(energy: int, asked: Sequence[Weighting]) -> Iterator[object]:
    """The amount, None if no rate was known, and the energy whose rate was unknown."""
    for weight in _weights(energy, asked):
        known = _is_known(energy, weight)
        yield Decimal(weight.billionths).scaleb(-9) if known else None
        yield weight.unknown


def footprint_facts(energy: int, asked: Sequence[Weighting]) -> dict[str, Any]:
    """Cost and carbon for JSON."""
    return {
        each.kind: {
            "unit": each.unit,
            "amount": weight.billionths / BILLION if _is_known(energy, weight) else None,
            "unknown_microjoules": weight.unknown,
        }
        for weight, each in zip(_weights(energy, asked), asked, strict=True)
    }


def _weights(energy: int, asked: Sequence[Weighting]) -> tuple[RatedTotal, ...]:
    """The rated totals; zeros of a sum without energies."""
    return rated_totals(energy) or (RatedTotal(0, 0),) * len(asked)


def _is_known(energy: int, weight: RatedTotal) -> bool:
    """True if the rate of any part of the energy was known."""
    return not energy or weight.unknown != energy


# ----------------------------------------------------------------------------------- as a table


class FootprintColumns:
    """The cost cells of a table, with the digits that its total needs; none without rates."""

    def __init__(self, asked: Sequence[Weighting], total: int) -> None:
        self._asked = asked
        self._scales = [*map(_scale, asked, _weights(total, asked))]
        self.headings = tuple(name for name, _, _ in self._scales)

    def cells(self, energy: int) -> tuple[str, ...]:
        """``"0.034"``; ``"≥0.034"`` if the rate of a part was unknown; a dash if of all."""
        return tuple(
            _cell(energy, weight, size, digits)
            for weight, (_, size, digits) in zip(
                _weights(energy, self._asked), self._scales, strict=True
            )
        )


def _scale(each: Weighting, total: RatedTotal) -> tuple[str, int, int]:
    """Heading, billionths of the unit, and digits."""
    name, size = each.unit, 1
    if each.kind == CARBON:
        whole = total.billionths / BILLION
        mass, size = next((m for m in MASS_UNITS if whole >= m[1]), MASS_UNITS[-1])
        name = f"{mass} CO2e"
    value, digits = total.billionths / BILLION / size, 2
    while digits < 9 and 0 < value < 10 ** (3 - digits):  # four significant digits
        digits += 1
    return name, size * BILLION, digits


def _cell(energy: int, weight: RatedTotal, size: int, digits: int) -> str:
    if not _is_known(energy, weight):
        return UNKNOWN
    return f"{'≥' if weight.unknown else ''}{weight.billionths / size:.{digits}f}"


def footprint_notes(asked: Sequence[Weighting], total: int, steps: Sequence[int]) -> Iterator[str]:
    """The energy without a known rate, and the assumption about buckets."""
    words = {COST: ("price", "cost"), CARBON: ("carbon intensity", "carbon")}
    for each, weight in zip(asked, _weights(total, asked), strict=True):
        rate, figure = words[each.kind]
        if weight.unknown:
            yield (
                f"The {rate} was not known for {joules(weight.unknown)} "
                f"({share(weight.unknown, total)}), which is in no {figure}."
            )
    if max(steps) > MINUTE and not all(each.steady for each in asked):
        yield "Energy by the hour or day counts as spent evenly where a rate changed within it."
