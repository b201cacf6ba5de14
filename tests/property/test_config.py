"""Any configuration can be written down and read back; no input makes a traceback."""

import string
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from wattspan.config import (
    TABLES,
    Config,
    ConfigSchema,
    FlagValue,
    TunedJobSettings,
    environment_variable,
    load,
)
from wattspan.config.loading import parse_toml
from wattspan.config.settings import SpanFigure
from wattspan.config.tuning_settings import PIPELINE_KEYS, REPLICA_KEY
from wattspan.config.writing import to_toml, value_text
from wattspan.model import Knob
from wattspan.model.settings import Duration, Listen, SettingKey, Size, Table, about, each_key, keys
from wattspan.ports import ConfigError


class Odd(Table, frozen=True):
    """Keys of every kind a plugin may declare."""

    ratio: Annotated[float, about("A number.")] = 0.5
    words: Annotated[tuple[str, ...], about("A list.")] = ()
    labels: Annotated[dict[str, str], about("A table.")] = msgspec.field(default_factory=dict)
    maybe: Annotated[int | None, about("A number or nothing.")] = None
    listen: Annotated[Listen, about("An address.")] = Listen("")
    room: Annotated[Size, about("A size.")] = Size(0)
    mode: Annotated[bool | Literal["auto"], about("A choice.")] = "auto"


SCHEMA = ConfigSchema({**TABLES, "sources.odd": Odd})
NOWHERE = Path("/nonexistent/config.toml")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


TOGETHER: dict[str, st.SearchStrategy[Any]] = {
    "autotune.max_slowdown": st.floats(1e-6, 1),
    "autotune.knobs": st.lists(st.sampled_from(Knob).map(str), min_size=1, unique=True),
    "caps.budget_watts": st.just(0) | st.integers(501, 10**6),
    "caps.reserve_watts": st.integers(0, 500),
    "caps.budget_file": st.just("") | TEXT.map("/{}".format),
    "caps.host_dir": TEXT.map("/{}".format),
    "spans.attributes": st.dictionaries(
        st.sampled_from(get_args(SpanFigure)), st.lists(TEXT.filter(bool), max_size=1), max_size=1
    ),
    "cost.currency": st.text(string.ascii_letters, min_size=1, max_size=12),
    "carbon.intensity": st.none(),
    "fleet.endpoints": st.just([]) | st.just(["https://etcd-1:2379", "http://[::1]"]),
    "fleet.name": st.sampled_from(["", "host-1.example"]),
    "fleet.place": st.sampled_from(["", "row-1", "row-1/rack-3"]),
    "fleet.prefix": TEXT.map("/{}/".format),
    "fleet.user": st.just(""),
    "fleet.password_file": st.just(""),
    "fleet.tls_ca": st.just("") | TEXT.map("/{}".format),
    "fleet.tls_certificate": st.just("") | TEXT.map("/{}".format),
    "fleet.tls_key": st.just(""),
    "carbon.schedule": st.just("") | TEXT.map("/{}".format),
    **{
        f"{table}.{key}": st.just("")
        for table in ("cost", "carbon")
        for key in ("schedule", "url", "query", "file")
        if (table, key) != ("carbon", "schedule")
    },
}
"""Keys whose values must also go together."""


def values(key: SettingKey) -> st.SearchStrategy[Any]:
    """Values of ``key`` as a person might give them, within its bounds."""
    if "duration" in key.kind:
        least, most = Duration.parse(str(key.least)), Duration.parse(str(key.most))
        return st.integers(least, most).map(lambda n: str(Duration(n)))
    if "size" in key.kind:
        least = Size.parse(str(key.least or "0B"))
        most = Size.parse(str(key.most or "1GiB"))
        return st.integers(least, most).map(lambda n: str(Size(n)))
    if "listen" in key.kind:
        return st.sampled_from(["", "127.0.0.1:0", "[::1]:9949", ":80"])
    if '"' in key.kind:
        words = st.sampled_from([w.strip('"') for w in key.kind.split() if w[0] == '"'])
        return words.map(lambda w: w.rstrip(",").strip('"')) | (
            st.booleans() if "true" in key.kind else st.nothing()
        )
    return {
        "whole number": st.integers(int(key.least or 0), int(key.most or 2**53)),
        "number": st.floats(
            None if key.least is None else float(key.least),
            None if key.most is None else float(key.most),
            allow_nan=False,
        ),
        "true or false": st.booleans(),
        "text": TEXT,
        "list of text": st.lists(TEXT, max_size=3),
        "table": st.dictionaries(TEXT, TEXT, max_size=3),
    }[key.kind]


