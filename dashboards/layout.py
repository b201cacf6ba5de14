"""A dashboard: its variables, its links to the others, and its panels in their places."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards.panels import SOURCE, Ask, query
from dashboards.sdk import JSONEncoder, build, model
from dashboards.uids import TITLES

TAG = "wattspan"
COLUMNS = 24


@dataclass(frozen=True, slots=True)
class Place:
    """A panel and its size in the grid."""

    panel: Any
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading; the first row of a dashboard has none."""

    title: str
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A variable that the reader chooses, from the values of ``label`` in ``selector``."""

    name: str
    title: str
    says: str
    selector: str
    label: str
    multi: bool = False
    all: bool = False
    default: str = ""
    shown_as: str = ""  # a label of the same series, shown in place of the value


@dataclass(frozen=True, slots=True)
class Marks:
    """An annotation: a mark on every graph where ``expr`` has a value above zero."""

    name: str
    expr: str
    title: str
    text: str
    tags: str
    colour: str


JOB = Chosen(
    "job", "Scrape job", "Prometheus' job that scrapes the agents.",
    "wattspan_host_info", "job", multi=True, all=True,
)  # fmt: skip
HOST_SELECTOR = 'wattspan_host_info{job=~"$job"}'
ONE_HOST = Chosen(
    "instance", "Host", "The agent's address, as Prometheus scrapes it.", HOST_SELECTOR, "instance"
)
HOSTS = Chosen(
    "instance", "Hosts", "The agents' addresses, as Prometheus scrapes them.",
    HOST_SELECTOR, "instance", multi=True, all=True,
)  # fmt: skip


def group_kind(selector: str) -> Chosen:
    """The kind is at first that of users: every process has one, on hosts of any kind."""
    return Chosen(
        "group_kind", "Group kind", "Groups of different kinds overlap: one kind at a time.",
        selector, "group_kind", default="user",
    )  # fmt: skip


def dashboard(
    uid: str,
    says: str,
    variables: Sequence[Chosen],
    rows: Sequence[Row],
    marks: Sequence[Marks] = (),
    since: str = "now-1h",
) -> dict[str, Any]:
    """The dashboard as Grafana stores it."""
    built = model.Dashboard(
        uid=uid,
        title=f"wattspan / {TITLES[uid]}",
        description=says,
        tags=[TAG],
        timezone="browser",
        editable=False,
        graph_tooltip=model.DashboardCursorSync.CROSSHAIR,
        time=model.DashboardDashboardTime(from_val=since, to="now"),
        refresh="30s",
        version=1,
        panels=list(_placed(rows)),
        templating=model.DashboardDashboardTemplating(
            list_val=[_datasource(), *map(_variable, variables)]
        ),
        annotations=model.AnnotationContainer(list_val=[_annotation(one) for one in marks]),
        links=[_link(title, other) for other, title in TITLES.items() if other != uid],
    )
    document: dict[str, Any] = json.loads(json.dumps(built, cls=JSONEncoder))
    return _tidy(document)


def _tidy(document: dict[str, Any]) -> dict[str, Any]:
    """Remove unused defaults of the SDK; links are displayed, not in a menu."""
    for link in (*document["links"], *document["annotations"].get("list", ())):
        link.pop("placement", None)
    for variable in document["templating"]["list"]:
        for key in ("auto", "auto_min", "auto_count"):
            variable.pop(key, None)
    return document


def _placed(rows: Iterable[Row]) -> Iterable[Any]:
    number, y = 0, 0
    for row in rows:
        if row.title:
            number += 1
            place = model.GridPos(x=0, y=y, w=COLUMNS, h=1)
            yield model.RowPanel(title=row.title, id_val=number, grid_pos=place, panels=[])
            y += 1
        x, tallest = 0, 0
        for one in row.places:
            if x + one.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            number += 1
            place = model.GridPos(x=x, y=y, w=one.width, h=one.height)
            yield one.panel.id(number).grid_pos(place).build()
            x, tallest = x + one.width, max(tallest, one.height)
        y += tallest


def _datasource() -> Any:
    return build.DatasourceVariable("datasource").type("prometheus").label("Prometheus").build()


def _variable(chosen: Chosen) -> Any:
    asked, kind = f"label_values({chosen.selector}, {chosen.label})", 1
    if chosen.shown_as:
        asked, kind = f"query_result({chosen.selector})", 3
    variable = (
        build.QueryVariable(chosen.name)
        .label(chosen.title)
        .description(chosen.says)
        .datasource(SOURCE)
        .query({"qryType": kind, "query": asked, "refId": f"variable-{chosen.name}"})
        .definition(asked)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.NATURAL_ASC)
        .multi(chosen.multi)
        .include_all(chosen.all)
    )
    if chosen.shown_as:
        first, second = (f'{label}="(?<{part}>[^"]+)"' for label, part in _parts(chosen))
        variable = variable.regex(f"/{first}.*{second}/")
    if chosen.all:
        everything = model.VariableOption(selected=True, text=["All"], value=["$__all"])
        variable = variable.current(everything).all_value(".*")
    elif chosen.default:
        default = model.VariableOption(selected=True, text=chosen.default, value=chosen.default)
        variable = variable.current(default)
    return variable.build()


def _parts(chosen: Chosen) -> list[tuple[str, str]]:
    """The two labels in the order in which Grafana writes a series: by the alphabet."""
    return sorted([(chosen.label, "value"), (chosen.shown_as, "text")])


def _annotation(marks: Marks) -> Any:
    return (
        build.AnnotationQuery()
        .name(marks.name)
        .datasource(SOURCE)
        .enable(True)
        .icon_color(marks.colour)
        .target(query(Ask(marks.expr), "Marks"))
        .expr(marks.expr)
        .title_format(marks.title)
        .text_format(marks.text)
        .tag_keys(marks.tags)
        .step("")
        .build()
    )


def _link(title: str, uid: str) -> Any:
    return (
        build.DashboardLink(title)
        .type(model.DashboardLinkType.LINK)
        .icon("dashboard")
        .tooltip(f"{title}: the same time, the same hosts")
        .url(f"/d/{uid}")
        .include_vars(True)
        .keep_time(True)
        .build()
    )
