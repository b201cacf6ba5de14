"""Spans: joules per call and per token, and the traces behind them."""

from __future__ import annotations

from typing import Any

from dashboards import palette, uids
from dashboards.layout import HOSTS, JOB, Chosen, Place, Row, dashboard
from dashboards.panels import Ask, Column, cell, graph, link, listing, scatter, stat_panel
from dashboards.promql import among, by, each, most, rate, rest, series, spent, top
from dashboards.shared import SHARE_STEPS, TYPES, provenance

TOP, LISTED = 10, 50
NAME = "service_name, span_name"
LEGEND = "{{service_name}}: {{span_name}}"

SERVICE = 'service_name=~"$service"'
SPAN = (SERVICE, 'span_name=~"$span"')
ON = 'hw_type=~"$hw_type"'
ENERGY = series("wattspan_span_energy_joules_total", *SPAN, ON)
CALLS = series("wattspan_spans_total", *SPAN)
TIME = series("wattspan_span_seconds_total", *SPAN)
TOKENS = series("wattspan_span_tokens_total", *SPAN)
MADE = series("wattspan_span_tokens_total", *SPAN, 'direction="output"')
OUTSIDE = series("wattspan_span_outside_energy_joules_total", SERVICE, ON)
SERVICE_ENERGY = series("wattspan_span_energy_joules_total", SERVICE, ON)
OUTCOMES = series("wattspan_span_outcomes_total")
ENDED = series("wattspan_span_outcomes_total", 'reason!="duplicate"')  # not a separate span
JOINED = series("wattspan_span_outcomes_total", 'reason="joined"')

MOST = most(TOP, NAME, ENERGY)

ALL_OVER_MADE = "all their energy, that of reading included, over the tokens they made (`output`)"


def document() -> dict[str, Any]:
    service = Chosen(
        "service", "Service", "As the spans' resource says: `service.name`.",
        series("wattspan_spans_total"), "service_name", multi=True, all=True,
    )  # fmt: skip
    span = Chosen(
        "span", "Span", "The spans' names.",
        series("wattspan_spans_total", SERVICE), "span_name", multi=True, all=True,
    )  # fmt: skip
    return dashboard(
        uids.SPANS,
        "What a call, a step, a request or a token costs in joules, which spans spend most, and "
        "the traces behind them. Energy is exclusive: at every instant a process's power is "
        "divided among its innermost open spans, so the rows add up.",
        (JOB, HOSTS, service, span, TYPES),
        (
            Row("", (*_headline(), *_costs())),
            Row("Spans", _table()),
            Row("Power", _power()),
            Row("What became of the spans", _outcomes()),
        ),
    )


def _headline() -> tuple[Place, ...]:
    outside = f"sum({spent(OUTSIDE)})"
    # The one has no series before its first span, and the other none before its first joule.
    joined = f"(sum({spent(JOINED)}) or vector(0))"
    inside = f"(sum({spent(SERVICE_ENERGY)}) or vector(0))"
    none = "no spans"
    return (
        Place(
            stat_panel(
                "Joules per call",
                "Energy of the chosen spans over their number, in the time range shown: one mean "
                "over all names that are chosen.",
                palette.JOULE, Ask(each(f"sum({spent(ENERGY)})", f"sum({spent(CALLS)})")),
                spark=False, decimals=1, empty=none,
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Joules per token",
                f"Of the chosen spans that told of tokens: {ALL_OVER_MADE}, in the range.",
                palette.JOULE,
                Ask(each(
                    f"sum({by(NAME, spent(ENERGY))} and on ({NAME}) {by(NAME, spent(MADE))})",
                    f"sum({spent(MADE)})",
                )),
                spark=False, decimals=1, empty="no tokens told",
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Calls per second", "Spans a second that ended and whose energy is known.",
                palette.PER_SECOND, Ask(f"sum({rate(CALLS)})"), empty=none,
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Outside spans",
                "The part of the services' energy in the range that was spent while none of their "
                "spans was open. Much of it: work that nobody has put in a span.",
                palette.SHARE, Ask(f"{outside} / ({outside} + {inside})"),
                spark=False, decimals=1, empty=none,
                steps=((None, palette.GOOD), (0.2, palette.NOTICE), (0.5, palette.BAD)),
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Without full energy",
                "The part of all ended spans of the range whose energy is not fully known, by "
                "reason below; one that came twice counts once. All services: who sent what was "
                "not joined is not told apart.",
                palette.SHARE, Ask(f"1 - {joined} / sum({spent(ENDED)})"),
                spark=False, decimals=1, steps=SHARE_STEPS, empty=none,
            ), 4, 4,
        ),
        provenance(),
    )  # fmt: skip


