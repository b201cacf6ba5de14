"""Waits for queued GPU work through a framework that the program has loaded.

A framework that is not loaded has queued nothing, so this module imports none.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from wattspan.sdk.window import finish_jax

FRAMEWORKS = ("torch", "jax", "cupy")


class DeviceSynchronizer:
    """Waits for all work on some CUDA devices; warns once where there is nothing to wait with.

    ValueError for an unknown framework.
    """

    def __init__(self, framework: str, modules: Mapping[str, Any] = sys.modules) -> None:
        if framework not in FRAMEWORKS:
            raise ValueError(
                f"sync_execution_with={framework!r} is not known: "
                f"write one of {', '.join(FRAMEWORKS)}."
            )
        self.framework = framework
        self._modules = modules
        self._warned = False

    def wait(self, devices: Sequence[int]) -> None:
        """Return when the work queued on each of ``devices`` is done."""
        module = self._modules.get(self.framework)
        if module is None:
            self._warn("the program has not imported it")
        elif self.framework == "torch":
            if not module.cuda.is_available():
                self._warn("it has no CUDA device")
            elif module.cuda.is_initialized():
                for device in devices:
                    module.cuda.synchronize(device)
        elif self.framework == "cupy":
            for device in devices:
                module.cuda.Device(device).synchronize()
        else:
            finish_jax(module)

    def _warn(self, cause: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Windows do not wait for GPU work through {self.framework}: {cause}. Pass "
                "sync_execution=False, or sync_execution_with= another framework.",
                RuntimeWarning,
                stacklevel=5,
            )
