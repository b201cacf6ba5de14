"""Listings of sysfs: the counted domains, the sockets by which they are charged, the findings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.field import FieldCase, build_tree, field_cases
from testbed.process_rights import without_root

from wattspan.attribution.cover import decide
from wattspan.model import Domain, Failure
from wattspan.ports import SourceContext
from wattspan.sources.hwmon.source import HwmonSource
from wattspan.sources.rapl.powercap import PowercapSource, RaplSettings, open_rapl
from wattspan.testing import FakeDirectory, ManualClock
from wattspan.util.cpu_topology import CpuTopology


@contextlib.contextmanager
def listing(case: FieldCase, folder: Path) -> Iterator[Path]:
    """The listing; of one with modes, as the current directory of a user without privileges."""
    root = build_tree(case["tree"], folder)
    if "modes" not in case["tree"]:
        yield root
        return
    root.chmod(0o755)
    with contextlib.chdir(root), without_root():
        yield Path()


def examine(case: FieldCase, root: Path) -> tuple[dict[str, Domain], list[Failure]]:
    """The domains, with the cover decided, and failures of powercap and hwmon.

    Powercap is read only where its source opens.
    """
    clock = ManualClock()
    batches = [HwmonSource(root, clock, case.get("roles", {})).read()]
    if open_rapl(RaplSettings(), SourceContext(clock, FakeDirectory(), sysfs=root)) is not None:
        batches.append(PowercapSource(root, clock).read())
    domains = [domain for batch in batches for domain in batch.domains]
    decided = decide(domains, {one.domain_id for batch in batches for one in batch.readings})
    return decided, [one for batch in batches for one in batch.failures]


@pytest.mark.parametrize("case", field_cases("sysfs"))
def test_listing_has_the_expected_domains_and_findings(case: FieldCase, tmp_path: Path) -> None:
    with listing(case, tmp_path) as root:
        domains, failures = examine(case, root)
    expected = case["expected"]
    assert {one.id: one.resource or "" for one in domains.values() if one.in_cover} == expected[
        "counted"
    ]
    assert {one.id for one in domains.values() if not one.in_cover} == set(expected["others"])
    assert len(failures) == len(expected["findings"]), [str(one) for one in failures]
    for text in expected["findings"]:
        assert any(text in str(failure) for failure in failures), [str(one) for one in failures]


@pytest.mark.parametrize("case", field_cases("sysfs"))
def test_domains_are_charged_by_the_sockets_that_processes_use(
    case: FieldCase, tmp_path: Path
) -> None:
    with listing(case, tmp_path) as root:
        domains, _ = examine(case, root)
        capacity = CpuTopology(root).capacity()
    if "capacity" in case["expected"]:
        assert capacity == {int(key): n for key, n in case["expected"]["capacity"].items()}
    usages = {"cpu", *(f"cpu:{socket}" for socket in capacity)}
    assert {one.resource for one in domains.values() if one.resource} <= usages
