from pathlib import Path
from typing import Annotated, Literal

import pytest

from wattspan.config import (
    TABLES,
    AgentSettings,
    Config,
    ConfigSchema,
    FlagValue,
    SettingOrigin,
    environment_variable,
    load,
)
from wattspan.config.writing import to_toml
from wattspan.emulation.control import HOST_VARIABLE
from wattspan.model.settings import Listen, Table, about
from wattspan.ports import ConfigError


class Rapl(Table, frozen=True):
    """A source's table."""

    enabled: Annotated[bool | Literal["auto"], about("Whether.")] = "auto"
    reader: Annotated[Literal["powercap", "pyrapl"], about("Which.")] = "powercap"


class Prometheus(Table, frozen=True):
    """An exporter's table."""

    listen: Annotated[Listen, about("Where.")] = Listen("127.0.0.1:9949")
    allow: Annotated[tuple[str, ...], about("Who.")] = ()


SCHEMA = ConfigSchema({**TABLES, "sources.rapl": Rapl, "exporters.prometheus": Prometheus})
NOWHERE = Path("/nonexistent/config.toml")


def read(
    text: str = "",
    tmp_path: Path | None = None,
    environ: dict[str, str] | None = None,
    flags: dict[str, FlagValue] | None = None,
    schema: ConfigSchema = SCHEMA,
) -> Config:
    path = None
    if tmp_path is not None:
        path = tmp_path / "config.toml"
        path.write_text(text)
    return load(path, environ=environ or {}, flags=flags, schema=schema, default=NOWHERE)


def faults(text: str, tmp_path: Path, **given: dict[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, tmp_path, given.get("environ"))
    assert caught.value.exit_code == 2
    return [line.removeprefix(f"{tmp_path}/") for line in str(caught.value).splitlines()]


# ---------------------------------------------------------------------- where values come from


def test_defaults_apply_without_configuration() -> None:
    config = read()
    assert str(config.agent.interval) == "auto"
    assert config.sources["rapl"] == Rapl()
    assert config.path is None
    assert config.origins == {}


def test_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    text = '[agent]\nhistory = "1m"\ninterval = "1s"\nlog_level = "error"\n'
    environ = {"WATTSPAN_AGENT_HISTORY": "2m", "WATTSPAN_AGENT_INTERVAL": "2s"}
    config = read(text, tmp_path, environ, {"agent.history": FlagValue("--history", "3m")})
    agent = config.agent
    assert [str(agent.history), str(agent.interval), agent.log_level] == ["3m", "2s", "error"]
    assert [config.origins[f"agent.{key}"] for key in ("history", "interval", "log_level")] == [
        SettingOrigin("flag", "--history"),
        SettingOrigin("environment", "WATTSPAN_AGENT_INTERVAL"),
        SettingOrigin("file", f"{tmp_path}/config.toml:4"),
    ]
    assert config.origin("agent.run_dir") == SettingOrigin("default")


def test_plugins_table_is_configured_like_the_agents_own(tmp_path: Path) -> None:
    environ = {"WATTSPAN_EXPORTERS_PROMETHEUS_ALLOW": "a, b"}
    config = read('[sources.rapl]\nreader = "pyrapl"', tmp_path, environ)
    assert config.sources["rapl"] == Rapl(reader="pyrapl")
    assert config.exporters["prometheus"] == Prometheus(allow=("a", "b"))


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("auto", "auto"), ('"auto"', "auto")]
)
def test_environment_speaks_as_the_file_does(text: str, value: object) -> None:
    config = read(environ={"WATTSPAN_SOURCES_RAPL_ENABLED": text})
    assert config.sources["rapl"] == Rapl(enabled=value)  # type: ignore[arg-type]


def test_number_in_the_environment_stays_text_where_text_is_wanted() -> None:
    assert read(environ={"WATTSPAN_EMULATION_PROFILE": "42"}).emulation.profile == "42"


def test_unknown_variable_is_a_warning_that_names_the_nearest() -> None:
    config = read(environ={"WATTSPAN_AGENT_INTERVALL": "1s", "PATH": "/bin"})
    assert config.warnings == (
        "WATTSPAN_AGENT_INTERVALL is ignored: no such setting. "
        "Did you mean WATTSPAN_AGENT_INTERVAL?",
    )


def test_variables_of_options_and_of_broken_plugins_are_no_strangers() -> None:
    schema = ConfigSchema(TABLES, frozenset({"sources.odd-one"}))
    environ = {"WATTSPAN_CONFIG": "x", "WATTSPAN_DEBUG": "1", "WATTSPAN_SOURCES_ODD_ONE_KEY": "x"}
    assert read(environ=environ, schema=schema).warnings == ()


def test_variables_of_applications_and_emulated_hosts_are_no_strangers() -> None:
    names = ("WATTSPAN_RUN_DIR", "WATTSPAN_DISABLED", HOST_VARIABLE)
    assert read(environ=dict.fromkeys(names, "x")).warnings == ()


def test_name_of_a_variable() -> None:
    assert environment_variable("sources.my-gpu.rate") == "WATTSPAN_SOURCES_MY_GPU_RATE"


def test_default_file_may_be_absent_and_a_named_one_may_not(tmp_path: Path) -> None:
    assert read().path is None
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "absent.toml", environ={})


