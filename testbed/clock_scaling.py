"""Costs of a language model on a board whose SM clock is locked or reduced by a power cap.

Assumptions, argued physically and not measured here:

- Prefill is limited by computation: the time per prompt token and of its attention is inversely
  proportional to the SM clock.
- Decode is limited by memory, whose clock is constant. A part ``MEMORY_AT_SM_CLOCK`` of its time is
  spent in caches and the on-chip network, which run at the SM clock. Below ``SATURATION`` of the
  highest clock the SMs cannot keep the memory busy, so that the whole time is inversely
  proportional to the clock.
- The scheduler runs on the host: the overhead of an iteration is independent of the clock.
- Switching energy of an operation is proportional to the square of the voltage. A part ``ON_CHIP``
  of the energy of a memory access is on-chip; the rest belongs to the memory and is constant.
- Active power is leakage, proportional to the voltage, and a clock tree, proportional to the clock
  and the square of the voltage.

The voltage curve is that of the emulated board. Published figures in the same direction: draws of
137-300 W of 700 W for decode on an H200, up to 32 % less energy at under 1 % less throughput by
clock locks on models of about 4 billion parameters, and one model that lost 11.8 % at the first
clock step; the last one is no part of this law.
"""

from __future__ import annotations

from dataclasses import replace

from testbed.continuous_batching import ModelCosts
from wattspan.emulation.boards import Silicon

MEMORY_AT_SM_CLOCK = 0.1
SATURATION = 0.5
ON_CHIP = 0.5
LEAKAGE = 0.4
"""Part of active power that does not depend on the clock, apart from the voltage."""


def costs_at_clock(costs: ModelCosts, silicon: Silicon, mhz: int) -> ModelCosts:
    """``costs``, which are those at the highest clock of ``silicon``, at ``mhz``."""
    ratio = mhz / silicon.max_mhz
    voltage = silicon.voltage(ratio)
    compute = 1 / ratio
    memory = max(1 - MEMORY_AT_SM_CLOCK + MEMORY_AT_SM_CLOCK / ratio, SATURATION / ratio)
    access = 1 - ON_CHIP + ON_CHIP * voltage**2
    return replace(
        costs,
        token_time=costs.token_time * compute,
        attention_time=costs.attention_time * compute,
        weights_time=costs.weights_time * memory,
        context_time=costs.context_time * memory,
        active_power=costs.active_power * (LEAKAGE * voltage + (1 - LEAKAGE) * ratio * voltage**2),
        weights_energy=costs.weights_energy * access,
        context_energy=costs.context_energy * access,
        token_energy=costs.token_energy * voltage**2,
        attention_energy=costs.attention_energy * voltage**2,
    )
