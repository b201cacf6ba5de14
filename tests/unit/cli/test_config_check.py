"""`wattspan config check` describes destinations and opens no connection."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from wattspan.cli import cli
from wattspan.config import TABLES, Config
from wattspan.model.settings import Table, convert, keys
from wattspan.plugins import Plugins, exporter_faults
from wattspan.ports import ConfigError, ExporterContext, ExporterPlugin, WattspanError
from wattspan.testing import ManualClock
from wattspan_exporters import files, otlp

WRONG = """
[spans]
forward = "collector:4318"
forward_headers = "x"

[exporters.otlp]
endpoint = "collector:4318"
headers = "Authorization"
headers_file = "/nowhere"
resource = "team"
metrics = ["hw.nothing", "hw.enrgy"]

[exporters.files]
directory = "/nowhere/files"
metrics = ["hw.nothing"]
"""


def check(tmp_path: Path, text: str) -> tuple[int, list[str]]:
    path = tmp_path / "config.toml"
    path.write_text(text)
    done = CliRunner().invoke(cli, ["config", "check", str(path)], prog_name="wattspan")
    return done.exit_code, done.stderr.splitlines()


def test_config_check_lists_all_faults_of_forwarding(tmp_path: Path) -> None:
    code, said = check(tmp_path, WRONG)
    assert code == 2
    parts = (
        '[spans] forward = "collector:4318" cannot be',
        "[spans] forward_headers, pair 1",
        'No metric is called "hw.nothing", which [exporters.files] metrics names',
        '[exporters.otlp] endpoint = "collector:4318" cannot be',
        "[exporters.otlp] headers, pair 1",
        "Cannot read /nowhere: no such file",
        "[exporters.otlp] resource, pair 1",
        'No metric is called "hw.nothing", which [exporters.otlp] metrics names',
        'No metric is called "hw.enrgy", which [exporters.otlp] metrics names',
    )
    assert [part in line for part, line in zip(parts, said, strict=True)] == [True] * len(parts)
    assert not Path("/nowhere").exists()


def test_config_check_skips_disabled_parts(tmp_path: Path) -> None:
    off = WRONG.replace("[spans]", "[spans]\nenabled = false")
    off = off.replace("endpoint =", "# endpoint =").replace("directory =", "# directory =")
    code, said = check(tmp_path, off)
    assert (code, [line for line in said if "holds a secret" not in line]) == (0, [])


def test_config_check_advises_a_file_for_each_inline_secret(tmp_path: Path) -> None:
    collector = "http://collector:4318"
    secrets = (
        f'[spans]\nforward = "{collector}"\nforward_headers = "a=sesame"\n'
        f'[exporters.otlp]\nendpoint = "{collector}"\nheaders = "b=sesame"\n'
    )
    code, said = check(tmp_path, secrets)
    assert code == 0
    assert [line.rpartition("name that in ")[2] for line in said] == [
        "forward_headers_file.",
        "headers_file.",
    ]
    assert "sesame" not in str(said)


def test_config_check_reads_the_headers_file_of_spans(tmp_path: Path) -> None:
    headers = tmp_path / "headers"
    forward = f'[spans]\nforward = "https://c"\nforward_headers_file = "{headers}"\n'
    assert "no such file" in check(tmp_path, forward)[1][0]
    headers.write_text("not a header: with spaces\n")
    assert f"{headers}, line 1" in check(tmp_path, forward)[1][0]
    headers.write_text("authorization: Bearer abc\n")
    assert check(tmp_path, forward) == (0, [])


def test_every_secret_has_a_setting_for_a_file() -> None:
    tables = {**TABLES, "exporters.otlp": otlp.OtlpSettings}
    for where, table in tables.items():
        known = keys(table)
        for name, key in known.items():
            assert not key.secret or f"{name}_file" in known, f"{where}.{name}"


def test_config_check_accepts_an_unreachable_destination(tmp_path: Path) -> None:
    headers = tmp_path / "headers"
    headers.write_text("x-tenant: a\n")
    right = f"""
    [spans]
    forward = "grpc://collector.invalid:4317"
    [exporters.otlp]
    endpoint = "https://collector.invalid"
    headers_file = "{headers}"
    [exporters.files]
    directory = "{tmp_path}/files"
    """
    assert check(tmp_path, right) == (0, [])
    assert not (tmp_path / "files").exists()


@pytest.mark.parametrize(
    ("plugin", "written", "code"),
    [
        (otlp.plugin, {"endpoint": "collector:4318"}, 2),
        (otlp.plugin, {"endpoint": "http://c", "headers": "Authorization"}, 2),
        (otlp.plugin, {"endpoint": "http://c", "resource": "team"}, 2),
        (otlp.plugin, {"endpoint": "http://c", "metrics": ["hw.nothing"]}, 2),
        (otlp.plugin, {"endpoint": "http://c", "metrics": ["!hw.*"]}, 2),
        (otlp.plugin, {"endpoint": "http://c", "headers_file": "/nowhere"}, 4),
        (otlp.plugin, {"endpoint": "https://c", "tls_ca": "/nowhere"}, 4),
        (files.plugin, {"directory": "/nowhere", "metrics": ["hw.nothing"]}, 2),
        (files.plugin, {"directory": "/nowhere", "metrics": ["!hw.*"]}, 2),
    ],
)
def test_config_check_and_the_agent_report_the_same_faults(
    plugin: ExporterPlugin, written: dict[str, Any], code: int
) -> None:
    settings = convert(written, plugin.settings, "exporters.it")
    with pytest.raises(WattspanError) as refused:
        plugin.open(settings, ExporterContext(ManualClock(), "1", print))
    assert list(plugin.faults(settings)) == str(refused.value).splitlines()
    assert refused.value.exit_code == code


def test_config_check_refuses_invalid_certificates(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("nothing")
    written = {"endpoint": "https://c", "tls_ca": str(path)}
    (said,) = otlp.plugin.faults(convert(written, otlp.plugin.settings, "exporters.otlp"))
    assert "holds no certificate in PEM form" in said


def test_config_check_names_the_command_that_installs_a_missing_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    written = {"directory": "/nowhere", "format": "parquet"}
    settings = convert(written, files.plugin.settings, "exporters.files")
    (said,) = files.plugin.faults(settings)
    assert " install pyarrow`" in said
    with pytest.raises(ConfigError, match="install pyarrow"):
        files.plugin.open(settings, ExporterContext(ManualClock(), "1", print))


# -------------------------------------------------------------------------- of other packages


class Settings(Table, frozen=True):
    """A third-party exporter."""


def told(**hooks: Callable[[Any], Iterable[str]]) -> list[str]:
    plugins = {
        name: ExporterPlugin(Settings, lambda *_: None, faults=faults)
        for name, faults in hooks.items()
    }
    config = Config(exporters={name: Settings() for name in plugins})
    return list(exporter_faults(Plugins(exporters=plugins), config))


def test_exporter_without_checks_has_no_faults() -> None:
    plugin = ExporterPlugin(Settings, lambda *_: None)
    assert list(plugin.faults(Settings())) == []


def test_crashing_check_of_an_exporter_hides_no_other_fault() -> None:
    def crash(_: object) -> Iterable[str]:
        raise KeyError("place")

    crashed, said = told(crashing=crash, window=lambda _: ["[exporters.window] place is none."])
    assert crashed.startswith("[exporters.crashing] cannot be checked, KeyError: 'place'. ")
    assert said == "[exporters.window] place is none."
