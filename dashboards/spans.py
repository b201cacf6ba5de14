"""Spans: joules per call and per token, and the traces behind them."""

from __future__ import annotations

from typing import Any

from dashboards import engines, palette, uids
from dashboards.layout import HOSTS, JOB, Chosen, Place, Row, dashboard
from dashboards.panels import Ask, Column, cell, graph, link, listing, scatter, stat_panel
from dashboards.promql import among, by, each, most, rate, rest, series, spent, top
from dashboards.shared import SHARE_STEPS, TYPES, provenance

TOP, LISTED = 10, 50
NAME = "service_name, span_name"
ONE = f"instance, owner, {NAME}"
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
STATIC = series("wattspan_span_static_energy_joules_total", *SPAN)
DYNAMIC = series("wattspan_span_dynamic_energy_joules_total", *SPAN)
OUTCOMES = series("wattspan_span_outcomes_total")
ENDED = series("wattspan_span_outcomes_total", 'reason!="duplicate"')  # not a separate span
JOINED = series("wattspan_span_outcomes_total", 'reason="joined"')

MODEL_ENERGY = series("wattspan_gen_ai_token_energy_joules_total", SERVICE)
MODEL_TOKENS = series("wattspan_gen_ai_tokens_total", SERVICE)
MODEL_REQUESTS = series("wattspan_gen_ai_requests_total", SERVICE)
UNMETERED = series("wattspan_gen_ai_unmetered_requests_total", SERVICE)
MODEL_BUCKETS = series("wattspan_gen_ai_request_energy_joules_bucket", SERVICE)

SPLIT = f"({by(NAME, spent(STATIC))} + {by(NAME, spent(DYNAMIC))})"

MOST = most(TOP, NAME, ENERGY)

ALL_OVER_MADE = "all their energy, including that of input, over the produced tokens (`output`)"


def document() -> dict[str, Any]:
    service = Chosen(
        "service", "Service", "Resource attribute `service.name` of the spans.",
        series("wattspan_spans_total"), "service_name", multi=True, all=True,
    )  # fmt: skip
    span = Chosen(
        "span", "Span", "Names of the spans.",
        series("wattspan_spans_total", SERVICE), "span_name", multi=True, all=True,
    )  # fmt: skip
    return dashboard(
        uids.SPANS,
        "Joules of a call, a step, a request or a token, the spans with most energy, and their "
        "traces. Energy is exclusive: at every instant a process's power is divided among its "
        "innermost open spans, so the rows add up.",
        (JOB, HOSTS, service, span, TYPES),
        (
            Row("", (*_headline(), *_costs())),
            Row("Spans", _table()),
            Row("Language models", _models()),
            Row("Serving engines", engines.places()),
            Row("Power", _power()),
            Row("Outcome of spans", _outcomes()),
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
                "Energy of the selected spans over their number, in the displayed time range: one "
                "mean over all selected names.",
                palette.JOULE, Ask(each(f"sum({spent(ENERGY)})", f"sum({spent(CALLS)})")),
                spark=False, decimals=1, empty=none,
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Joules per token",
                f"Of the selected spans with token counts: {ALL_OVER_MADE}, in the range.",
                palette.JOULE,
                Ask(each(
                    f"sum({by(ONE, spent(ENERGY))} and on ({ONE}) {by(ONE, spent(MADE))})",
                    f"sum({spent(MADE)})",
                )),
                spark=False, decimals=1, empty="no token counts",
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Calls per second", "Ended spans per second with known energy.",
                palette.PER_SECOND, Ask(f"sum({rate(CALLS)})"), empty=none,
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Outside spans",
                "Part of the services' energy in the range without any open span. A large part "
                "means work that is not instrumented.",
                palette.SHARE, Ask(f"{outside} / ({outside} + {inside})"),
                spark=False, decimals=1, empty=none,
                steps=((None, palette.GOOD), (0.2, palette.NOTICE), (0.5, palette.BAD)),
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Without complete energy",
                "Part of all ended spans of the range without completely known energy, by the "
                "reason below; duplicates count once. All services: the sender of an unjoined "
                "span is not distinguished.",
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
                "Energy of a span's name over its calls, for the ten names with most energy over "
                "the range. Diamonds are single spans by their energy on one device type; each "
                "links to its trace, if the data source has a trace link and Prometheus keeps "
                "exemplars.",
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
                f"Of spans with token counts (`gen_ai.usage.*`): {ALL_OVER_MADE}.",
                palette.JOULE,
                Ask(
                    f"{each(by(NAME, rate(ENERGY)), by(NAME, rate(MADE)))} and on ({NAME}) {MOST}",
                    LEGEND,
                ),
                empty="no token counts",
            ), 12, 10,
        ),
    )  # fmt: skip


