"""Kinds of panels, with the settings that all panels of a kind share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from dashboards import palette
from dashboards.sdk import (
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
    build,
    common,
    model,
    prometheus_models,
    prometheus_queries,
    stat,
    statetimeline,
    table,
    timeseries,
    xychart,
    xychart_models,
)

SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")

P = TypeVar("P", stat.Panel, timeseries.Panel)

Steps = Sequence[tuple[float | None, str]]
"""Thresholds: least value and colour of each step; the first value is None."""


LEGEND_WIDTH = 300
"""Pixels of a legend beside its graph, so that long names leave the graph its room."""

NARROWEST = 70
"""Pixels of a table's column that has no width of its own, where there is no room for more."""

ROOM = {palette.SHARE: 0.05, palette.PER_SECOND: 1, palette.BYTES: 1_000_000}
"""Least range of an axis by unit: noise near zero must look like zero."""

FROM_NOTHING = {palette.SHARE, palette.JOULE, palette.SECONDS}
"""Units whose axes show their zero even where figures may be below it."""

UNKNOWN = "–"
"Text of an unknown figure, or of a label that the row does not have."


@dataclass(frozen=True, slots=True)
class Ask:
    """One query of a panel and the legend of its series."""

    expr: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: a label, or the value of the query of this letter."""

    of: str
    title: str
    unit: str = ""
    link: Mapping[str, str] | None = None
    width: int = 0
    steps: Steps = ()
    bar: bool = False
    named: Mapping[str, tuple[str, str]] | None = None  # text and colour, by value


def link(title: str, uid: str, **values: str) -> dict[str, str]:
    """A data link to another dashboard with the time and the variables kept and ``values`` set."""
    kept = "${datasource:queryparam}&${job:queryparam}&${__url_time_range}"
    chosen = "".join(f"&var-{name}={value}" for name, value in values.items())
    return {"title": title, "url": f"/d/{uid}?{kept}{chosen}"}


def cell(label: str) -> str:
    """The value of ``label`` in the row or series that is clicked, for a URL."""
    return f"${{__data.fields.{label}:percentencode}}"


def series_label(label: str) -> str:
    """The value of ``label`` of the graph's series that is clicked, for a URL."""
    return f"${{__field.labels.{label}:percentencode}}"


