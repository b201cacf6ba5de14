"""Every kind of host's zones, the cover that follows, and the words that explain it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from testbed.covers import cover_of, decided

from wattspan.model import HwType
from wattspan.sources.rapl.topology import (
    Zone,
    ZoneTopology,
    is_same_counter,
    modulus_of,
    resolve_topology,
)

INTEL = 262_143_328_850


def zones(*lines: str) -> list[Zone]:
    """``"intel-rapl:0 package-0"``, with the counter's samples after it where they matter."""
    found = []
    for line in lines:
        directory, name, *samples = line.split()
        found.append(Zone(directory, name, INTEL, None, tuple(map(int, samples))))
    return found


def cover(topology: ZoneTopology) -> set[str]:
    return cover_of(topology.domains)


class Host(NamedTuple):
    zones: list[Zone]
    cover: set[str]
    vendor: str | None = "intel"


HOSTS = {
    "two sockets with memory": Host(
        zones(
            "intel-rapl:0 package-0",
            "intel-rapl:0:0 dram",
            "intel-rapl:1 package-1",
            "intel-rapl:1:0 dram",
        ),
        {"rapl:package-0", "rapl:package-0/dram", "rapl:package-1", "rapl:package-1/dram"},
    ),
    "client with psys between": Host(
        zones(
            "intel-rapl:0 package-0",
            "intel-rapl:0:0 core",
            "intel-rapl:0:1 uncore",
            "intel-rapl:1 psys",
        ),
        {"rapl:package-0"},
    ),
    "dies that disagree": Host(
        zones(
            "intel-rapl:0 package-0-die-0 100 200 300",
            "intel-rapl:1 package-0-die-1 900 1000 1100",
        ),
        {"rapl:package-0-die-0", "rapl:package-0-die-1"},
    ),
    "dies that mirror": Host(
        zones(
            "intel-rapl:0 package-0-die-0 100 200 300",
            "intel-rapl:1 package-0-die-1 150 250 350",
        ),
        {"rapl:package-0-die-0"},
        "amd",
    ),
    "mirrored dies whose memory does not": Host(
        zones(
            "intel-rapl:0 package-0-die-0 100 200 300",
            "intel-rapl:0:0 dram 7000 7001 7002",
            "intel-rapl:1 package-0-die-1 150 250 350",
            "intel-rapl:1:0 dram 10 11 12",
        ),
        {"rapl:package-0-die-0", "rapl:package-0-die-0/dram", "rapl:package-0-die-1/dram"},
    ),
    "dies nobody could read": Host(
        zones("intel-rapl:0 package-0-die-0", "intel-rapl:1 package-0-die-1"),
        {"rapl:package-0-die-0", "rapl:package-0-die-1"},
    ),
    "a package beside its dies": Host(
        zones(
            "intel-rapl:0 package-0",
            "intel-rapl:1 package-0-die-0",
            "intel-rapl:2 package-0-die-1",
        ),
        {"rapl:package-0"},
    ),
    "mmio beside msr": Host(
        zones("intel-rapl-mmio:0 package-0", "intel-rapl:0 package-0", "intel-rapl-mmio:0:0 dram"),
        {"rapl:package-0", "rapl-mmio:package-0/dram"},
    ),
    "mmio alone": Host(zones("intel-rapl-mmio:0 package-0"), {"rapl-mmio:package-0"}),
    "tpmi and msr both as intel-rapl": Host(
        zones("intel-rapl:0 package-0", "intel-rapl:1 package-0", "intel-rapl:1:0 dram"),
        {"rapl:package-0", "rapl:package-0/dram"},
    ),
    "epyc": Host(zones("intel-rapl:0 package-0", "intel-rapl:0:0 core"), {"rapl:package-0"}, "amd"),
    "hexadecimal directories": Host(
        zones("intel-rapl:9 package-9", "intel-rapl:a package-10", "intel-rapl:a:0 dram"),
        {"rapl:package-9", "rapl:package-10", "rapl:package-10/dram"},
    ),
    "psys alone": Host(zones("intel-rapl:0 psys"), {"rapl:psys"}),
    "psys of two sockets, nothing else": Host(
        zones("intel-rapl:0 psys", "intel-rapl:1 psys-1"), {"rapl:psys"}
    ),
    "psys and memory without a package": Host(
        zones("intel-rapl:0 psys", "intel-rapl:1 dram"), {"rapl:psys"}
    ),
    "memory at the top": Host(
        zones("intel-rapl:0 package-0", "intel-rapl:1 dram"), {"rapl:package-0", "rapl:dram"}
    ),
    "one zone of unknown extent": Host(zones("soc-rapl:0 soc"), {"soc-rapl:soc"}, None),
    "zones of unknown extent": Host(zones("x:0 soc", "x:1 board"), set(), None),
    "an unknown zone beside a package": Host(
        zones("intel-rapl:0 package-0", "x:0 board"), {"rapl:package-0"}, None
    ),
    "nothing": Host([], set()),
}


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_cover_of_each_kind_of_host(host: Host) -> None:
    assert cover(resolve_topology(host.zones, vendor=host.vendor)) == host.cover


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_zone_discovery_order_has_no_effect(host: Host) -> None:
    assert resolve_topology(reversed(host.zones), vendor=host.vendor) == resolve_topology(
        host.zones, vendor=host.vendor
    )


