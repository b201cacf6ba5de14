"""Waiting for a device to finish what it was given, on request only.

Work is queued on a GPU and runs later; without this, a window ends when the work was queued.
Nothing is imported here: a framework that the program has not loaded has queued nothing.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def torch() -> None:
    """Wait for PyTorch's current CUDA (or ROCm) device, if this process uses one."""
    module = sys.modules.get("torch")
    if module is not None and module.cuda.is_initialized():
        module.cuda.synchronize()


def jax() -> None:
    """Wait for every array that JAX still computes, and for its side effects."""
    module = sys.modules.get("jax")
    if module is not None:
        module.block_until_ready(module.live_arrays())
        module.effects_barrier()


_HOOKS = {"torch": torch, "jax": jax}


def hook(wanted: str | Callable[[], object]) -> Callable[[], object]:
    """The hook by its name, or the caller's own; ValueError for a name that is none."""
    if callable(wanted):
        return wanted
    try:
        return _HOOKS[wanted]
    except KeyError:
        raise ValueError(
            f'synchronize={wanted!r} is not known: give "torch", "jax" or a function '
            "that returns when the device is done."
        ) from None