def test_default_file_is_read_if_present(tmp_path: Path) -> None:
    default = tmp_path / "config.toml"
    default.write_text("[processes]\ntop = 7")
    assert load(None, environ={}, default=default).processes.top == 7


# -------------------------------------------------------------------------------- errors


def test_all_errors_are_reported_in_file_order(tmp_path: Path) -> None:
    text = """\
interval = "1s"
[agent]
history = 3
[processes]
idle = "propotional"
[exporters.odd]
endpoint = ""
[sources.raple]
"""
    environ = {"WATTSPAN_PROCESSES_TOP": "many"}
    assert [fault.partition(": ")[0] for fault in faults(text, tmp_path, environ=environ)] == [
        "config.toml:1",
        "config.toml:3",
        "config.toml:5",
        "config.toml:6",
        "config.toml:8",
        "WATTSPAN_PROCESSES_TOP",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[agent]\nintervall = 1", "2: Unknown key 'agent.intervall': did you mean 'interval'?"),
        ('interval = "1s"', "1: Unknown key 'interval': it belongs under [agent]."),
        ("[agnet]", "1: Unknown table 'agnet': did you mean [agent]?"),
        ("[sources.rapll]", "1: Unknown table 'sources.rapll': did you mean [sources.rapl]?"),
        ("[sources.zz]", "1: Unknown table 'sources.zz': installed sources: rapl."),
        ("[source.rapl]", "1: Unknown table 'source': did you mean [sources]?"),
        ("agent = 3", "1: Bad value for 'agent': expected a table, [agent]."),
        ("sources = 3", "1: Bad value for 'sources': expected tables, [sources.NAME]."),
        ("sources.rapl = 3", "1: Bad value for 'sources.rapl': expected a table, [sources.rapl]."),
        ("[[agent]]", "1: Bad value for 'agent': expected a table, [agent]."),
        (
            '[exporters.prometheus]\nlisten = "here"',
            "2: Bad value for 'exporters.prometheus.listen': "
            '"here" names no port; write "HOST:PORT".',
        ),
        ("\n[a\n", "2: not TOML: "),
        ("a = 1\na = 2", "2: not TOML: cannot overwrite a value"),
        ("a = [", "1: not TOML: "),
    ],
)
def test_fault_names_file_line_cause_and_remedy(text: str, sentence: str, tmp_path: Path) -> None:
    (fault,) = faults(text, tmp_path)
    assert fault.startswith(f"config.toml:{sentence}")


def test_disabled_plugin_checks_skip_only_plugin_settings(
    tmp_path: Path,
) -> None:
    schema = ConfigSchema(checks_plugins=False)
    config = read(
        "[sources.x]\na = 1\n[exporters.y]\nb = 2\n",
        tmp_path,
        environ={"WATTSPAN_SOURCES_X_A": "1"},
        flags={"exporters.y.b": FlagValue("--set exporters.y.b", "3")},
        schema=schema,
    )
    assert (config.warnings, config.sources, config.exporters) == ((), {}, {})
    with pytest.raises(ConfigError) as caught:
        read(
            "[agnet]\n[caps]\nflor = 1\n",
            tmp_path,
            flags={"caps.x": FlagValue("--set caps.x", "1")},
            schema=schema,
        )
    assert len(str(caught.value).splitlines()) == 3


def test_table_of_a_broken_plugin_is_not_an_error(tmp_path: Path) -> None:
    schema = ConfigSchema(TABLES, frozenset({"sources.rapl"}))
    config = read("[sources.rapl]\nanything = 1", tmp_path, schema=schema)
    assert "rapl" not in config.sources


def test_invalid_utf8_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b"[agent]\n# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.toml:2: not UTF-8"):
        load(path, environ={})


def test_flag_with_an_unknown_key_is_an_error_of_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"^--set agent\.nterval: .* did you mean 'interval'\?$"):
        read(flags={"agent.nterval": FlagValue("--set agent.nterval", "1s")})


def test_flag_of_an_unknown_table_is_a_fault_of_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"^--set agnet\.x: Unknown table 'agnet'"):
        read(flags={"agnet.x": FlagValue("--set agnet.x", "1")})


# ------------------------------------------------------------------------------ written down


def test_origins_stand_behind_the_values(tmp_path: Path) -> None:
    shown = to_toml(read("[processes]\ntop = 9", tmp_path), origins=True).splitlines()
    line = next(line for line in shown if line.startswith("top"))
    assert line.split() == ["top", "=", "9", "#", f"{tmp_path}/config.toml:2"]


def test_configuration_with_faults_is_loaded_without_the_values_at_fault(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        '[agent]\ninterval = "soon"\nlog_level = "debug"\n'
        '[caps]\nbudget_file = "here"\nfloor_watts = 7\n'
        '[[autotune.job]]\nspun = "x"\n'
    )
    faults: list[str] = []
    config = load(path, environ={}, faults=faults)
    assert len(faults) == 3, faults
    assert (config.agent.interval, config.agent.log_level) == (AgentSettings().interval, "debug")
    assert (config.caps.budget_file, config.caps.floor_watts) == ("", 7)
    assert config.autotune.job == ()
    with pytest.raises(ConfigError):
        load(path, environ={})


def test_invalid_toml_leaves_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[agent")
    faults: list[str] = []
    assert load(path, environ={}, faults=faults).agent == AgentSettings()
    assert len(faults) == 1
