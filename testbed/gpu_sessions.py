"""Sessions with the libraries of both vendors, as their sources open them, and the actuators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wattspan.ports import SourceContext
from wattspan.sources.amdsmi.device import AmdSmiSettings, AmdSmiVendor
from wattspan.sources.gpu.session import GpuSession
from wattspan.sources.nvml.dcgm import DcgmExporter
from wattspan.sources.nvml.device import NvmlSettings, NvmlVendor
from wattspan.sources.nvml.processes import in_nested_pid_namespace


def nvml_session(
    nvml: Any,
    settings: NvmlSettings,
    context: SourceContext,
    *,
    nested: bool | None = None,
    driver_files: Path = Path("/nonexistent"),
) -> GpuSession:
    """``nested``: pids are those of a pid namespace; None to find out."""
    if nested is None:
        nested = not context.emulated and in_nested_pid_namespace()
    dcgm = DcgmExporter(settings.dcgm, context.clock) if settings.dcgm else None
    vendor = NvmlVendor(nvml, context.clock, nested=nested, dcgm=dcgm, driver_files=driver_files)
    return GpuSession(vendor, settings, context)


def amdsmi_session(amdsmi: Any, settings: AmdSmiSettings, context: SourceContext) -> GpuSession:
    return GpuSession(AmdSmiVendor(amdsmi, context.clock), settings, context)
