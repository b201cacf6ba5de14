"""Zeus's monitors and optimizers on the agent: change the import and keep the script.

    from wattspan.compat.zeus import ZeusMonitor  # was: from zeus.monitor import ZeusMonitor

Names and signatures are those of Zeus 0.16. Each name is loaded at its first use, and no framework
is imported, but by the functions of ``zeus.utils.framework``, and transformers by
``HFGlobalPowerLimitOptimizer``, which ``import *`` leaves out.
"""

# ruff: noqa: F403 - the names of the modules are listed once, below

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, spec_from_loader
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable as Function
    from collections.abc import MutableMapping

    from wattspan.compat.zeus.footprint import *
    from wattspan.compat.zeus.hardware import *
    from wattspan.compat.zeus.limits import *
    from wattspan.compat.zeus.metric import *
    from wattspan.compat.zeus.monitor import *
    from wattspan.compat.zeus.optimizer import *
    from wattspan.compat.zeus.power import *
    from wattspan.compat.zeus.profile import *
    from wattspan.compat.zeus.providers import *
    from wattspan.compat.zeus.trials import *
    from wattspan.compat.zeus.utilities import *

__version__ = "0.16.0"
"""The release of Zeus whose names and signatures are here."""

_ENERGY = ("ZeusMonitor", "Measurement")
_POWER = ("PowerMonitor", "PowerDomain")
_TEMPERATURE = ("TemperatureMonitor",)
_CARBON = ("CarbonEmissionMonitor", "CarbonEmissionMeasurement", "CarbonIntensityProvider")
_MAPS = ("ElectrictyMapsClient", "ZeusCarbonIntensityHTTPError", "ZeusCarbonIntensityNotFoundError")
_PRICE = ("EnergyCostMonitor", "EnergyCostMeasurement", "ElectricityPriceProvider")
_TARIFF_ERRORS = ("ZeusElectricityPriceHTTPError", "ZeusElectricityPriceNotFoundError")
_TARIFF = ("OpenEIClient", "get_time_info", *_TARIFF_ERRORS)
_METRIC = ("EnergyHistogram", "EnergyCumulativeCounter", "PowerGauge")
_SELECTORS = ("OptimumSelector", "Energy", "Time", "ZeusCost", "MaxSlowdownConstraint")
_PROFILE = (*_SELECTORS, "PowerLimitMeasurement")
_HUGGING_FACE = "HFGlobalPowerLimitOptimizer"
_POWER_LIMIT = ("GlobalPowerLimitOptimizer", _HUGGING_FACE)
_BATCH_ERRORS = ("ZeusBSOBadOperationError", "ZeusBSOTrainFailError")
_BATCH_SIZE = ("BatchSizeOptimizer", "JobSpec")
_CALLBACK = ("Callback", "CallbackSet")
_GPU_LIMIT_ERRORS = ("ZeusGPUNotSupportedError", "ZeusGPUNoPermissionError")
_BASE_ERRORS = ("ZeusBaseError", "ZeusBaseGPUError")
_GPU = ("GPU", "GPUs", "ZeusGPUInitError", "ZeusGPUHeterogeneousError")
_CPU = ("CPU", "CPUs", "CpuDramMeasurement", "ZeusCPUInitError")
_SOC = ("get_soc", "ZeusSoCInitError")
_CHIP_ERRORS = ("ZeusBaseCPUError", "ZeusBaseSoCError")
_SCALER = ("LinearScaler", "SquareRootScaler")
_SCRIPT = ("get_env", "get_ip_lat_long", "ReplayZeusMonitor")
_CHECKS = ("torch_is_available", "jax_is_available", "cupy_is_available")
_RANKS = ("all_reduce", "is_distributed", "get_rank", "get_world_size")
_FRAMEWORK = (*_CHECKS, "sync_execution", *_RANKS)
_SWEEPS = ("profile_parameters", "profile_measurement_duration", "profile_cooldown_duration")
_TRIALS = ("measure", *_SWEEPS, "TrialResult", "SweepResult", "SweepReport")

