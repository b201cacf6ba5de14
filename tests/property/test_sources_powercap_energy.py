"""From the emulated energy model to joules: the sum of the reader's counters is the true energy."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.powercap_host import PowercapHost
from testbed.powercap_layouts import LAYOUTS

from wattspan.attribution.metering import energy_between
from wattspan.emulation.powercap_tree import PowercapLayout
from wattspan.model import Gap, GapReason, Interval

STEP = 62  # microjoules: a counter cannot show less


def about_to_wrap(layout: PowercapLayout, before: int) -> PowercapLayout:
    """The layout with every counter ``before`` steps short of its end."""
    return replace(
        layout, zones=tuple(replace(zone, start=2**32 - before) for zone in layout.zones)
    )


@settings(max_examples=20)
@given(
    st.sampled_from(["xeon-2s", "epyc-2s", "client"]),
    st.integers(1, 3_000_000),
    st.lists(st.tuples(st.floats(0.01, 2), st.floats(0, 4)), min_size=1, max_size=12),
)
def test_intervals_add_up_to_the_truth_across_wraps(
    name: str, before: int, steps: list[tuple[float, float]]
) -> None:
    with (
        tempfile.TemporaryDirectory() as root,
        PowercapHost(Path(root), about_to_wrap(LAYOUTS[name], before)) as host,
    ):
        batch = host.read_after()
        names = {identity: d for d, identity in host.source.topology.domain_of.items()}
        start = {identity: host.engine.energy(names[identity]) for identity in names}
        last = {reading.domain_id: reading for reading in batch.readings}
        total = dict.fromkeys(names, 0)
        for seconds, work in steps:
            host.work(0, work * seconds)
            batch = host.read_after(seconds)
            domains = {domain.id: domain for domain in batch.domains}
            for reading in batch.readings:
                identity = reading.domain_id
                step = energy_between(domains[identity], last[identity], reading)
                assert isinstance(step, Interval), step
                total[identity] += step.energy
                last[identity] = reading
        for identity, directory in names.items():
            spent = host.engine.energy(directory) - start[identity]
            assert abs(total[identity] - spent) <= STEP


@settings(max_examples=20)
@given(st.integers(1, 10**9), st.floats(0.01, 5))
def test_counter_that_falls_is_a_gap_and_never_a_spike(back: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as root, PowercapHost(Path(root)) as host:
        host.pass_time(100)
        batch = host.read_after()
        (domain, *_), (before, *_) = batch.domains, batch.readings
        host.pass_time(seconds)
        host.engine.rewind("intel-rapl:0", back)
        (after, *_) = host.source.read().readings
        step = energy_between(domain, before, after)
        if after.counter < before.counter:
            assert isinstance(step, Gap)
            assert step.reason is GapReason.RESET
        else:  # the counter fell by less than it had gained: no reader can tell
            assert isinstance(step, Interval)
