"""Zeus's monitors on the agent's figures: change the import and keep the script.

    from wattspan.compat.zeus import ZeusMonitor  # was: from zeus.monitor import ZeusMonitor

Names and signatures are those of Zeus 0.16. Each name is loaded at its first use, and no framework
is ever imported.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from wattspan.compat.zeus.callback import Callback, CallbackSet

__all__ = [
    "Callback",
    "CallbackSet",
]

_MODULE_OF = {
    "Callback": "wattspan.compat.zeus.callback",
    "CallbackSet": "wattspan.compat.zeus.callback",
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