def _costs() -> tuple[Place, ...]:
    return (
        Place(
            graph(
                "Joules per call, by span",
                "Energy of a span's name over its calls, for the ten names that spent most over "
                "the range. The diamonds are single spans, each at what it spent on devices of one "
                "type: one leads to its trace, if the data source is told where traces are and "
                "Prometheus keeps exemplars.",
                palette.JOULE,
                Ask(
                    f"{each(by(NAME, rate(ENERGY)), by(NAME, rate(CALLS)))}"
                    f" and on ({NAME}) {MOST}",
                    LEGEND, exemplars=True,
                ),
            ), 12, 10,
        ),
        Place(
            graph(
                "Joules per token, by span",
                f"Of spans that told of tokens (`gen_ai.usage.*`): {ALL_OVER_MADE}.",
                palette.JOULE,
                Ask(
                    f"{each(by(NAME, rate(ENERGY)), by(NAME, rate(MADE)))} and on ({NAME}) {MOST}",
                    LEGEND,
                ),
                empty="no tokens told",
            ), 12, 10,
        ),
    )  # fmt: skip


def _table() -> tuple[Place, ...]:
    return (
        Place(
            listing(
                "Spans that spent most",
                "Each name, over the time range shown: energy and its part of all spans' energy, "
                "calls, joules per call, mean duration, mean power of a call (joules over its "
                "duration: below the process's power where spans overlap), joules per token made; "
                f"the {LISTED} names that spent most. A service leads to how it is tuned, a span "
                "to itself alone.",
                (
                    Column("service_name", "Service", link=link(
                        "How this span is tuned, if it is", uids.AUTOTUNER,
                        tuned=f"{cell('Service')}%2F{cell('Span')}",
                    )),
                    Column("span_name", "Span", link=link(
                        "Only this span", uids.SPANS,
                        service=cell("Service"), span=cell("Span"),
                    )),
                    Column("A", "Energy", palette.JOULE, width=90),
                    Column("B", "Share", palette.SHARE, width=110, bar=True),
                    Column("C", "Calls", palette.PLAIN, width=80),
                    Column("D", "J per call", palette.JOULE, width=95),
                    Column("E", "Duration", palette.SECONDS, width=90),
                    Column("F", "Power", palette.WATT, width=80),
                    Column("G", "J per token", palette.JOULE, width=95),
                ),
                _listed(by(NAME, spent(ENERGY))),
                _listed(f"{by(NAME, spent(ENERGY))} / scalar(sum({spent(ENERGY)}))"),
                _listed(by(NAME, spent(CALLS))),
                _listed(each(by(NAME, spent(ENERGY)), by(NAME, spent(CALLS)))),
                _listed(each(by(NAME, spent(TIME)), by(NAME, spent(CALLS)))),
                _listed(each(by(NAME, spent(ENERGY)), by(NAME, spent(TIME)))),
                _listed(each(by(NAME, spent(ENERGY)), by(NAME, spent(MADE)))),
                sort="Energy", empty="no spans",
            ), 16, 11,
        ),
        Place(
            scatter(
                "Energy against latency",
                "Each point is a service's span by name: its mean duration and its joules per call "
                f"over the range, of the {LISTED} that spent most. To the lower left is better; "
                "above the others at the same duration is work that draws more power.",
                ("Duration", palette.SECONDS), ("Joules per call", palette.JOULE),
                ("service_name", "span_name"),
                _listed(each(by(NAME, spent(TIME)), by(NAME, spent(CALLS)))),
                _listed(each(by(NAME, spent(ENERGY)), by(NAME, spent(CALLS)))),
            ), 8, 11,
        ),
    )  # fmt: skip


