"""NVML calls that say which processes use a GPU, and how much."""

from __future__ import annotations

from typing import Any

from wattspan.emulation.nvml_calls import (
    NOT_FOUND,
    NOT_SUPPORTED,
    Device,
    Refused,
    device_call,
    number,
    put_rows,
)
from wattspan.emulation.nvml_layout import FAULT_NO_PROCESSES, KINDS, NO_INSTANCE


def _list_processes(device: Device, kind: str, count: Any, rows: Any) -> None:
    device.refuse_if(FAULT_NO_PROCESSES)
    live, wanted = device.live, KINDS.index(kind)
    entries = [live.process[place] for place in range(live.processes)]
    put_rows(
        count,
        rows,
        [
            (entry.pid, entry.memory, entry.instance, _compute_instance(entry.instance))
            for entry in entries
            if entry.kind == wanted and device.instance in {0, entry.instance}
        ],
    )


def _compute_instance(instance: int) -> int:
    return NO_INSTANCE if instance == NO_INSTANCE else 0


@device_call("nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3")
def compute_processes(device: Device, count: Any, rows: Any) -> None:
    _list_processes(device, "compute", count, rows)


@device_call("nvmlDeviceGetGraphicsRunningProcesses_v2", "nvmlDeviceGetGraphicsRunningProcesses_v3")
def graphics_processes(device: Device, count: Any, rows: Any) -> None:
    _list_processes(device, "graphics", count, rows)


@device_call(
    "nvmlDeviceGetMPSComputeRunningProcesses_v2", "nvmlDeviceGetMPSComputeRunningProcesses_v3"
)
def mps_processes(device: Device, count: Any, rows: Any) -> None:
    _list_processes(device, "mps", count, rows)


@device_call("nvmlDeviceGetProcessUtilization")
def process_utilisation(device: Device, rows: Any, count: Any, last_seen: Any) -> None:
    """Samples newer than ``last_seen``; only of processes that did something."""
    device.whole().refuse_if(FAULT_NO_PROCESSES)
    if device.record.mig:
        raise Refused(NOT_SUPPORTED)
    live = device.live
    samples = [live.sample[place] for place in range(live.samples)]
    newer = [
        (sample.pid, sample.stamp, sample.sm, sample.memory, 0, 0)
        for sample in samples
        if sample.stamp > number(last_seen)
    ]
    if not newer:
        raise Refused(NOT_FOUND)
    put_rows(count, rows, newer)
