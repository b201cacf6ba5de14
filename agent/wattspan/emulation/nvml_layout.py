"""The file through which several processes see the same emulated GPUs: its one description.

These structures *are* the layout; the C library's header is generated from them (see
``library_header``), so that it exists once. Everything is little-endian and naturally aligned.

The owner writes ``Live`` between two increments of the GPU's ``sequence``: odd means half
written. A reader copies, takes the time, and copies again if the sequence moved. Since the owner
takes *its* time after making the sequence odd, no reader can extrapolate past a change of power,
and the energy counter never runs backwards. The words outside ``Live`` are single aligned
stores; those called ``request`` are written by clients.
"""

from __future__ import annotations

import ctypes

MAGIC = 0x5550_4745_5053_4157  # "WASPEGPU"
VERSION = 1
MAX_GPUS = 16
MAX_PROCESSES = 64
MAX_SAMPLES = 72


class ProcessEntry(ctypes.LittleEndianStructure):
    _fields_ = (
        ("pid", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),  # index into KINDS
        ("memory", ctypes.c_uint64),  # bytes
        ("progress", ctypes.c_uint64),  # units of work done, in millionths
        ("instance", ctypes.c_uint32),  # MIG GPU instance; all ones: none
        ("reserved", ctypes.c_uint32),
    )


class SampleEntry(ctypes.LittleEndianStructure):
    _fields_ = (
        ("stamp", ctypes.c_uint64),  # Unix microseconds
        ("pid", ctypes.c_uint32),
        ("sm", ctypes.c_uint32),  # percent
        ("memory", ctypes.c_uint32),  # percent
        ("reserved", ctypes.c_uint32),
    )


class Identity(ctypes.LittleEndianStructure):
    """What never changes."""

    _fields_ = (
        ("name", ctypes.c_char * 96),
        ("uuid", ctypes.c_char * 80),
        ("serial", ctypes.c_char * 32),
        ("bus_id", ctypes.c_char * 32),  # 00000000:17:00.0
        ("bus_id_legacy", ctypes.c_char * 16),  # 0000:17:00.0
        ("domain", ctypes.c_uint32),
        ("bus", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("pci_device", ctypes.c_uint32),
        ("architecture", ctypes.c_uint32),
        ("brand", ctypes.c_uint32),
        ("compute_major", ctypes.c_uint32),
        ("compute_minor", ctypes.c_uint32),
        ("multiprocessors", ctypes.c_uint32),
        ("limit_min", ctypes.c_uint32),  # mW
        ("limit_default", ctypes.c_uint32),
        ("limit_max", ctypes.c_uint32),
        ("clock_min", ctypes.c_uint32),  # MHz
        ("clock_max", ctypes.c_uint32),
        ("clock_step", ctypes.c_uint32),
        ("memory_clock", ctypes.c_uint32),
        ("usage_is_average", ctypes.c_uint32),  # what nvmlDeviceGetPowerUsage returns
        ("has_average", ctypes.c_uint32),  # whether field 185 is supported
        ("memory_total", ctypes.c_uint64),  # bytes
        ("memory_reserved", ctypes.c_uint64),
        ("counter_step", ctypes.c_uint64),  # ns; 0: there is no energy counter
        ("born", ctypes.c_uint64),  # ns of the monotonic clock: edges lie whole steps after it
    )


class Live(ctypes.LittleEndianStructure):
    """What the owner rewrites at every step. ``counter`` is what a client may see of energy."""

    _fields_ = (
        ("at", ctypes.c_uint64),  # ns of the monotonic clock
        ("energy", ctypes.c_uint64),  # uJ at ``at``, the truth
        ("counter", ctypes.c_uint64),  # uJ at ``at`` since the counter was last reset
        ("latched", ctypes.c_uint64),  # uJ at the counter's latest edge up to ``at``
        ("energy_rest", ctypes.c_uint32),  # pJ beyond ``energy``
        ("counter_rest", ctypes.c_uint32),  # pJ beyond ``counter``
        ("power", ctypes.c_uint32),  # mW from ``at`` on, the truth
        ("power_instant", ctypes.c_uint32),  # mW, as the sensor says
        ("power_average", ctypes.c_uint32),
        ("enforced", ctypes.c_uint32),  # mW
        ("clock", ctypes.c_uint32),  # MHz
        ("utilisation", ctypes.c_uint32),  # percent
        ("memory_utilisation", ctypes.c_uint32),
        ("temperature", ctypes.c_uint32),  # degrees Celsius
        ("reasons", ctypes.c_uint64),  # nvmlClocksEventReason*
        ("capped_ns", ctypes.c_uint64),
        ("sw_thermal_ns", ctypes.c_uint64),
        ("hw_thermal_ns", ctypes.c_uint64),
        ("power_brake_ns", ctypes.c_uint64),
        ("memory_used", ctypes.c_uint64),  # bytes
        ("processes", ctypes.c_uint32),
        ("samples", ctypes.c_uint32),
        ("process", ProcessEntry * MAX_PROCESSES),
        ("sample", SampleEntry * MAX_SAMPLES),  # oldest first
    )


class GpuRecord(ctypes.LittleEndianStructure):
    _fields_ = (
        ("identity", Identity),
        ("sequence", ctypes.c_uint32),
        ("faults", ctypes.c_uint32),  # FAULT_*
        ("error", ctypes.c_uint32),  # if not 0, every call on the GPU returns it
        ("mig", ctypes.c_uint32),
        ("limit_request", ctypes.c_uint64),  # serial << 32 | mW
        ("clock_request", ctypes.c_uint64),  # serial << 48 | lowest << 24 | highest MHz; 0: none
        ("memory_clock_request", ctypes.c_uint64),  # likewise
        ("persistence_request", ctypes.c_uint32),
        ("xid", ctypes.c_uint32),
        ("xid_serial", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("live", Live),
    )


class Header(ctypes.LittleEndianStructure):
    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("version", ctypes.c_uint32),
        ("gpus", ctypes.c_uint32),
        ("error", ctypes.c_uint32),  # if not 0, every call returns it: 9 is "driver not loaded"
        ("hang", ctypes.c_uint32),  # every call blocks while it is not 0
        ("driver_version", ctypes.c_char * 80),
        ("nvml_version", ctypes.c_char * 80),
        ("cuda_version", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class HostRecord(ctypes.LittleEndianStructure):
    """The whole file."""

    _fields_ = (("header", Header), ("gpu", GpuRecord * MAX_GPUS))


STRUCTURES = (ProcessEntry, SampleEntry, Identity, Live, GpuRecord, Header, HostRecord)

FAULT_HANG = 1  # calls on the GPU block
FAULT_NO_PERMISSION = 2  # setters are refused
FAULT_NO_COUNTER = 4  # no energy counter
FAULT_NO_POWER = 8  # no power reading
FAULT_NO_PROCESSES = 16  # no process lists and no process utilisation
FAULT_DEAF = 32  # setters of limits succeed, and nothing comes of it

KINDS = ("compute", "graphics", "mps")
NO_INSTANCE = 0xFFFF_FFFF
ENVIRONMENT = "WATTSPAN_EMULATED_GPUS"  # names the file for the C library

CONSTANTS = {
    name: value for name, value in globals().items() if name.isupper() and isinstance(value, int)
}