def _listed(figure: str) -> Ask:
    """``figure`` of the names that spent most: the same names for every column and both axes."""
    return Ask(among(LISTED, NAME, figure, ENERGY))


def _power() -> tuple[Place, ...]:
    return (
        Place(
            graph(
                "Power in spans",
                "Power of the names that spent most over the range, of all other chosen spans, and "
                "of the services while none of their spans was open. A span counts when it has "
                "ended and settled, so a long one shows at its end.",
                palette.WATT,
                Ask(f"sum({rate(OUTSIDE)})", "outside spans"),
                Ask(rest(TOP, NAME, ENERGY), "other spans"),
                Ask(top(TOP, NAME, ENERGY), LEGEND),
                stack=True,
                colours={"outside spans": palette.IDLE, "other spans": palette.OTHERS},
            ), 12, 9,
        ),
        Place(
            graph(
                "Duration of a call", "Mean duration by name, for the names that spent most.",
                palette.SECONDS,
                Ask(
                    f"{each(by(NAME, rate(TIME)), by(NAME, rate(CALLS)))}"
                    f" and on ({NAME}) {MOST}",
                    LEGEND,
                ),
                legend="list",
            ), 6, 9,
        ),
        Place(
            graph(
                "Tokens", "Tokens a second that the chosen spans told of.",
                palette.PLAIN, Ask(by("direction", rate(TOKENS)), "{{direction}}"),
                legend="list", empty="no tokens told",
            ), 6, 9,
        ),
    )  # fmt: skip


def _outcomes() -> tuple[Place, ...]:
    refused = series("wattspan_spans_refused_total")
    drops = series("wattspan_spans_forward_drops_total")
    queue = series("wattspan_spans_forward_queue_bytes")
    colours = {"joined": palette.GOOD, "partial": palette.NOTICE, "late": "yellow"}
    return (
        Place(
            graph(
                "Outcomes",
                "Ended spans a second by what became of them. Only `joined` have all their energy, "
                "and a `duplicate` came again; the reasons are told in the how-to on spans.",
                palette.PER_SECOND, Ask(by("reason", rate(OUTCOMES)), "{{reason}}"),
                stack=True, legend="list", colours=colours,
            ), 8, 8,
        ),
        Place(
            graph(
                "Received, deferred, refused",
                "Spans a second that came in: taken, asked to come again because too many wait for "
                "their energy, and refused, by reason.",
                palette.PER_SECOND,
                Ask(f"sum({rate(series('wattspan_spans_received_total'))})", "received"),
                Ask(f"sum({rate(series('wattspan_spans_deferred_total'))})", "deferred"),
                Ask(by("reason", rate(refused)), "refused: {{reason}}"),
                legend="list",
            ), 8, 8,
        ),
        Place(
            graph(
                "Forwarded to your collector",
                "Spans a second that the collector behind the agent took, those it did not get, "
                "by reason, and those sent again.",
                palette.PER_SECOND,
                Ask(f"sum({rate(series('wattspan_spans_forwarded_total'))})", "forwarded"),
                Ask(f"sum({rate(series('wattspan_spans_forward_repeats_total'))})", "sent again"),
                Ask(by("reason", rate(drops)), "dropped: {{reason}}"),
                legend="list",
            ), 4, 8,
        ),
        Place(
            graph(
                "Waiting for your collector",
                "Bytes of spans that wait to be forwarded, on the ten hosts with most of them.",
                palette.BYTES, Ask(f"topk(10, {by('instance', queue)})", "{{instance}}"),
                legend="none",
            ), 4, 8,
        ),
    )  # fmt: skip
