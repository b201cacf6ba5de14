"""Zeus's monitors and optimizers on the agent: change the import and keep the script.

    from wattspan.compat.zeus import ZeusMonitor  # was: from zeus.monitor import ZeusMonitor

Names and signatures are those of Zeus 0.16. Each name is loaded at its first use, and no framework
is imported, but for transformers by ``HFGlobalPowerLimitOptimizer``, which ``import *`` leaves out.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, spec_from_loader
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable as Function
    from collections.abc import MutableMapping

    from wattspan.compat.zeus.footprint import (
        CarbonEmissionMeasurement,
        CarbonEmissionMonitor,
        CarbonIntensityProvider,
        ElectricityPriceProvider,
        EnergyCostMeasurement,
        EnergyCostMonitor,
    )
    from wattspan.compat.zeus.metric import EnergyCumulativeCounter, EnergyHistogram, PowerGauge
    from wattspan.compat.zeus.monitor import Measurement, ZeusMonitor
    from wattspan.compat.zeus.optimizer import (
        Callback,
        CallbackSet,
        Energy,
        GlobalPowerLimitOptimizer,
        MaxSlowdownConstraint,
        OptimumSelector,
        PowerLimitMeasurement,
        Time,
        ZeusCost,
    )
    from wattspan.compat.zeus.power import PowerDomain, PowerMonitor, TemperatureMonitor

__all__ = [
    "Callback",
    "CallbackSet",
    "CarbonEmissionMeasurement",
    "CarbonEmissionMonitor",
    "CarbonIntensityProvider",
    "ElectricityPriceProvider",
    "Energy",
    "EnergyCostMeasurement",
    "EnergyCostMonitor",
    "EnergyCumulativeCounter",
    "EnergyHistogram",
    "GlobalPowerLimitOptimizer",
    "MaxSlowdownConstraint",
    "Measurement",
    "OptimumSelector",
    "PowerDomain",
    "PowerGauge",
    "PowerLimitMeasurement",
    "PowerMonitor",
    "TemperatureMonitor",
    "Time",
    "ZeusCost",
    "ZeusMonitor",
    "install",
]

_ENERGY = ("ZeusMonitor", "Measurement")
_POWER = ("PowerMonitor", "PowerDomain")
_TEMPERATURE = ("TemperatureMonitor",)
_CARBON = ("CarbonEmissionMonitor", "CarbonEmissionMeasurement", "CarbonIntensityProvider")
_PRICE = ("EnergyCostMonitor", "EnergyCostMeasurement", "ElectricityPriceProvider")
_METRIC = ("EnergyHistogram", "EnergyCumulativeCounter", "PowerGauge")
_SELECTORS = ("OptimumSelector", "Energy", "Time", "ZeusCost", "MaxSlowdownConstraint")
_POWER_LIMIT = ("GlobalPowerLimitOptimizer", *_SELECTORS, "PowerLimitMeasurement")
_CALLBACK = ("Callback", "CallbackSet")

ALIASES = {
    "zeus.monitor": (*_ENERGY, "PowerMonitor", *_TEMPERATURE),
    "zeus.monitor.energy": _ENERGY,
    "zeus.monitor.power": _POWER,
    "zeus.monitor.temperature": _TEMPERATURE,
    "zeus.monitor.carbon": _CARBON,
    "zeus.monitor.price": _PRICE,
    "zeus.metric": _METRIC,
    "zeus.optimizer.power_limit": _POWER_LIMIT,
    "zeus.callback": _CALLBACK,
}
"""The names of each module of Zeus."""

_HUGGING_FACE = "HFGlobalPowerLimitOptimizer"
_MODULE_OF = {
    **dict.fromkeys(_ENERGY, "monitor"),
    **dict.fromkeys((*_POWER, *_TEMPERATURE), "power"),
    **dict.fromkeys((*_CARBON, *_PRICE), "footprint"),
    **dict.fromkeys(_METRIC, "metric"),
    **dict.fromkeys((*_POWER_LIMIT, *_CALLBACK, _HUGGING_FACE), "optimizer"),
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def install(
    modules: MutableMapping[str, ModuleType] = sys.modules,
    find: Function[[str], object] = find_spec,
) -> bool:
    """Alias Zeus's modules to this package; False, and nothing done, where Zeus is installed.

    A script then runs without any change. Idempotent. Call it before the first import of Zeus.
    """
    present = modules.get("zeus")
    if present is not None:
        return getattr(present, "__wattspan__", False)
    if find("zeus") is not None:
        return False
    root = _package("zeus")
    root.__wattspan__ = True  # type: ignore[attr-defined]
    made = {"zeus": root}
    for name, exported in ALIASES.items():
        for depth in range(2, name.count(".") + 2):
            parent = ".".join(name.split(".")[:depth])
            if parent not in made:
                made[parent] = _package(parent)
                above, _, last = parent.rpartition(".")
                setattr(made[above], last, made[parent])
        for one in exported:
            setattr(made[name], one, getattr(sys.modules[__name__], one))
    optimizer = import_module(f"{__name__}.optimizer")
    # for the class that needs a framework
    made["zeus.optimizer.power_limit"].__getattr__ = optimizer.__getattr__  # type: ignore[method-assign]
    modules.update(made)
    return True


def _package(name: str) -> ModuleType:
    module = ModuleType(name, "Zeus's names, answered by wattspan.compat.zeus.")
    module.__path__ = []
    module.__spec__ = spec_from_loader(name, None, is_package=True)  # which `find_spec` returns
    return module