def explained(zones: list[Zone], vendor: str | None = "intel") -> str:
    """The golden form: the explanation of `doctor`, one line per domain."""
    lines = []
    for domain in decided(resolve_topology(zones, vendor=vendor).domains).values():
        mark = "+" if domain.in_cover else "-"
        lines.append(f"{mark} {domain.id}: {domain.why}")
    return "\n".join(lines)


def test_client_is_explained() -> None:
    assert (
        explained(
            zones(
                "intel-rapl:1 package-0",
                "intel-rapl:1:0 core",
                "intel-rapl:1:1 uncore",
                "intel-rapl:0 psys",
                "intel-rapl-mmio:0 package-0",
            )
        )
        == """\
- rapl-mmio:package-0: shows the counter of rapl:package-0 through another interface; \
rapl:package-0 measures the same socket 0
+ rapl:package-0: socket 0's own counter, cores and uncore included
- rapl:package-0/core: the cores, contained in rapl:package-0
- rapl:package-0/uncore: mostly the integrated graphics, contained in rapl:package-0
- rapl:psys: the packages and parts of the board that differ by vendor; \
it may contain rapl:package-0, which is counted instead"""
    )


def test_amd_host_with_mirrored_dies_is_explained() -> None:
    assert (
        explained(
            zones(
                "intel-rapl:0 package-0-die-0 100 200 300",
                "intel-rapl:0:0 core 5 6 7",
                "intel-rapl:1 package-0-die-1 150 250 350",
            ),
            "amd",
        )
        == """\
+ rapl:package-0-die-0: die 0 of socket 0, a counter of its own
- rapl:package-0-die-0/core: one core's counter, not the sum of the socket's cores; \
rapl:package-0-die-0 contains it
- rapl:package-0-die-1: shows the same counter as rapl:package-0-die-0; \
rapl:package-0-die-0 measures the same socket 0 die-0"""
    )


def test_server_with_memory_and_psys_is_explained() -> None:
    assert (
        explained(zones("intel-rapl:0 package-0", "intel-rapl:0:0 dram", "intel-rapl:1 psys"))
        == """\
+ rapl:package-0: socket 0's own counter, cores and uncore included
+ rapl:package-0/dram: memory has a counter of its own: package-0 does not contain it
- rapl:psys: the packages and parts of the board that differ by vendor; \
it may contain rapl:package-0, which is counted instead"""
    )


def test_platform_without_packages_is_explained() -> None:
    assert explained(zones("intel-rapl:0 psys", "intel-rapl:1 psys-1", "intel-rapl:2 dram")) == (
        """\
- rapl:dram: memory has a counter of its own, outside every package; \
it may be contained in rapl:psys, which is counted instead
+ rapl:psys: the packages and parts of the board that differ by vendor
- rapl:psys-1: the packages and parts of the board that differ by vendor; \
it may overlap with rapl:psys, which is counted instead"""
    )


