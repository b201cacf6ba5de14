"""The configuration: flag over environment over file over default, with the origin of values."""

from wattspan.config.loading import changed_keys, environment_variable, load, without_settings
from wattspan.config.published import PublishedAgent, find_published, publish, withdraw
from wattspan.config.settings import (
    TABLES,
    AccessSettings,
    AgentSettings,
    Config,
    ConfigSchema,
    EmulationSettings,
    FlagValue,
    SettingOrigin,
    SpansSettings,
    StoreSettings,
)
from wattspan.config.tables import (
    CapsSettings,
    CarbonSettings,
    CostSettings,
    FleetSettings,
    ServingEngineSettings,
    ServingSettings,
)
from wattspan.config.tuning_settings import (
    AutotuneSettings,
    LatencyPercentile,
    LatencySource,
    TunedJobSettings,
)

__all__ = [
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
    "FlagValue",
    "FleetSettings",
    "LatencyPercentile",
    "LatencySource",
    "PublishedAgent",
    "ServingEngineSettings",
    "ServingSettings",
    "SettingOrigin",
    "SpansSettings",
    "StoreSettings",
    "TunedJobSettings",
    "changed_keys",
    "environment_variable",
    "find_published",
    "load",
    "publish",
    "withdraw",
    "without_settings",
]
