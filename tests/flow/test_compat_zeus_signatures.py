"""The compatibility modules have the names, signatures and fields of the real Zeus."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
from typing import Any

import pytest
from testbed.requirements import CLIENTS, ROOT

pytestmark = pytest.mark.needs_clients

NAMES = (
    "zeus.monitor.energy:ZeusMonitor",
    "zeus.monitor.energy:Measurement",
    "zeus.monitor.power:PowerMonitor",
    "zeus.monitor.power:PowerDomain",
    "zeus.monitor.temperature:TemperatureMonitor",
    "zeus.monitor.carbon:CarbonEmissionMonitor",
    "zeus.monitor.carbon:CarbonEmissionMeasurement",
    "zeus.monitor.carbon:CarbonIntensityProvider",
    "zeus.monitor.price:EnergyCostMonitor",
    "zeus.monitor.price:EnergyCostMeasurement",
    "zeus.monitor.price:ElectricityPriceProvider",
    "zeus.metric:EnergyHistogram",
    "zeus.metric:EnergyCumulativeCounter",
    "zeus.metric:PowerGauge",
    "zeus.optimizer.power_limit:GlobalPowerLimitOptimizer",
    "zeus.optimizer.power_limit:OptimumSelector",
    "zeus.optimizer.power_limit:Energy",
    "zeus.optimizer.power_limit:Time",
    "zeus.optimizer.power_limit:ZeusCost",
    "zeus.optimizer.power_limit:MaxSlowdownConstraint",
    "zeus.callback:Callback",
    "zeus.callback:CallbackSet",
)
"""The classes of Zeus that the package has under the same name."""

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
    described: dict[str, Any] = json.loads(run_on_zeus(code, *NAMES).splitlines()[-1])
    return described


def run_on_zeus(code: str, *arguments: str) -> str:
    """The output of a program in an environment with Zeus."""
    done = subprocess.run(
        [str(CLIENTS), "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", NAMES)
def test_class_has_the_signatures_of_zeus(path: str, real: dict[str, Any]) -> None:
    scope: dict[str, Any] = {}
    exec(DESCRIBE, scope)
    name = path.partition(":")[2]
    ours = scope["describe"](f"wattspan.compat.zeus:{name}")
    assert real[path], "nothing was described"
    assert {key: ours.get(key) for key in real[path]} == real[path]


MODULES = (
    "zeus.monitor.energy",
    "zeus.monitor.power",
    "zeus.monitor.temperature",
    "zeus.monitor.carbon",
    "zeus.monitor.price",
    "zeus.metric",
    "zeus.callback",
    "zeus.optimizer.power_limit",
    "zeus.profile",
)
LIST = """
import importlib, inspect, sys
for path in sys.argv[1:]:
    module = importlib.import_module(path)
    for name, value in vars(module).items():
        if name[0] != "_" and getattr(value, "__module__", "") == path:
            print(name)
"""
PROVIDED = ("same", "better", "differs", "not provided")


def test_guide_says_for_every_public_name_of_zeus_if_it_is_provided() -> None:
    guide = (ROOT / "docs" / "how-to" / "move-from-zeus.md").read_text()
    rows = [line.split("|") for line in guide.splitlines() if line.startswith("| ")]
    said = {
        name: columns[2].strip()
        for columns in rows
        for part in re.findall(r"`([^`]+)`", columns[1])
        for name in re.findall(r"\w+", part.partition("(")[0])
    }
    names = run_on_zeus(LIST, *MODULES).split()
    assert len(names) > 40, "nothing was listed"
    missing = {name for name in names if said.get(name) not in PROVIDED}
    assert not missing
    package = importlib.import_module("wattspan.compat.zeus")
    provided = {name for name in names if said[name] != "not provided"}
    absent = {name for name in provided if name not in package._MODULE_OF}
    assert not absent


def test_package_exports_every_compared_class() -> None:
    package = importlib.import_module("wattspan.compat.zeus")
    for path in NAMES:
        name = path.partition(":")[2]
        assert inspect.isclass(getattr(package, name))
        assert name in package.__all__
