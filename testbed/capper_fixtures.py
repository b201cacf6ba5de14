"""Makers of the fixtures that flow tests of the capper share; assign each to the fixture's name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.capper_process import CapperProcess, Gpu, gpu_at
from testbed.power_limits import PowerLimits
from wattspan.emulation.host import EmulatedHost, profile_named

ORIGINAL = 650_000


def host_fixture(profile: str, make: type[EmulatedHost] = EmulatedHost) -> Any:
    """``host``: one emulated host for all tests of a module."""

    @pytest.fixture(scope="module")
    def host() -> Iterator[EmulatedHost]:
        with make(profile_named(profile)) as host:
            yield host

    return host


def gpu_fixture() -> Any:
    """``gpu``: the board of ``host``, with the limit ORIGINAL before each test."""

    @pytest.fixture
    def gpu(host: EmulatedHost) -> Iterator[Gpu]:
        with gpu_at(host, ORIGINAL) as gpu:
            yield gpu

    return gpu


def capper_fixture() -> Any:
    """``capper``: a ready capper process of ``host``, whose GPU has the limit of ``gpu``."""

    @pytest.fixture
    def capper(host: EmulatedHost, tmp_path: Path, gpu: Gpu) -> Iterator[CapperProcess]:
        with CapperProcess(host, tmp_path, autotune__floor=0.3) as capper:
            yield capper.ready()

    return capper


def limits_fixture() -> Any:
    """``limits``: all power limits of ``host`` as another client of its drivers reads them."""

    @pytest.fixture
    def limits(host: EmulatedHost) -> Iterator[PowerLimits]:
        limits = PowerLimits(host)
        yield limits
        limits.close()

    return limits
