"""The ``nvml`` source plugin: NVIDIA GPUs through NVML."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from wattspan.ports import CounterSource, SourceContext, SourceError, SourcePlugin
from wattspan.sources.gpu.session import open_gpus
from wattspan.sources.nvml.dcgm import DcgmExporter
from wattspan.sources.nvml.device import NvmlSettings, NvmlVendor
from wattspan.sources.nvml.processes import in_nested_pid_namespace

LIBRARY = "libnvidia-ml.so.1"

LIBRARY_PLACES = (
    "/usr/lib/wsl/lib",  # WSL
    "/run/opengl-driver/lib",  # NixOS
    "/usr/local/nvidia/lib64",  # containers of GKE and others with an installer of the driver
    "/run/nvidia/driver/usr/lib64",  # the driver in a container of NVIDIA's operator
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/run/nvidia/driver/usr/lib/aarch64-linux-gnu",
)
"""Directories of the library that the system's loader may not search. Root alone can make them."""


def open_nvml(settings: NvmlSettings, context: SourceContext) -> CounterSource | None:
    """The GPUs of this host; None without NVML, unless ``enabled`` is true."""
    if settings.enabled is False:
        return None
    nvml = _nvml_of(context)
    if nvml is None:
        if settings.enabled is True:
            raise SourceError(
                f"Cannot read GPUs: {LIBRARY} was not found. Install NVIDIA's driver, or set"
                ' sources.nvml.enabled = "auto".'
            )
        return None
    nested = not context.emulated and in_nested_pid_namespace()
    dcgm = DcgmExporter(settings.dcgm, context.clock) if settings.dcgm else None
    vendor = NvmlVendor(nvml, context.clock, nested=nested, dcgm=dcgm)
    return open_gpus(vendor, settings, context)


def _nvml_of(context: SourceContext) -> Any:
    """The NVML to ask: an emulated host's own, and never the real one in its stead."""
    return context.nvml if context.emulated or context.nvml is not None else load_binding()


def load_binding(places: Iterable[str] = LIBRARY_PLACES) -> Any:
    """The ``pynvml`` module, or None without the library; it costs 6 MB that others can save.

    The loader's own library comes first, then that in one of ``places``: the module asks for it by
    its name, under which the loader has it from then on.
    """
    for name in (LIBRARY, *(f"{place}/{LIBRARY}" for place in places)):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        import pynvml

        return pynvml
    return None


plugin = SourcePlugin(settings=NvmlSettings, open=open_nvml)