_MODULE_OF = {
    **dict.fromkeys(_ENERGY, "monitor"),
    **dict.fromkeys((*_POWER, *_TEMPERATURE), "power"),
    **dict.fromkeys((*_CARBON[:2], *_PRICE[:2]), "footprint"),
    **dict.fromkeys((*_CARBON[2:], *_MAPS, *_PRICE[2:], *_TARIFF), "providers"),
    **dict.fromkeys(_METRIC, "metric"),
    **dict.fromkeys(_PROFILE, "profile"),
    **dict.fromkeys((*_POWER_LIMIT, *_CALLBACK, *_BATCH_SIZE, *_BATCH_ERRORS), "optimizer"),
    **dict.fromkeys((*_BASE_ERRORS, *_GPU_LIMIT_ERRORS), "limits"),
    **dict.fromkeys((*_GPU, "get_gpus", *_CPU, "get_cpus", *_SOC, *_CHIP_ERRORS), "hardware"),
    **dict.fromkeys(_TRIALS, "trials"),
    **dict.fromkeys((*_FRAMEWORK, *_SCALER, *_SCRIPT), "utilities"),
}

ALIASES = {
    "zeus": ("__version__",),
    "zeus.monitor": (*_ENERGY, "PowerMonitor", *_TEMPERATURE),
    "zeus.monitor.energy": _ENERGY,
    "zeus.monitor.power": _POWER,
    "zeus.monitor.temperature": _TEMPERATURE,
    "zeus.monitor.carbon": (*_CARBON, *_MAPS),
    "zeus.monitor.price": (*_PRICE, *_TARIFF),
    "zeus.metric": _METRIC,
    "zeus.optimizer": _POWER_LIMIT[:1],
    "zeus.optimizer.power_limit": (*_POWER_LIMIT, *_PROFILE),
    "zeus.optimizer.batch_size": _BATCH_SIZE,
    "zeus.optimizer.batch_size.client": _BATCH_SIZE[:1],
    "zeus.optimizer.batch_size.common": _BATCH_SIZE[1:],
    "zeus.optimizer.batch_size.exceptions": _BATCH_ERRORS,
    "zeus.callback": _CALLBACK,
    "zeus.device": ("get_gpus", "get_cpus", "get_soc"),
    "zeus.device.gpu": ("get_gpus", *_GPU, *_GPU_LIMIT_ERRORS),
    "zeus.device.gpu.common": (*_GPU, *_GPU_LIMIT_ERRORS),
    "zeus.device.cpu": ("get_cpus", "CPUs", "ZeusCPUInitError"),
    "zeus.device.cpu.common": _CPU,
    "zeus.device.soc": _SOC,
    "zeus.device.soc.common": _SOC[1:],
    "zeus.device.exception": (*_BASE_ERRORS[1:], *_CHIP_ERRORS),
    "zeus.exception": _BASE_ERRORS[:1],
    "zeus.profile": _TRIALS,
    "zeus.utils.framework": _FRAMEWORK,
    "zeus.utils.testing": ("ReplayZeusMonitor",),
    "zeus.utils.env": ("get_env",),
    "zeus.utils.lat_lon": ("get_ip_lat_long",),
    "zeus.utils.lr_scaler": _SCALER,
    "zeus.show_env": ("show_env",),
}
"""The names of each module of Zeus."""

__all__ = [*sorted(_MODULE_OF.keys() - {_HUGGING_FACE}), "install"]


def _find(name: str) -> object:
    if name == "__version__":
        return __version__
    module = _MODULE_OF.get(name, name)  # a function in the module of its name
    found: object = getattr(import_module(f"{__name__}.{module}"), name)
    return found


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _find(name)
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
    if getattr(find("zeus"), "origin", None) is not None:  # None for a folder with this name
        return False
    made: dict[str, ModuleType] = {}
    for name in ALIASES:
        for depth in range(1, name.count(".") + 2):
            parent = ".".join(name.split(".")[:depth])
            if parent not in made:
                made[parent] = _package(parent, ALIASES.get(parent, ()))
                above, _, last = parent.rpartition(".")
                if above:
                    setattr(made[above], last, made[parent])
    made["zeus"].__wattspan__ = True  # type: ignore[attr-defined]
    modules.update(made)
    return True


def _package(name: str, exported: tuple[str, ...]) -> ModuleType:
    def find(wanted: str) -> object:
        if wanted not in exported:
            raise AttributeError(f"module {name!r} has no attribute {wanted!r}")
        return _find(wanted)

    module = ModuleType(name, "Zeus's names, answered by wattspan.compat.zeus.")
    module.__path__ = []
    module.__spec__ = spec_from_loader(name, None, is_package=True)  # which `find_spec` returns
    module.__all__ = [one for one in exported if one != _HUGGING_FACE]  # type: ignore[attr-defined]
    module.__getattr__ = find  # type: ignore[method-assign]
    return module
