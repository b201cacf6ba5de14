"""Which source the settings give, on hosts with counters, without, and with closed ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.powercap_host import PowercapHost, counters

from wattspan.model import Trouble
from wattspan.model.settings import SettingError, convert
from wattspan.ports import SourceContext, SourceError
from wattspan.sources.rapl.powercap import PowercapSource, RaplSettings, plugin
from wattspan.sources.rapl.pyrapl import PyRaplSource
from wattspan.sources.rapl.sysfs import cpu_model
from wattspan.testing import FakeDirectory, ManualClock


def context(sysfs: Path | None = None) -> SourceContext:
    return SourceContext(ManualClock(), FakeDirectory(), sysfs=sysfs)


def test_auto_mode_without_counters_has_no_source(tmp_path: Path) -> None:
    assert plugin.open(RaplSettings(sysfs=str(tmp_path)), context()) is None


def test_required_source_without_counters_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"under .*class/powercap\. Load the driver"):
        plugin.open(RaplSettings(enabled=True, sysfs=str(tmp_path)), context())


def test_disabled_source_is_absent_with_counters(tmp_path: Path) -> None:
    with PowercapHost(tmp_path):
        assert plugin.open(RaplSettings(enabled=False), context(tmp_path)) is None


def test_context_decides_over_the_configured_root(tmp_path: Path) -> None:
    with PowercapHost(tmp_path):
        source = plugin.open(RaplSettings(sysfs="/nowhere"), context(tmp_path))
        assert isinstance(source, PowercapSource)


def test_denied_counters_make_a_source_with_failures(tmp_path: Path) -> None:
    with PowercapHost(tmp_path, "psys-only") as host:
        host.engine.deny("intel-rapl:0")
        source = plugin.open(RaplSettings(), context(tmp_path))
        (failure,) = source.read().failures
        assert failure.trouble is Trouble.DENIED


def test_masked_counters_make_a_source(tmp_path: Path) -> None:
    with PowercapHost(tmp_path):
        (tmp_path / "devices/virtual/powercap").rename(tmp_path / "gone")
        assert plugin.open(RaplSettings(), context(tmp_path)) is not None


def test_other_reader_is_a_setting(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        source = plugin.open(RaplSettings(reader="pyrapl"), context(tmp_path))
        assert isinstance(source, PyRaplSource)
        assert counters(source.read()) == counters(host.source.read())
        source.close()


def test_pyrapl_refusal_is_an_error_if_required(tmp_path: Path) -> None:
    with PowercapHost(tmp_path, "multi-die"):
        with pytest.raises(SourceError, match='Set reader = "powercap"'):
            plugin.open(RaplSettings(enabled=True, reader="pyrapl"), context(tmp_path))
        source = plugin.open(RaplSettings(reader="pyrapl"), context(tmp_path))
        (failure,) = source.read().failures
        assert "cannot distinguish the dies" in str(failure)


@pytest.mark.parametrize("raw", [{"enabled": "yes"}, {"reader": "msr"}, {"sysfs": 1}])
def test_wrong_settings_are_refused(raw: dict[str, object]) -> None:
    with pytest.raises(SettingError, match=r"sources\.rapl\."):
        convert(raw, RaplSettings, "sources.rapl")


def test_enabled_is_auto_or_a_truth_value() -> None:
    for value in ("auto", True, False):
        assert convert({"enabled": value}, RaplSettings, "sources.rapl").enabled == value


def test_domains_have_the_model_of_the_processor(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        source = PowercapSource(tmp_path, host.clock, model="Some CPU")
        assert {domain.model for domain in source.read().domains} == {"Some CPU"}
        source.close()


@pytest.mark.parametrize(
    ("text", "model"),
    [
        (
            "processor\t: 0\nmodel\t\t: 2\nmodel name\t: Some CPU @ 3GHz \nflags: a\n",
            "Some CPU @ 3GHz",
        ),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", ""),
        (None, ""),
    ],
    ids=["x86", "arm", "absent"],
)
def test_model_of_the_processor_is_read_from_cpuinfo(
    tmp_path: Path, text: str | None, model: str
) -> None:
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    assert cpu_model(file) == model
