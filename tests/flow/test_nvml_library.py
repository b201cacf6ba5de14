"""The source over the real binding and a real C library, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.gpu_source_process import read_source
from testbed.nvml_library import build, environment

from wattspan.emulation.boards import H100


@pytest.mark.needs_cc
@pytest.mark.parametrize(
    ("slices", "methods"), [((), ["gpu-sm-utilisation"]), ((3, 1), ["mig-gpm"] * 3)]
)
def test_binding_and_a_c_library_feed_the_source(
    tmp_path: Path, slices: tuple[int, ...], methods: list[str]
) -> None:
    library = build(tmp_path)
    file = tmp_path / "gpus"
    told = read_source("nvml", H100, file, environment(library, file), slices)
    assert told["provenance"] == ["emulated"]  # without any declaration to the source
    assert told["methods"] == methods
    assert told["rising"]
    assert 0 < told["energy"] <= told["truth"]
    assert told["limit"] == 700_000
    assert [f for f in told["failures"] if "pid namespace" not in f] == []


OLDER = (
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetArchitecture",
)
COUNTER = "nvmlDeviceGetTotalEnergyConsumption"


@pytest.mark.needs_cc
@pytest.mark.parametrize(
    ("missing", "how"),
    [(OLDER, "by its energy counter"), ((*OLDER, COUNTER), "integrated from its power")],
)
def test_library_of_an_older_driver_feeds_the_source(
    tmp_path: Path, missing: tuple[str, ...], how: str
) -> None:
    """The real binding finds no such symbols."""
    library = build(tmp_path, without=missing)
    file = tmp_path / "gpus"
    told = read_source("nvml", H100, file, environment(library, file))
    assert told["why"] == [f"the whole board, {how}"]
    assert told["rising"]
    assert 0 < told["energy"] <= told["truth"]
    assert told["limit"] == 700_000
    assert [f for f in told["failures"] if "pid namespace" not in f] == []