def _table() -> tuple[Place, ...]:
    return (
        Place(
            listing(
                "Spans with most energy",
                "Each name over the displayed time range: energy and its part of all spans' "
                "energy, the static part of its GPU energy (a lower bound while the static power "
                "is not fitted or configured), calls, joules per call, mean duration, mean power "
                "of a call (joules over its duration: below the process's power where spans "
                "overlap), joules per produced "
                f"token; the {LISTED} names with most energy. A service links to its tuning, a "
                f"span "
                "to itself alone.",
                (
                    Column("service_name", "Service", link=link(
                        "Tuning of this span", uids.AUTOTUNER,
                        tuned=f"{cell('Service')}%2F{cell('Span')}",
                    )),
                    Column("span_name", "Span", link=link(
                        "Only this span", uids.SPANS,
                        service=cell("Service"), span=cell("Span"),
                    )),
                    Column("A", "Energy", palette.JOULE, width=90),
                    Column("B", "Share", palette.SHARE, width=110, bar=True),
                    Column("C", "Static", palette.SHARE, width=110, bar=True),
                    Column("D", "Calls", palette.PLAIN, width=80),
                    Column("E", "J per call", palette.JOULE, width=95),
                    Column("F", "Duration", palette.SECONDS, width=90),
                    Column("G", "Power", palette.WATT, width=80),
                    Column("H", "J per token", palette.JOULE, width=95),
                ),
                _listed(by(NAME, spent(ENERGY))),
                _listed(f"{by(NAME, spent(ENERGY))} / scalar(sum({spent(ENERGY)}))"),
                _listed(f"{by(NAME, spent(STATIC))} / ({SPLIT} > 0)"),
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


def _quantile(level: float) -> str:
    return f"histogram_quantile({level}, {by('model, le', rate(MODEL_BUCKETS))})"


def _models() -> tuple[Place, ...]:
    typed, model = "model, token_type", "model"
    none = "no requests to language models"
    return (
        Place(
            graph(
                "Joules per token, by model",
                "GPU energy of the prompt (`input`) and of generated tokens (`output`), each over "
                "its tokens. The energy of an engine is divided among its concurrent requests.",
                palette.JOULE,
                Ask(
                    each(by(typed, rate(MODEL_ENERGY)), by(typed, rate(MODEL_TOKENS))),
                    "{{model}}: {{token_type}}",
                ),
                empty=none,
            ), 6, 9,
        ),
        Place(
            graph(
                "Joules per request, by model",
                "GPU energy of a request: mean, median and 95th percentile. The percentiles are "
                "interpolated within the buckets of the histogram.",
                palette.JOULE,
                Ask(
                    each(by(model, rate(MODEL_ENERGY)), by(model, rate(MODEL_REQUESTS))),
                    "{{model}}: mean",
                ),
                Ask(_quantile(0.5), "{{model}}: median"),
                Ask(_quantile(0.95), "{{model}}: p95"),
                empty=none,
            ), 6, 9,
        ),
        Place(
            graph(
                "Division of the energy",
                "Requests per second whose energy was divided by the learned energy of tokens "
                "(`model`), or by token counts or common energy of pooled models (`tokens`).",
                palette.PER_SECOND,
                Ask(by("division", rate(MODEL_REQUESTS)), "{{division}}"),
                empty=none,
            ), 6, 9,
        ),
        Place(
            graph(
                "Requests without known energy",
                "Requests per second of callers of a model elsewhere (`client`), and of engines "
                "without known energy of a GPU for them (`engine`). No other panel has them or "
                "their tokens.",
                palette.PER_SECOND,
                Ask(by("role, model", rate(UNMETERED)), "{{role}}: {{model}}"),
                empty="none",
            ), 6, 9,
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
                "Power of the names with most energy over the range, of all other selected spans, "
                "and of the services without an open span. A span counts when it has ended and "
                "settled, so a long one shows at its end.",
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
                "Duration of a call", "Mean duration by name, for the names with most energy.",
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
                "Tokens", "Tokens per second reported by the selected spans.",
                palette.PLAIN, Ask(by("direction", rate(TOKENS)), "{{direction}}"),
                legend="list", empty="no token counts",
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
                "Ended spans per second by outcome. Only `joined` have all their energy, and a "
                "`duplicate` was received again; the how-to on spans explains the reasons.",
                palette.PER_SECOND, Ask(by("reason", rate(OUTCOMES)), "{{reason}}"),
                stack=True, legend="list", colours=colours,
            ), 8, 8,
        ),
        Place(
            graph(
                "Received, deferred, refused",
                "Received spans per second: accepted, deferred because too many wait for their "
                "energy, and refused, by reason.",
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
                "Spans per second accepted by the collector behind the agent, undelivered ones by "
                "reason, and repeated ones.",
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
