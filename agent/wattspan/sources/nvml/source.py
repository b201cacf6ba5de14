"""The ``nvml`` source plugin: NVIDIA GPUs through NVML."""

from __future__ import annotations

import ctypes
from typing import Any

from wattspan.ports import CounterSource, SourceContext, SourceError, SourcePlugin
from wattspan.sources.gpu.session import open_gpus
from wattspan.sources.nvml.dcgm import DcgmExporter
from wattspan.sources.nvml.device import NvmlSettings, NvmlVendor
from wattspan.sources.nvml.processes import in_nested_pid_namespace

LIBRARY = "libnvidia-ml.so.1"


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


def load_binding() -> Any:
    """The ``pynvml`` module, or None without the library; it costs 6 MB that others can save."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    import pynvml

    return pynvml


plugin = SourcePlugin(settings=NvmlSettings, open=open_nvml)
