"""The threat model is true: its tests exist, its defaults are the settings'."""

from __future__ import annotations

import re
from pathlib import Path

from testbed.sources import functions

from wattspan.capper.server import MAX_REQUEST_RATE
from wattspan.config.settings import AgentSettings, SpansSettings
from wattspan.http.limits import MIB, ServerLimits
from wattspan_exporters.prometheus import PrometheusSettings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = sorted(
    set(re.findall(r"`((?:flow|unit|property|contract)/test_\w+\.py)(?:::(\w+))?`", PAGE))
)


def test_each_test_that_holds_a_promise_exists() -> None:
    assert len(NAMED) > 50
    for file, name in NAMED:
        path = ROOT / "tests" / file
        assert path.is_file(), f"docs/security.md names {file}, which is not there"
        assert not name or name in functions(path), f"{file} has no {name}"


def test_threats_name_a_test_and_the_residual_risk() -> None:
    table = PAGE.partition("\n## Threats\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")][
        2:
    ]
    assert len(rows) >= 12
    for threat, done, held, remains in rows:
        assert done, threat
        assert "test_" in held, f"nothing holds: {threat}"
        assert remains, threat


def default_of(setting: str) -> str:
    found = re.search(
        rf"^\| [^|]+ \| `{re.escape(setting)}` \| `?([^|`]+?)`? \|", PAGE, re.MULTILINE
    )
    assert found is not None, f"docs/security.md does not tell the default of {setting}"
    return found[1]


def test_defaults_of_the_listeners_are_those_of_the_settings() -> None:
    spans = SpansSettings()
    assert default_of("exporters.prometheus.listen") == PrometheusSettings().listen
    assert default_of("spans.http") == spans.http
    assert (default_of("spans.grpc"), spans.grpc) == ("off", "")
    assert (default_of("spans.unix"), spans.unix) == ("on", True)
    assert (default_of("agent.api"), AgentSettings().api) == ("on", True)


def test_documented_limits_match_the_code() -> None:
    limits, settings = ServerLimits(), PrometheusSettings()
    assert f"`max_connections`, {settings.max_connections} " in PAGE
    assert f"`max_rate`, {settings.max_rate} requests" in PAGE
    assert f"`agent.max_rate`, {AgentSettings().max_rate} requests" in PAGE
    assert f"{MAX_REQUEST_RATE} requests a second of one connection" in PAGE
    assert limits.rate == AgentSettings().max_rate
    assert f"`request_timeout`, {settings.request_timeout // 10**9} s" in PAGE
    assert f"`idle_timeout`, {settings.idle_timeout // 10**9} s" in PAGE
    assert f"| spans and queries | {limits.head // 1024} KiB " in PAGE
    assert f"MiB; of one owner {limits.bodies // 2 // MIB} MiB" in PAGE
    assert f"| {limits.receive:.0f} s | {limits.idle:.0f} s | {limits.connections}; " in PAGE
    assert f"`spans.max_request`, {SpansSettings().max_request // MIB} MiB" in PAGE
