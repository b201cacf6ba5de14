"""Devices that two libraries name: told apart by PCI address, and counted once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wattspan.model import (
    Domain,
    GpuStatus,
    HwType,
    Instant,
    Microjoules,
    Provenance,
    Reading,
    Usage,
)
from wattspan.ports import Batch
from wattspan.service.device_claims import DeviceClaims

NOW = Instant(1, 1)


def board(source: str, name: str, pci: str) -> Domain:
    return Domain(f"gpu:{name}", HwType.GPU, name, source, Provenance.MEASURED, pci=pci)


def batch(*domains: Domain) -> Batch:
    """A batch with a reading, a usage and a status of each domain."""
    return Batch(
        domains,
        tuple(Reading(domain.id, NOW, Microjoules(1)) for domain in domains),
        usages=tuple(Usage(domain.id, NOW, NOW, {}) for domain in domains),
        gpus=tuple(GpuStatus(domain.id, NOW) for domain in domains),
    )


AMD = board("amdsmi", "0000:60:00.0", "0000:60:00.0")
SHIM = board("nvml", "GPU-1", "0000:60:00.0")  # the same board
OTHER = board("nvml", "GPU-2", "0000:10:00.0")


def test_duplicate_device_is_left_out_with_its_readings_usage_and_status() -> None:
    claims = DeviceClaims()
    first, second = batch(AMD), batch(SHIM, OTHER)
    assert claims.without_duplicates("amdsmi", first) is first
    told = claims.without_duplicates("nvml", second)
    assert replace(told, failures=()) == batch(OTHER)
    (failure,) = told.failures
    assert failure.thing == "GPU-1"
    assert "0000:60:00.0, whose device the source amdsmi reads" in failure.cause


def test_domains_are_the_same_object_until_they_change() -> None:
    claims = DeviceClaims()
    claims.without_duplicates("amdsmi", batch(AMD))
    both = batch(SHIM, OTHER)
    first = claims.without_duplicates("nvml", both)
    assert claims.without_duplicates("nvml", replace(both, readings=())).domains is first.domains


def test_device_that_its_source_no_longer_lists_is_read_by_another() -> None:
    claims = DeviceClaims()
    claims.without_duplicates("amdsmi", batch(AMD))
    shim = batch(SHIM)
    assert claims.without_duplicates("nvml", shim).domains == ()
    claims.without_duplicates("amdsmi", batch())
    assert claims.without_duplicates("nvml", shim) is shim
    assert claims.without_duplicates("amdsmi", batch(AMD)).domains == ()


@pytest.mark.parametrize("pci", ["", "0000:99:00.0"])
def test_devices_at_other_or_unknown_addresses_are_different(pci: str) -> None:
    claims = DeviceClaims()
    claims.without_duplicates("amdsmi", batch(replace(AMD, pci="")))
    other = batch(replace(SHIM, pci=pci))
    assert claims.without_duplicates("nvml", other) is other


def test_source_that_knows_the_users_takes_a_device_from_a_sensor() -> None:
    """Whichever of both is read first: a library answers later than a file of hwmon."""
    sensor = replace(board("hwmon", "amdgpu/ppt", AMD.pci), id="hwmon:amdgpu/ppt")
    library = replace(AMD, resource=AMD.id)
    claims = DeviceClaims()
    by_sensor, by_library = batch(sensor), batch(library)
    assert claims.without_duplicates("hwmon", by_sensor) is by_sensor
    assert claims.without_duplicates("amdsmi", batch()).domains == ()
    for _ in range(2):
        assert claims.without_duplicates("amdsmi", by_library) is by_library
        told = claims.without_duplicates("hwmon", by_sensor)
        assert replace(told, failures=()) == batch()
        assert "whose device the source amdsmi reads" in told.failures[0].cause
    claims.without_duplicates("amdsmi", batch())
    assert claims.without_duplicates("hwmon", by_sensor) is by_sensor


def test_sensor_does_not_take_a_device_from_a_library() -> None:
    claims = DeviceClaims()
    claims.without_duplicates("nvml", batch(replace(SHIM, resource=SHIM.id)))
    claims.without_duplicates("amdsmi", batch(replace(AMD, resource=AMD.id)))
    assert claims.without_duplicates("hwmon", batch(board("hwmon", "ppt", AMD.pci))).domains == ()
