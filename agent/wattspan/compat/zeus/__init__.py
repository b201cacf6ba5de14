"""Zeus's monitors and optimizers on the agent: change the import and keep the script.

    from wattspan.compat.zeus import ZeusMonitor  # was: from zeus.monitor import ZeusMonitor

Names and signatures are those of Zeus 0.16. Each name is loaded at its first use, and no framework
is imported, but for transformers by ``HFGlobalPowerLimitOptimizer``, which ``import *`` leaves out.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from wattspan.compat.zeus.aliases import install
    from wattspan.compat.zeus.callback import Callback, CallbackSet
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
        Energy,
        GlobalPowerLimitOptimizer,
        MaxSlowdownConstraint,
        OptimumSelector,
        PowerLimitMeasurement,
        Time,
        ZeusCost,
    )
    from wattspan.compat.zeus.power import PowerDomain, PowerMonitor
    from wattspan.compat.zeus.temperature import TemperatureMonitor

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

_MODULE_OF = {
    "Callback": "wattspan.compat.zeus.callback",
    "CallbackSet": "wattspan.compat.zeus.callback",
    "CarbonEmissionMeasurement": "wattspan.compat.zeus.footprint",
    "CarbonEmissionMonitor": "wattspan.compat.zeus.footprint",
    "CarbonIntensityProvider": "wattspan.compat.zeus.footprint",
    "ElectricityPriceProvider": "wattspan.compat.zeus.footprint",
    "Energy": "wattspan.compat.zeus.optimizer",
    "EnergyCostMeasurement": "wattspan.compat.zeus.footprint",
    "EnergyCostMonitor": "wattspan.compat.zeus.footprint",
    "EnergyCumulativeCounter": "wattspan.compat.zeus.metric",
    "EnergyHistogram": "wattspan.compat.zeus.metric",
    "GlobalPowerLimitOptimizer": "wattspan.compat.zeus.optimizer",
    "HFGlobalPowerLimitOptimizer": "wattspan.compat.zeus.optimizer",
    "MaxSlowdownConstraint": "wattspan.compat.zeus.optimizer",
    "Measurement": "wattspan.compat.zeus.monitor",
    "OptimumSelector": "wattspan.compat.zeus.optimizer",
    "PowerDomain": "wattspan.compat.zeus.power",
    "PowerGauge": "wattspan.compat.zeus.metric",
    "PowerLimitMeasurement": "wattspan.compat.zeus.optimizer",
    "PowerMonitor": "wattspan.compat.zeus.power",
    "TemperatureMonitor": "wattspan.compat.zeus.temperature",
    "Time": "wattspan.compat.zeus.optimizer",
    "ZeusCost": "wattspan.compat.zeus.optimizer",
    "ZeusMonitor": "wattspan.compat.zeus.monitor",
    "install": "wattspan.compat.zeus.aliases",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
