"""The compatibility modules have the names, signatures and fields of the real Zeus."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from scripts.zeus_reference import ROWS
from testbed.program import output_of
from testbed.requirements import CLIENTS

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
    "zeus.monitor.carbon:ElectrictyMapsClient",
    "zeus.monitor.price:OpenEIClient",
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
    "zeus.optimizer.batch_size.client:BatchSizeOptimizer",
    "zeus.device.gpu.common:GPU",
    "zeus.device.cpu.common:CPU",
    "zeus.device.cpu.common:CpuDramMeasurement",
    "zeus.profile:TrialResult",
    "zeus.profile:SweepResult",
    "zeus.profile:SweepReport",
    "zeus.utils.testing:ReplayZeusMonitor",
    "zeus.utils.lr_scaler:LinearScaler",
    "zeus.utils.lr_scaler:SquareRootScaler",
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
        if key[0] != "_" and key.islower() and inspect.isfunction(value):  # getName is deprecated
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
    return output_of(CLIENTS, "-W", "ignore", "-c", code, *arguments, timeout=120)


@pytest.mark.parametrize("path", NAMES)
def test_class_has_the_signatures_of_zeus(path: str, real: dict[str, Any]) -> None:
    scope: dict[str, Any] = {}
    exec(DESCRIBE, scope)
    name = path.partition(":")[2]
    ours = scope["describe"](f"wattspan.compat.zeus:{name}")
    assert real[path], "nothing was described"
    for key, expected in real[path].items():
        if key in {"fields", "members"}:
            assert ours[key] == expected
            continue
        assert ours[key][: len(expected)] == expected, key
        assert all("<class" not in default for _, _, default in ours[key][len(expected) :])


# Executed on Zeus: sources are read because some modules import what is not installed.
LIST = """
import ast, json, pathlib, zeus
root = pathlib.Path(zeus.__file__).parent
found = {}
for path in root.rglob("*.py"):
    parts = [one for one in path.relative_to(root.parent).with_suffix("").parts]
    if parts[-1] == "__init__":
        parts.pop()
    if not any(one.startswith("_") for one in parts):
        nodes = ast.parse(path.read_text()).body
        kinds = ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        found[".".join(parts)] = [
            one.name for one in nodes if isinstance(one, kinds) and one.name[0] != "_"
        ]
print(json.dumps(found))
"""


def row_of(module: str, name: str) -> int | None:
    """The number of the row of a public name: that which names it, or that of its package."""
    named = [i for i, one in enumerate(ROWS) if name in one.get("names", ())]
    within = [i for i in named if f"{module}.".startswith(f"{ROWS[i]['module']}.")]
    if within:
        return within[0]
    rest = [i for i, one in enumerate(ROWS) if "names" not in one]
    around = [i for i in rest if f"{module}.".startswith(f"{ROWS[i]['module']}.")]
    return max(around, key=lambda i: len(ROWS[i]["module"]), default=None)


def test_every_public_name_of_zeus_has_a_row_and_every_row_a_name() -> None:
    real: dict[str, list[str]] = json.loads(run_on_zeus(LIST).splitlines()[-1])
    assert sum(map(len, real.values())) > 200, "nothing was listed"
    rows = {(module, name): row_of(module, name) for module in real for name in real[module]}
    assert [key for key, row in rows.items() if row is None] == []
    assert [row for i, row in enumerate(ROWS) if i not in rows.values()] == []
    listed = [name for one in ROWS for name in one.get("names", ())]
    known = {name for names in real.values() for name in names}
    assert [name for name in listed if name not in known] == []


def test_rows_that_are_not_missing_are_the_names_that_are_provided() -> None:
    package = importlib.import_module("wattspan.compat.zeus")
    provided = {name for names in package.ALIASES.values() for name in names}
    assert {one["here"] for one in ROWS} == {"same", "better", "differs", "missing"}
    assert all("why" in one for one in ROWS if one["here"] in {"better", "differs", "missing"})
    present = {name for one in ROWS if one["here"] != "missing" for name in one["names"]}
    assert present == provided - {"__version__"}


def test_interface_is_that_of_the_release_of_zeus() -> None:
    package = importlib.import_module("wattspan.compat.zeus")
    assert run_on_zeus("import zeus; print(zeus.__version__)").split()[-1] == package.__version__


def test_package_exports_every_compared_class() -> None:
    package = importlib.import_module("wattspan.compat.zeus")
    for path in NAMES:
        name = path.partition(":")[2]
        assert isinstance(getattr(package, name), type)
        assert name in package.__all__
