"""The compatibility modules have the names, signatures and fields of the real Zeus."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
from typing import Any

import pytest

from support.requirements import CLIENTS

pytestmark = pytest.mark.needs_clients

NAMES = {
    "zeus.monitor.energy:ZeusMonitor": "monitor",
    "zeus.monitor.energy:Measurement": "monitor",
    "zeus.monitor.power:PowerMonitor": "power",
    "zeus.monitor.power:PowerDomain": "power",
    "zeus.monitor.temperature:TemperatureMonitor": "temperature",
    "zeus.monitor.carbon:CarbonEmissionMonitor": "footprint",
    "zeus.monitor.carbon:CarbonEmissionMeasurement": "footprint",
    "zeus.monitor.carbon:CarbonIntensityProvider": "footprint",
    "zeus.monitor.price:EnergyCostMonitor": "footprint",
    "zeus.monitor.price:EnergyCostMeasurement": "footprint",
    "zeus.monitor.price:ElectricityPriceProvider": "footprint",
    "zeus.metric:EnergyHistogram": "metric",
    "zeus.metric:EnergyCumulativeCounter": "metric",
    "zeus.metric:PowerGauge": "metric",
    "zeus.optimizer.power_limit:GlobalPowerLimitOptimizer": "optimizer",
    "zeus.optimizer.power_limit:OptimumSelector": "optimizer",
    "zeus.optimizer.power_limit:Energy": "optimizer",
    "zeus.optimizer.power_limit:Time": "optimizer",
    "zeus.optimizer.power_limit:ZeusCost": "optimizer",
    "zeus.optimizer.power_limit:MaxSlowdownConstraint": "optimizer",
    "zeus.callback:Callback": "callback",
    "zeus.callback:CallbackSet": "callback",
}
"""By class of Zeus, the module with the class of the same name here."""

# Executed by both interpreters. Annotations are left out: type aliases have other names.
DESCRIBE = """
import dataclasses, enum, importlib, inspect

def describe(path):
    module, _, name = path.partition(":")
    found = getattr(importlib.import_module(module), name)
    if issubclass(found, enum.Enum):
        return {"members": {one.name: one.value for one in found}}
    members = {"__init__": found.__init__}
    for key in dir(found):
        value = inspect.getattr_static(found, key)
        if not key.startswith("_") and inspect.isfunction(value):
            members[key] = value
    described = {
        key: [
            [one.name, one.kind.name, repr(one.default)]
            for one in inspect.signature(function).parameters.values()
        ]
        for key, function in members.items()
    }
    if dataclasses.is_dataclass(found):
        described["fields"] = [field.name for field in dataclasses.fields(found)]
    return described
"""


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    """The descriptions of Zeus's own classes."""
    code = (
        f"{DESCRIBE}\nimport json, sys\nprint(json.dumps({{p: describe(p) for p in sys.argv[1:]}}))"
    )
    done = subprocess.run(
        [str(CLIENTS), "-W", "ignore", "-c", code, *NAMES],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    described: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return described


@pytest.mark.parametrize("path", NAMES)
def test_class_has_the_signatures_of_zeus(path: str, real: dict[str, Any]) -> None:
    scope: dict[str, Any] = {}
    exec(DESCRIBE, scope)
    name = path.partition(":")[2]
    ours = scope["describe"](f"wattspan.compat.zeus.{NAMES[path]}:{name}")
    assert real[path], "nothing was described"
    assert {key: ours.get(key) for key in real[path]} == real[path]


def test_package_exports_every_compared_class() -> None:
    package = importlib.import_module("wattspan.compat.zeus")
    for path in NAMES:
        name = path.partition(":")[2]
        assert inspect.isclass(getattr(package, name))
        assert name in package.__all__
