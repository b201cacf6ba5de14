"""Files written by administrators: the configuration file, variables, options, tariffs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fuzz.registry import target
from fuzz.supply import folder, one_line, told
from wattspan.config import TABLES, Config, ConfigSchema, FlagValue, load
from wattspan.config.loading import parse_toml
from wattspan.footprint.tariff_file import build_schedule
from wattspan.ports import ConfigError
from wattspan.sources.nvml.device import NvmlSettings
from wattspan_exporters.prometheus import PrometheusSettings

_SCHEMA = ConfigSchema(
    {**TABLES, "sources.nvml": NvmlSettings, "exporters.prometheus": PrometheusSettings}
)
_NOWHERE = Path("/nonexistent/config.toml")
_WATCHED = ("wattspan.config", "wattspan.model.settings", "tomllib")
_WORDS = (
    *(b"[agent]", b"[spans]", b"[[autotune.job]]", b"[exporters.prometheus]", b"[caps]"),
    *(b"interval", b"state_dir", b"max_slowdown", b"knobs", b"listen", b"fixed", b"priority"),
    *(b'"100ms"', b"9" * 400, b"1e400", b"inf", b"nan", b"true", b"[[[[", b"{a={", b'"""', b"\\u"),
    *(b"1979-05-27T07:32:00Z", b"= ", b"\n"),
)


def _refused_or(action: Callable[[], object]) -> object | None:
    """Result of ``action``, or None for a plain error message."""
    try:
        return action()
    except ConfigError as error:
        told(error)
        for line in str(error).split("\n"):
            one_line(line, 1500)
        return None


@target(
    "config-file",
    whose="the administrator",
    holds="a configuration, or a line for each fault",
    watched=_WATCHED,
    samples=(
        b'[agent]\ninterval = "100ms"\n[spans]\nhttp = "127.0.0.1:4318"\nunix = true\n',
        b'[autotune]\nmode = "off"\nmax_slowdown = 0.05\nknobs = ["gpu_power"]\n'
        b'[[autotune.job]]\nservice = "trainer"\nspan = "train_step"\n',
        b'[caps]\nbudget_watts = 1200\n[[caps.fixed]]\nknob = "gpu_power"\ndevice = "0"\n'
        b"watts = 300\n",
        b'[cost]\ncurrency = "EUR"\nrate = 0.3\n[exporters.prometheus]\nlisten = "[::1]:9949"\n',
    ),
    words=_WORDS,
)
def config_file(data: bytes) -> None:
    with folder() as path:
        (path / "c.toml").write_bytes(data)
        found = _refused_or(lambda: load(path / "c.toml", environ={}, schema=_SCHEMA))
        assert found is None or isinstance(found, Config)


@target(
    "config-words",
    whose="the user who starts the agent",
    holds="variables and --set options: a configuration, or a line for each fault",
    watched=_WATCHED,
    samples=(
        b"WATTSPAN_AGENT_INTERVAL=1s\0WATTSPAN_SPANS_UNIX=false",
        b"WATTSPAN_AUTOTUNE_KNOBS=gpu_power,cpu_power\0WATTSPAN_AUTOTUNE_JOB=x",
        b"-agent.interval=2s\0-sources.nvml.enabled=auto\0-autotune.job[0].span=x",
        b"WATTSPAN_STORE_MAX_SIZE=64MiB\0-processes.top=[1]",
    ),
    words=(*_WORDS, b"\0", b"WATTSPAN_", b"-agent.", b"\xff"),
)
def config_words(data: bytes) -> None:
    words = [part.partition(b"=") for part in data.split(b"\0") if b"=" in part]
    environ = {
        name.decode("utf-8", "surrogateescape"): value.decode("utf-8", "surrogateescape")
        for name, _, value in words
        if not name.startswith(b"-")
    }
    flags = {
        name[1:].decode("utf-8", "replace"): FlagValue("--set", value.decode("utf-8", "replace"))
        for name, _, value in words
        if name.startswith(b"-")
    }
    found = _refused_or(
        lambda: load(None, environ=environ, flags=flags, schema=_SCHEMA, default=_NOWHERE)
    )
    if isinstance(found, Config):
        for warning in found.warnings:
            one_line(warning, 1500)


@target(
    "tariff",
    whose="the administrator, or a supplier's file",
    holds="a schedule with a rate or none at any time, or a line for each fault",
    watched=("wattspan.footprint", "wattspan.model.settings"),
    samples=(
        b'zone = "Europe/Berlin"\notherwise = 0.3\n[[period]]\nrate = 0.2\nfrom = "22:00"\n'
        b'to = "06:00"\ndays = ["mon-fri"]\n',
        b'zone = "UTC"\n[[period]]\nrate = 1\nseason = ["10-01", "03-31"]\nsince = 2026-01-01\n',
        b'zone = "UTC"\n[[period]]\nrate = 1\nto = "12:00"\n[[period]]\nrate = 2\nfrom = "11:59"\n',
    ),
    words=(
        *(b"[[period]]", b"rate = ", b'"sat-mon"', b'"02-29"', b'"24:00"', b"until = ", b"1e308"),
        *(b"season = ", b'zone = "../../etc/passwd"', b"9" * 400, b"nan", b"\\ud800", b"00:00:00"),
    ),
)
def tariff(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return  # refused where files are read
    found = _refused_or(lambda: build_schedule(parse_toml(text, Path("tariff.toml"))))
    if found is None:
        return
    for second in (0, 951_782_400, 1_761_440_400, 1_774_746_000, 4_102_444_800):
        rate = found.rate(second)  # type: ignore[attr-defined]
        assert rate is None or rate >= 0
