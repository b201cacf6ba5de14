"""Comparison of the spans that the agent reports as forwarded with those of its collector."""

from __future__ import annotations

from collections.abc import Callable

from testbed.faults.collector import Collector
from testbed.faults.observation import NANO, Sight
from testbed.faults.schedule import Claim
from testbed.faults.stage import Stage

FORWARDED = "wattspan_spans_forwarded_total"
DROPPED = "wattspan_spans_forward_drops_total"
REPEATED = "wattspan_spans_forward_repeats_total"

NONE_DROPPED = Claim(
    "no span dropped",
    lambda _, sights: sights[-1].total(DROPPED) == sights[0].total(DROPPED),
)


def all_arrived(of: Callable[[Stage], Collector]) -> Claim:
    """A scrape never reports more forwarded spans than the collector has at that time.

    A span in flight can only be received and not yet reported: so each scrape is held to it.
    """
    return Claim(
        "reported forwarded spans have arrived",
        lambda stage, sights: all(missing(of(stage), sight) <= 0 for sight in sights),
    )


def missing(collector: Collector, sight: Sight) -> int:
    """Excess of reported over received spans."""
    return sight.total(FORWARDED) // NANO - collector.arrived(sight.at)


def account(of: Callable[[Stage], Collector]) -> Callable[[Stage], str]:
    """For the table: span counts of agent and collector since the stage began, at the last
    scrape."""

    def note(stage: Stage) -> str:
        sight, collector = stage.last, of(stage)
        told, twice = (sight.total(name) // NANO for name in (FORWARDED, REPEATED))
        return (
            f"{collector.arrived(sight.at)} spans had arrived, {told} reported as forwarded, "
            f"{twice} as possibly sent twice, {collector.repeated} ids came twice"
        )

    return note