NEEDS = {
    "spans.tls_key": "spans.tls_certificate",
    "spans.tls_client_ca": "spans.tls_certificate",
}
"""Keys that are refused without another one."""


@st.composite
def given_values(draw: st.DrawFn) -> dict[str, FlagValue]:
    flags = {}
    for dotted, key in each_key(SCHEMA.tables):
        if draw(st.booleans()):
            flags[dotted] = FlagValue(
                "--test", draw(TOGETHER[dotted] if dotted in TOGETHER else values(key))
            )
    for dotted, needed in NEEDS.items():
        if dotted in flags and not (flags[needed].value if needed in flags else ""):
            del flags[dotted]
    return flags


def from_flags(flags: dict[str, FlagValue]) -> Config:
    # a text of several readings, such as "true", is taken as text where text is wanted
    return load(None, environ={}, flags=flags, schema=SCHEMA, default=NOWHERE)


@pytest.mark.slow
@given(flags=given_values(), origins=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shown_configuration_reads_back_unchanged(
    flags: dict[str, FlagValue], origins: bool, tmp_path: Path
) -> None:
    config = from_flags(flags)
    path = tmp_path / "shown.toml"
    path.write_text(to_toml(config, origins=origins), newline="")
    again = load(path, environ={}, schema=SCHEMA)
    assert again.plain() == config.plain()
    assert again.tables == config.tables


TRACKING = {"control", "slo", "ttft", "tbt", "engine", "classes"}
"""Keys of a job that are refused without each other."""


@st.composite
def load_tracking(draw: st.DrawFn) -> dict[str, Any]:
    """The keys of a job whose setting follows its load."""
    limits = st.integers(1, 2**63 - 1).map(lambda n: str(Duration(n)))
    names = st.sampled_from(["ttft_p50", "ttft_p999", "tbt_p99"])
    return {
        "kind": "requests",
        "control": "track",
        "slo": draw(st.dictionaries(names, limits, min_size=1)),
        "ttft": draw(TEXT.map("event:{}x".format)),
        "tbt": draw(st.sampled_from(["", "latency", "span:token"])),
        "classes": draw(st.sampled_from(["", "length"])),
        "hosts": 1,
    }


@st.composite
def pipeline(draw: st.DrawFn) -> dict[str, Any]:
    """The keys of a job whose processes are the ranks of a pipeline."""
    named = (*PIPELINE_KEYS, REPLICA_KEY)[: draw(st.sampled_from([3, 4]))]
    return {
        "kind": draw(st.sampled_from(["auto", "steps"])),
        "pipeline": {name: draw(TEXT.filter(bool)) for name in named},
        "work": "",
        "compute": "",
        "hosts": 1,
    }


@st.composite
def jobs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Some keys of some jobs, no two of which are about the same spans."""
    rows = []
    for name in draw(st.lists(TEXT.filter(bool), max_size=4, unique=True)):
        row: dict[str, Any] = {"span": name}
        for key in keys(TunedJobSettings).values():
            if key.name not in TRACKING | {"span", "max_slowdown", "latency", "pipeline"} and draw(
                st.booleans()
            ):
                row[key.name] = draw(values(key))
        if row.get("kind") == "requests":
            row["hosts"] = 1
        if draw(st.booleans()):
            engine = draw(st.sampled_from(["", name])) if row.get("service") else ""
            rows.append({**row, **draw(load_tracking()), "engine": engine, "compute": ""})
            continue
        if draw(st.booleans()):
            row |= draw(pipeline())
        if draw(st.booleans()):
            row["max_slowdown"] = draw(st.floats(1e-6, 1))
        if draw(st.booleans()):
            row["latency"] = str(Duration(draw(st.integers(0, 2**63 - 1))))
        rows.append(row)
    return rows


def file_of(rows: list[dict[str, Any]], array: str = "autotune.job") -> str:
    return "\n".join(
        "\n".join([f"[[{array}]]", *(f"{key} = {value_text(each)}" for key, each in row.items())])
        for row in rows
    )


@pytest.mark.slow
@given(rows=jobs(), origins=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arrays_of_tables_round_trip(
    rows: list[dict[str, Any]], origins: bool, tmp_path: Path
) -> None:
    path = tmp_path / "jobs.toml"
    clocks = '[autotune]\nknobs = ["gpu_clock"]\n' if any("pipeline" in row for row in rows) else ""
    path.write_text(clocks + file_of(rows), newline="")
    config = load(path, environ={}, schema=SCHEMA)
    shown = config.plain()["autotune"]["job"]
    assert [
        {key: job[key] for key in row if key not in {"latency", "slo"}}
        for row, job in zip(rows, shown, strict=True)
    ] == [
        {key: value for key, value in row.items() if key not in {"latency", "slo"}} for row in rows
    ]
    path.write_text(to_toml(config, origins=origins), newline="")
    assert load(path, environ={}, schema=SCHEMA).tables == config.tables


@pytest.mark.slow
@given(flags=given_values())
def test_environment_and_flags_are_equivalent(flags: dict[str, FlagValue]) -> None:
    texts = {dotted: flag for dotted, flag in flags.items() if isinstance(flag.value, str)}
    assume(not any("\0" in str(flag.value) for flag in texts.values()))  # no variable holds it
    environ = {environment_variable(dotted): str(flag.value) for dotted, flag in texts.items()}
    by_variable = load(None, environ=environ, schema=SCHEMA, default=NOWHERE)
    assert by_variable.plain() == from_flags(texts).plain()


def told(action: Callable[[], object]) -> str:
    """Message of a ConfigError; empty without an error. Any other exception passes."""
    try:
        action()
    except ConfigError as error:
        return str(error)
    return ""


TOML_VALUES = st.recursive(
    st.none().map(lambda _: "1979-05-27T07:32:00Z")
    | st.booleans().map(lambda b: str(b).lower())
    | st.integers().map(str)
    | st.floats().map(lambda f: repr(f))
    | st.from_regex(r'"[a-z0-9:. \[\]%-]{0,12}"', fullmatch=True)
    | st.sampled_from(["9" * 400, "1e999", '"""a\nb"""', "07:32:00", '"\\ud800"', "nan"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda vs: "[" + ", ".join(vs) + "]")
        | inner.map(lambda v: "{x = " + v + "}")
    ),
    max_leaves=4,
)
NAMES = st.sampled_from(
    [*(dotted for dotted, _ in each_key(SCHEMA.tables)), "agent", "sources", "sources.odd",
     "spans.http", "autotune", "autotune.job", "caps.fixed", "caps.priority",
     "exporters.otlp.endpoint", "x", "agent.intervall", '"a\\nb".c']
)  # fmt: skip


@given(entries=st.lists(st.tuples(NAMES, TOML_VALUES), max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_values_raise_no_traceback(
    entries: list[tuple[str, str]], tmp_path: Path
) -> None:
    path = tmp_path / "fuzz.toml"
    path.write_text("\n".join(f"{name} = {value}" for name, value in entries))
    for fault in told(lambda: load(path, environ={}, schema=SCHEMA)).splitlines():
        assert fault.startswith(str(path)), fault
        assert fault.endswith((".", "?")), fault


@given(text=st.text(max_size=60) | st.binary(max_size=60).map(lambda b: b.decode("latin-1")))
def test_arbitrary_text_raises_no_traceback(text: str) -> None:
    sentence = told(lambda: parse_toml(text, Path("x.toml")))
    assert not sentence or sentence.startswith("x.toml:")


@pytest.mark.parametrize("opening", ["[", "{a="])
def test_file_nested_beyond_all_measure_is_refused(opening: str) -> None:
    with pytest.raises(ConfigError):
        parse_toml("a = " + opening * 100_000, Path("x.toml"))


@given(name=TEXT, value=TEXT)
def test_arbitrary_variables_raise_no_traceback(name: str, value: str) -> None:
    environ = {f"WATTSPAN_{name}": value, "WATTSPAN_AGENT_INTERVAL": value}
    sentence = told(lambda: load(None, environ=environ, schema=SCHEMA, default=NOWHERE))
    assert not sentence or sentence.startswith("WATTSPAN_AGENT_INTERVAL: ")


def test_strategy_covers_every_kind_of_key() -> None:
    for key in keys(Odd).values():
        assert isinstance(values(key), st.SearchStrategy)
