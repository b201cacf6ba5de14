"""The configuration: flag over environment over file over default, and where each came from."""

from wattspan.config.control import (
    AutotuneSettings,
    CapsSettings,
    FixedCapSettings,
    PrioritySettings,
    TunedJobSettings,
)
from wattspan.config.footprint import CarbonSettings, CostSettings
from wattspan.config.loading import DEFAULT_PATH, changed_keys, environment_variable, load
from wattspan.config.loading import ENVIRONMENT_PREFIX as ENVIRONMENT_PREFIX
from wattspan.config.tables import (
    TABLES,
    AccessSettings,
    AgentSettings,
    Config,
    ConfigSchema,
    EmulationSettings,
    FlagValue,
    ProcessesSettings,
    SettingOrigin,
    SpansSettings,
    StoreSettings,
)

__all__ = [
    "DEFAULT_PATH",
    "ENVIRONMENT_PREFIX",
    "TABLES",
    "AccessSettings",
    "AgentSettings",
    "AutotuneSettings",
    "CapsSettings",
    "CarbonSettings",
    "Config",
    "ConfigSchema",
    "CostSettings",
    "EmulationSettings",
    "FixedCapSettings",
    "FlagValue",
    "PrioritySettings",
    "ProcessesSettings",
    "SettingOrigin",
    "SpansSettings",
    "StoreSettings",
    "TunedJobSettings",
    "changed_keys",
    "environment_variable",
    "load",
]
