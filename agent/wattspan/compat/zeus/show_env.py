"""``python -m wattspan.compat.zeus.show_env``: the devices that the monitors find here."""

# ruff: noqa: T201 - a command

from __future__ import annotations

import os
from importlib.metadata import distributions
from time import monotonic_ns

from wattspan.compat.zeus.hardware import GPUs
from wattspan.compat.zeus.limits import ZeusBaseGPUError
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import read_devices, request_json

_PACKAGES = ("wattspan", "torch", "jax", "cupy", "transformers")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def show_env() -> None:
    """Print the packages, the agent, the devices by index, and their limits."""
    installed = {str(one.name).lower(): one.version for one in distributions()}
    for name in _PACKAGES:
        print(f"{name}: {installed.get(name, 'not installed')}")
    for name in _VARIABLES:
        print(f"{name}: {os.environ.get(name, 'not set')}")
    try:
        agent = request_json("/v1/status", {})
        print(f"Agent: {agent['version']} on {agent['host_name']}")
        for device in read_devices(now := monotonic_ns(), now):
            print(f"    measures {device.name} ({device.id}, {device.provenance})")
        for gpu in GPUs().gpus:
            print(f"GPU {gpu.gpu_index} of this program: {gpu.get_name()}")
            try:
                low, high = gpu.get_power_management_limit_constraints()
                limit = gpu.get_power_management_limit() / 1000
                print(f"    power limit {limit:g} W, of {low / 1000:g} W to {high / 1000:g} W")
            except ZeusBaseGPUError as error:
                print(f"    no power limit: {error}")
    except MeasurementError as error:
        print(f"Not measured: {error}")


if __name__ == "__main__":
    show_env()