def stat_panel(
    title: str,
    says: str,
    unit: str,
    *asks: Ask,
    steps: Steps = ((None, palette.CALM),),
    spark: bool = True,
    decimals: int | None = None,
    empty: str = "unknown",
    names: bool = False,
    colours: Mapping[str, str] | None = None,
    maps: Mapping[str, tuple[str, str]] | None = None,
    links: Iterable[Mapping[str, str]] = (),
) -> stat.Panel:
    """One figure, or one for each series. ``names`` replaces the names of the series."""
    text = common.BigValueTextMode.NAME if names else common.BigValueTextMode.AUTO
    panel: stat.Panel = (
        _common(stat.Panel(), title, says, unit, asks, instant=not spark)
        .graph_mode(common.BigValueGraphMode.AREA if spark else common.BigValueGraphMode.NONE)
        .color_mode(common.BigValueColorMode.VALUE)
        .text_mode(text)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
        .thresholds(_steps(steps))
        .color_scheme(build.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .no_value(empty)
    )
    if decimals is not None:
        panel = panel.decimals(decimals)
    if maps:
        panel = panel.mappings([_value_map(maps)])
    if links:
        panel = panel.data_links([_data_link(one) for one in links])
    return _coloured(panel, colours or {})


def graph(
    title: str,
    says: str,
    unit: str,
    *asks: Ask,
    stack: bool = False,
    bars: bool = False,
    stepped: bool = False,
    steps: Steps = (),
    legend: str = "table",
    calcs: Sequence[str] = (),
    colours: Mapping[str, str] | None = None,
    dashed: Sequence[str] = (),
    least: float | None = 0,
    most: float | None = None,
    links: Iterable[Mapping[str, str]] = (),
    empty: str = "",
    band: tuple[str, str] | None = None,
) -> timeseries.Panel:
    """Figures over time. ``dashed`` names the series that are limits rather than readings."""
    calcs = calcs or (("mean",) if stack else ("mean", "lastNotNull"))
    panel: timeseries.Panel = (
        _common(timeseries.Panel(), title, says, unit, asks)
        .color_scheme(build.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
        .line_width(1 if stack else 2)
        .fill_opacity(80 if stack else 60 if bars else 8)
        .show_points(common.VisibilityMode.NEVER)
        .axis_border_show(False)
        .legend(_legend(legend, calcs))
        .tooltip(
            VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
    )
    if stack:
        panel = panel.stacking(StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if bars:
        panel = panel.draw_style(common.GraphDrawStyle.BARS)
    if stepped:
        panel = panel.line_interpolation(common.LineInterpolation.STEP_AFTER)
    if steps:
        dashes = common.GraphThresholdsStyleConfig(common.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds(_steps(steps)).thresholds_style(_built(dashes))
    if unit in ROOM and most is None:
        panel = panel.axis_soft_max(ROOM[unit])
    if least is not None:
        panel = panel.min(least)
    elif unit in FROM_NOTHING:
        panel = panel.axis_soft_min(0)
    if most is not None:
        panel = panel.max(most)
    if links:
        panel = panel.data_links([_data_link(one) for one in links])
    if empty:
        panel = panel.no_value(empty)
    if band:
        below, above = band
        panel = panel.override_by_name(
            above,
            [
                model.DynamicConfigValue("custom.fillBelowTo", below),
                model.DynamicConfigValue("custom.fillOpacity", 15),
            ],
        )
    for name in dashed:
        style = {"fill": "dash", "dash": [8, 6]}
        panel = panel.override_by_regexp(
            name,
            [
                model.DynamicConfigValue("custom.lineStyle", style),
                model.DynamicConfigValue("custom.fillOpacity", 0),
            ],
        )
    return _coloured(panel, colours or {})


def listing(
    title: str,
    says: str,
    columns: Sequence[Column],
    *asks: Ask,
    sort: str = "",
    rising: bool = False,
    empty: str = "none",
) -> table.Panel:
    """A table of values at the end of the range: one row for each set of labels."""
    panel: table.Panel = (
        _common(table.Panel(), title, says, "", asks, instant=True, tables=True)
        .cell_height(common.TableCellHeight.SM)
        .min_width(NARROWEST)
        .show_header(True)
        .no_value(empty)
    )
    if sort:
        first = common.TableSortByFieldState(display_name=sort, desc=not rising)
        panel = panel.sort_by([_built(first)])
    titles = {_field(column.of, len(asks)): column.title for column in columns}
    for transformation in _in_columns(titles):
        panel = panel.with_transformation(transformation)
    for column in columns:
        panel = panel.override_by_name(column.title, list(_properties(column)))
    return panel


def states(
    title: str,
    says: str,
    numbered: Mapping[str, tuple[str, str]],
    *asks: Ask,
) -> statetimeline.Panel:
    """State timeline: values are numbers, named and coloured by ``numbered``."""
    panel: statetimeline.Panel = (
        _common(statetimeline.Panel(), title, says, "", asks)
        .mappings([_value_map(numbered)])
        .color_scheme(build.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .show_value(common.VisibilityMode.AUTO)
        .merge_values(True)
        .row_height(0.8)
        .fill_opacity(80)
        .line_width(0)
        .legend(_legend("list", ()))
        .tooltip(VizTooltipOptions().mode(common.TooltipDisplayMode.SINGLE))
    )
    return panel


def scatter(
    title: str,
    says: str,
    x: tuple[str, str],
    y: tuple[str, str],
    labels: Sequence[str],
    *asks: Ask,
) -> xychart.Panel:
    """Points, named by ``labels``: the first query over the second. Axes are (title, unit)."""
    panel: xychart.Panel = (
        _common(xychart.Panel(), title, says, "", asks, instant=True, tables=True)
        .mapping(xychart_models.SeriesMapping.AUTO)
        .show(xychart_models.XYShowMode.POINTS)
        .point_size(xychart.XychartFieldConfigPointSize().fixed(12))
        .color_scheme(build.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
        .legend(_legend("list", ()))
        .tooltip(VizTooltipOptions().mode(common.TooltipDisplayMode.SINGLE))
        .min(0)
    )
    titles = {"Value #A": x[0], "Value #B": y[0], **{label: label for label in labels}}
    split = model.DataTransformerConfig(
        "partitionByValues",
        options={"fields": list(labels), "keepFields": False, "naming": {"separator2": "/"}},
    )
    for transformation in (*_in_columns(titles), split):
        panel = panel.with_transformation(transformation)
    for name, unit in (x, y):
        properties = [
            model.DynamicConfigValue("unit", unit),
            model.DynamicConfigValue("custom.axisLabel", name),
        ]
        if name == y[0]:  # points are named by their second figure, which is the same for all
            properties.append(model.DynamicConfigValue("displayName", "${__series.name}"))
        panel = panel.override_by_name(name, properties)
    return panel


# --------------------------------------------------------------------- components


def _built(value: Any) -> Any:
    """``value`` where the SDK asks for a builder of it."""
    return SimpleNamespace(build=lambda: value)


def _common(
    panel: Any,
    title: str,
    says: str,
    unit: str,
    asks: Sequence[Ask],
    instant: bool = False,
    tables: bool = False,
) -> Any:
    panel = panel.title(title).description(says).datasource(SOURCE)
    if unit:
        panel = panel.unit(unit)
    for place, ask in enumerate(asks):
        panel = panel.with_target(query(ask, chr(ord("A") + place), instant, tables))
    return panel


def query(ask: Ask, ref: str, instant: bool = False, tables: bool = False) -> Any:
    target = prometheus_queries.Dataquery().expr(ask.expr).ref_id(ref).datasource(SOURCE)
    target = target.editor_mode(prometheus_models.QueryEditorMode.CODE)
    target = target.legend_format(ask.legend or "__auto")
    target = target.instant() if instant else target.range()
    if tables:
        target = target.format(prometheus_models.PromQueryFormat.TABLE)
    return target.exemplar(True) if ask.exemplars else target


def _field(of: str, queries: int) -> str:
    """Grafana's column name of a label, or of the value of a query by its letter."""
    if len(of) > 1:
        return of
    return f"Value #{of}" if queries > 1 else "Value"


def _in_columns(titles: Mapping[str, str]) -> tuple[Any, Any]:
    """Join the rows of all queries and keep these columns, in this order."""
    places = {
        "includeByName": dict.fromkeys(titles, True),
        "indexByName": {field: place for place, field in enumerate(titles)},
        "renameByName": dict(titles),
    }
    return (
        model.DataTransformerConfig("merge", options={}),
        model.DataTransformerConfig("organize", options=places),
    )


def _steps(steps: Steps) -> Any:
    built = [model.Threshold(value=value, color=colour) for value, colour in steps]
    return build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(built)


def _legend(kind: str, calcs: Sequence[str]) -> Any:
    """``table`` next to the graph, ``list`` below it, ``none``."""
    if kind == "none":
        return VizLegendOptions().show_legend(False)
    if kind == "list":
        shown = VizLegendOptions().display_mode(common.LegendDisplayMode.LIST)
        return shown.placement(common.LegendPlacement.BOTTOM).show_legend(True).calcs([])
    shown = VizLegendOptions().display_mode(common.LegendDisplayMode.TABLE).show_legend(True)
    shown = shown.placement(common.LegendPlacement.RIGHT).width(LEGEND_WIDTH).calcs(list(calcs))
    return shown.sort_by("Mean").sort_desc(True) if "mean" in calcs else shown


def _coloured(panel: P, colours: Mapping[str, str]) -> P:
    for name, colour in colours.items():
        fixed = {"mode": "fixed", "fixedColor": colour}
        override = panel.override_by_regexp if name.startswith("/") else panel.override_by_name
        panel = override(name, [model.DynamicConfigValue("color", fixed)])
    return panel


def _value_map(names: Mapping[str, tuple[str, str]]) -> Any:
    return model.ValueMap(
        options={
            value: model.ValueMappingResult(text=text, color=colour, index=place)
            for place, (value, (text, colour)) in enumerate(names.items())
        }
    )


def _data_link(target: Mapping[str, str]) -> Any:
    return _built(dict(target))


def _properties(column: Column) -> Iterable[Any]:
    value = model.DynamicConfigValue
    yield value("noValue", UNKNOWN)
    if column.unit:
        yield value("unit", column.unit)
    if column.width:
        yield value("custom.width", column.width)
    if column.link:
        yield value("links", [dict(column.link)])
    if column.bar:
        yield value("custom.cellOptions", {"type": "gauge", "mode": "basic"})
        yield value("min", 0)
        if column.unit == palette.SHARE:
            yield value("max", 1)
        yield value("color", {"mode": "fixed", "fixedColor": palette.CALM})
    if column.steps:
        steps = [{"value": at, "color": colour} for at, colour in column.steps]
        yield value("thresholds", {"mode": "absolute", "steps": steps})
        yield value("color", {"mode": "thresholds"})
        yield value("custom.cellOptions", {"type": "color-text"})
    if column.named:
        options = {
            of: {"text": text, "color": colour, "index": place}
            for place, (of, (text, colour)) in enumerate(column.named.items())
        }
        yield value("mappings", [{"type": "value", "options": options}])
        yield value("custom.cellOptions", {"type": "color-text"})
