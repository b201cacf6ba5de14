"""Panels of serving engines whose counters of tokens the agent reads."""

from __future__ import annotations

from dashboards import palette
from dashboards.layout import Place
from dashboards.panels import Ask, Column, graph, listing, stat_panel
from dashboards.promql import by, rate, series

ONE = "instance, engine, model"
NAMED = "{{engine}} {{model}} on {{instance}}"
NONE = "no engine with figures"

ENERGY = series("wattspan_gen_ai_engine_energy_joules_total")
TOKENS = series("wattspan_gen_ai_engine_tokens_total")
PREFIX = "wattspan_gen_ai_engine"
IDLE = series("wattspan_gen_ai_engine_idle_ratio")
PAGES = series("wattspan_source_up", 'source=~"engine:.+"')


def places() -> tuple[Place, ...]:
    """Graphs of joules, tokens and waiting, the unreadable pages, and a table of all engines."""
    return (
        Place(
            graph(
                "Joules per token of engines",
                "GPU energy of a token by the engine's own counters, in the last minute or, of "
                "late counters, hour at most. `all` tokens include the time in which the engine "
                "waits for requests; `input` and `output` are without it, and only of engines that "
                "count iterations. Uncertainties are in the table.",
                palette.JOULE,
                Ask(
                    _greatest(f"{ONE}, token_type", series(f"{PREFIX}_token_energy_joules")),
                    f"{{{{token_type}}}}: {NAMED}",
                ),
                empty=NONE,
            ), 12, 9,
        ),
        Place(
            graph(
                "Joules per request of engines",
                "GPU energy of a request in the same time, including that in which the engine "
                "waits for requests.",
                palette.JOULE,
                Ask(_greatest(ONE, series(f"{PREFIX}_request_energy_joules")), NAMED),
                empty=NONE,
            ), 12, 9,
        ),
        Place(
            graph(
                "Tokens of engines",
                "Tokens per second by the engine's own counters, cached prompt tokens included as "
                "far as it counts them. Spans may report the same tokens.",
                palette.PLAIN,
                Ask(
                    by(f"{ONE}, token_type", rate(TOKENS)), f"{{{{token_type}}}}: {NAMED}",
                ),
                legend="list", empty=NONE,
            ), 8, 8,
        ),
        Place(
            graph(
                "Idle share of engines",
                "Part of an engine's GPU energy while it waits for requests.",
                palette.SHARE, Ask(_greatest(ONE, IDLE), NAMED),
                legend="list", most=1, empty=NONE,
            ), 8, 8,
        ),
        Place(
            stat_panel(
                "Unreadable engine pages",
                "Engines whose page the agent cannot read or believe now. Its log, the live page "
                "and `wattspan top` state the reason.",
                palette.PLAIN,
                Ask(f"{by('instance, source', PAGES)} == 0", "{{source}} on {{instance}}"),
                spark=False, names=True, steps=((None, palette.BAD),), empty="none",
            ), 8, 8,
        ),
        _table(),
    )  # fmt: skip


def _table() -> Place:
    figures = ("all", "J/token"), ("input", "J/token in"), ("output", "J/token out")
    columns = [
        Column("engine", "Engine"),
        Column("model", "Model"),
        Column("instance", "Host"),
        Column("A", "Tokens/s", palette.PLAIN, width=85),
        Column("B", "Power", palette.WATT, width=80),
        Column("C", "Idle", palette.SHARE, width=75),
    ]
    asks = [by(ONE, rate(TOKENS)), by(ONE, rate(ENERGY)), _greatest(ONE, IDLE)]
    for way, title in figures:
        typed = f'token_type="{way}"'
        columns.append(Column(_letter(asks), title, palette.JOULE))
        asks.append(_greatest(ONE, series(f"{PREFIX}_token_energy_joules", typed)))
        columns.append(Column(_letter(asks), f"± {way}", palette.JOULE, width=80))
        asks.append(_greatest(ONE, series(f"{PREFIX}_token_energy_uncertainty_joules", typed)))
    columns.append(Column(_letter(asks), "J/request", palette.JOULE))
    asks.append(_greatest(ONE, series(f"{PREFIX}_request_energy_joules")))
    columns.append(Column(_letter(asks), "± request", palette.JOULE, width=90))
    asks.append(_greatest(ONE, series(f"{PREFIX}_request_energy_uncertainty_joules")))
    panel = listing(
        "Engines",
        "Each engine and model now: tokens and GPU power, the part of the energy while it waits, "
        "joules per token and per request, each beside the half-width of its 95 % range (±). "
        "A dash: not known.",
        columns, *map(Ask, asks), sort="Power", empty=NONE,
    )  # fmt: skip
    return Place(panel, 24, 6)


def _letter(asks: list[str]) -> str:
    """The letter of the next query."""
    return chr(ord("A") + len(asks))


def _greatest(labels: str, gauge: str) -> str:
    """A gauge by ``labels``: the others, as its owner, do not change it."""
    return f"max by ({labels}) ({gauge})"
