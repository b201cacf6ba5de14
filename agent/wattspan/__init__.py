"""wattspan: attribution of energy to processes and spans, and tuning of power limits.

Names for applications are loaded at their first use, so that the import of this package is cheap.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from wattspan.frontier.recommendation import Frontier
    from wattspan.sdk import (
        AgentUnavailableError,
        MeasurementError,
        NotMeasuredError,
        RefusedError,
        WindowError,
    )
    from wattspan.sdk.client import Device, Energy, Measurement, NotSettledError
    from wattspan.sdk.measured import measured
    from wattspan.sdk.window import Window, window

    __version__: str

__all__ = [
    "AgentUnavailableError",
    "Device",
    "Energy",
    "Frontier",
    "Measurement",
    "MeasurementError",
    "NotMeasuredError",
    "NotSettledError",
    "RefusedError",
    "Window",
    "WindowError",
    "__version__",
    "measured",
    "window",
]

_MODULE_OF = {
    "Device": "wattspan.sdk.client",
    "Energy": "wattspan.sdk.client",
    "Frontier": "wattspan.frontier.recommendation",
    "Measurement": "wattspan.sdk.client",
    "NotSettledError": "wattspan.sdk.client",
    "Window": "wattspan.sdk.window",
    "measured": "wattspan.sdk.measured",
    "window": "wattspan.sdk.window",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _version()
    elif name in __all__:
        from importlib import import_module

        value = getattr(import_module(_MODULE_OF.get(name, "wattspan.sdk")), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("wattspan")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"
