"""The configured static power of a board, by a part of the name of its model."""

from __future__ import annotations

import pytest

from wattspan.model.settings import SettingError, convert
from wattspan.sources.nvml.device import NvmlSettings


def settings(value: object) -> NvmlSettings:
    return convert({"static_watts": value}, NvmlSettings, "sources.nvml")


def test_static_power_is_not_configured_by_default() -> None:
    assert NvmlSettings().static_power("NVIDIA A100-SXM4-80GB") is None
    assert settings("auto").static_power("NVIDIA A100-SXM4-80GB") is None


def test_longest_part_of_the_name_applies() -> None:
    known = settings({"A100": 85, "a100-sxm4-80gb": 90.5, "H100": 115})
    assert known.static_power("NVIDIA A100-SXM4-80GB") == 90_500
    assert known.static_power("NVIDIA A100-PCIE-40GB") == 85_000
    assert known.static_power("Tesla T4") is None


@pytest.mark.parametrize("value", [0, -1, 2001, float("nan"), float("inf")])
def test_implausible_static_power_is_refused(value: float) -> None:
    with pytest.raises(SettingError, match="is not the power of a board"):
        settings({"A100": value})


@pytest.mark.parametrize("value", ["fast", 85, {"A100": "85 W"}, {"": 85}])
def test_other_values_are_refused_with_the_form(value: object) -> None:
    with pytest.raises(SettingError, match="static_watts"):
        settings(value)
