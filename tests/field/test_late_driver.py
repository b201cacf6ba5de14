"""Drivers that are loaded after the agent: files that appear below sysfs while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.field import FieldCase, build_tree, field_cases
from testbed.waiting import eventually

from wattspan.config import Config
from wattspan.plugins import AwaitedPlugins, Plugins, open_sources
from wattspan.ports import CounterSource, SourceContext
from wattspan.sources.hwmon.source import HwmonSettings
from wattspan.sources.hwmon.source import plugin as hwmon
from wattspan.sources.rapl.powercap import RaplSettings
from wattspan.sources.rapl.powercap import plugin as rapl
from wattspan.testing import FakeDirectory, ManualClock

PERIOD = 10
"""Seconds in which a driver of NVIDIA that is loaded is found."""


def listed(source: CounterSource) -> set[str]:
    return {domain.id for domain in source.read().domains}


@pytest.mark.parametrize("case", field_cases("late_driver"))
def test_late_driver_is_found_within_the_period_of_nvidia(case: FieldCase, tmp_path: Path) -> None:
    clock, lines = ManualClock(), list[str]()
    build_tree(case["before"], tmp_path)
    plugins = Plugins(sources={"hwmon": hwmon, "rapl": rapl})
    config = Config(sources={"hwmon": HwmonSettings(), "rapl": RaplSettings()})
    opened = open_sources(plugins, config, SourceContext(clock, FakeDirectory(), sysfs=tmp_path))
    sources = list(opened.sources.values())
    awaited = AwaitedPlugins(clock, lines.append)
    awaited.expect("sources", opened.awaited, sources.append)
    try:
        assert {one.name for one in sources} == set(case["expected"]["read_before"])
        awaited.turn()
        assert len(sources) == len(opened.sources)
        build_tree(case["after"], tmp_path)
        for _ in range(PERIOD):
            clock.advance(1)
            awaited.turn()
        expected = set(case["expected"]["domains"])
        eventually(lambda: set().union(*map(listed, sources)) == expected, "all domains")
        assert len(lines) == len(sources) - len(opened.sources)
        assert awaited.failures == ()
    finally:
        for source in sources:
            source.close()