def test_energy_is_charged_by_the_cpu_time_of_its_socket() -> None:
    domains = resolve_topology(
        zones("intel-rapl:0 package-3", "intel-rapl:0:0 dram", "intel-rapl:0:1 core")
    ).domains
    charged = {domain.name: (domain.hw_type, domain.resource, domain.method) for domain in domains}
    assert charged == {
        "package-3": (HwType.CPU, "cpu:3", "cpu-time"),
        "package-3/dram": (HwType.MEMORY, "cpu:3", "cpu-time-proxy"),
        "package-3/core": (HwType.CPU, None, "none"),
    }


def test_platform_in_the_cover_is_charged_by_all_cpu_time() -> None:
    (psys,) = decided(resolve_topology(zones("intel-rapl:0 psys")).domains).values()
    assert (psys.resource, psys.method, psys.hw_type) == (
        "cpu",
        "cpu-time-proxy",
        HwType.ENCLOSURE,
    )


def test_zone_below_a_nameless_zone_is_an_orphan() -> None:
    topology = resolve_topology(zones("intel-rapl:0:0 dram", "intel-rapl:1 package-1"))
    assert topology.orphans == ("intel-rapl:0:0",)
    assert cover(topology) == {"rapl:package-1"}


def test_unreadable_known_mirror_remains_a_mirror() -> None:
    seen = resolve_topology(
        zones(
            "intel-rapl:0 package-0-die-0 100 200 300", "intel-rapl:1 package-0-die-1 150 250 350"
        )
    )
    blind = resolve_topology(
        zones("intel-rapl:0 package-0-die-0", "intel-rapl:1 package-0-die-1"),
        mirrors=seen.mirrors,
    )
    assert cover(blind) == {"rapl:package-0-die-0"}


def test_remaining_mirrored_die_counts_for_both() -> None:
    mirrored = frozenset({("rapl:package-0-die-0", "rapl:package-0-die-1")})
    topology = resolve_topology(zones("intel-rapl:1 package-0-die-1"), mirrors=mirrored)
    assert cover(topology) == {"rapl:package-0-die-1"}


@pytest.mark.parametrize(
    ("max_range", "modulus"),
    [
        (262_143_328_850, 262_143_328_850 + 61),  # 61.035 uJ
        (65_532_610_987, 65_532_610_987 + 15),  # 15.258 uJ
        (65_712_999_613, 65_712_999_613 + 15),  # 15.300 uJ, server memory
        (4_294_967_295_000_000, 4_294_967_296_000_000),  # 1 J
        (999, 1000),  # less than 2**32: the step is still one
        (0, None),
        (None, None),
    ],
)
def test_counter_wraps_one_step_beyond_its_range(
    max_range: int | None, modulus: int | None
) -> None:
    assert modulus_of(max_range) == modulus


def test_unknown_range_is_explained() -> None:
    (domain,) = resolve_topology([Zone("intel-rapl:0", "package-0", None)]).domains
    assert domain.modulus is None
    assert domain.why.endswith("its range is unknown, so a wrap shows as a reset")


def test_power_ceiling_follows_a_part_that_claims_more_but_no_impossible_claim() -> None:
    memory, modest, enormous, unlimited = resolve_topology(
        [
            Zone("intel-rapl:0", "package-0", INTEL, 28_000),
            Zone("intel-rapl:1", "package-1", INTEL, 900_000),
            Zone("intel-rapl:2", "package-2", INTEL, 4_095_875),  # all ones in the register
            # Of a Haswell desktop: intel/thermal_daemon issue 45.
            Zone("intel-rapl:3", "dram", INTEL, 3_408_250),
        ]
    ).domains
    assert modest.max_power == 1_500_000
    assert enormous.max_power == 3_600_000
    assert unlimited.max_power == 1_500_000
    assert memory.max_power == 500_000


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ((100, 200, 300), (150, 250, 350), True),
        ((100, 100, 100), (100, 100, 100), True),  # constant at the moment
        ((100, 200, 300), (90, 250, 310), True),  # one undisturbed stretch is enough
        ((100, 200, 300), (5, 6, 7), False),
        ((0, 0, 0), (0, 0, 0), False),  # no count yet
        ((100, 5_000_000, 9_000_000), (3_000_000, 7_000_000, 9_500_000), False),  # too far apart
        ((), (), False),
        ((1, 2, 3), (), False),
    ],
)
def test_samples_of_one_counter_never_decrease(
    first: tuple[int, ...], second: tuple[int, ...], same: bool
) -> None:
    assert is_same_counter(first, second) is same
