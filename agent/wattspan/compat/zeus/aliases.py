"""Aliases of Zeus's modules, so that a script runs without any change where Zeus is absent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableMapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

ALIASES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "zeus.monitor": {
        "monitor": ("ZeusMonitor", "Measurement"),
        "power": ("PowerMonitor",),
        "temperature": ("TemperatureMonitor",),
    },
    "zeus.monitor.energy": {"monitor": ("ZeusMonitor", "Measurement")},
    "zeus.monitor.power": {"power": ("PowerMonitor", "PowerDomain")},
    "zeus.monitor.temperature": {"temperature": ("TemperatureMonitor",)},
    "zeus.monitor.carbon": {
        "footprint": (
            "CarbonEmissionMonitor",
            "CarbonEmissionMeasurement",
            "CarbonIntensityProvider",
        )
    },
    "zeus.monitor.price": {
        "footprint": ("EnergyCostMonitor", "EnergyCostMeasurement", "ElectricityPriceProvider")
    },
    "zeus.metric": {"metric": ("EnergyHistogram", "EnergyCumulativeCounter", "PowerGauge")},
    "zeus.optimizer.power_limit": {
        "optimizer": (
            "GlobalPowerLimitOptimizer",
            "OptimumSelector",
            "Energy",
            "Time",
            "ZeusCost",
            "MaxSlowdownConstraint",
            "PowerLimitMeasurement",
        )
    },
    "zeus.callback": {"callback": ("Callback", "CallbackSet")},
}
"""By module of Zeus: the names, by module of this package."""


def install(
    modules: MutableMapping[str, ModuleType] = sys.modules,
    find: Callable[[str], object] = find_spec,
) -> bool:
    """Alias Zeus's modules to this package; False, and nothing done, where Zeus is installed.

    Idempotent. Call it before the first import of Zeus.
    """
    present = modules.get("zeus")
    if present is not None:
        return getattr(present, "__wattspan__", False)
    if find("zeus") is not None:
        return False
    root = _package("zeus")
    root.__wattspan__ = True  # type: ignore[attr-defined]
    made = {"zeus": root}
    for name, parts in ALIASES.items():
        for depth in range(2, name.count(".") + 2):
            parent = ".".join(name.split(".")[:depth])
            if parent not in made:
                made[parent] = _package(parent)
                above, _, last = parent.rpartition(".")
                setattr(made[above], last, made[parent])
        for part, exported in parts.items():
            source = import_module(f"wattspan.compat.zeus.{part}")
            for one in exported:
                setattr(made[name], one, getattr(source, one))
            if lazy := vars(source).get("__getattr__"):  # a class that needs a framework
                made[name].__getattr__ = lazy  # type: ignore[method-assign]
    modules.update(made)
    return True


def _package(name: str) -> ModuleType:
    module = ModuleType(name, "Zeus's names, answered by wattspan.compat.zeus.")
    module.__path__ = []
    return module
