"""Scope of a GPU's energy counter: the GPU, or the module of a superchip with its CPU and memory.

On a GH200 the counter is that of the module (zeus#172). A superchip is recognised by its answer to
the power of the scope "module". Its counter is taken for the module's, unless the energies of both
scopes show that it is the GPU's.
"""

from __future__ import annotations

from wattspan.model import Instant, Microjoules, Milliwatts
from wattspan.sources.energy_meter import PowerIntegral

MIN_POWER = Milliwatts(5_000)
"""A module draws more than its GPU by this and more: the stated error of a sensor."""

MIN_DIFFERENCE = 500_000_000
"""Microjoules between the energies of both scopes from which they tell the counter's scope."""


class CounterScope:
    """The scope of one counter. ``module``: it counts more than the GPU."""

    def __init__(self) -> None:
        self.module = False
        self._of_gpu, self._of_module = PowerIntegral(), PowerIntegral()

    def observe(
        self,
        at: Instant,
        counter: Microjoules | None,
        gpu: Milliwatts | None,
        module: Milliwatts | None,
    ) -> None:
        """Add the values read at one time; ``module`` is None of a GPU without one.

        Without the power of the GPU, nothing shows that the counter is the GPU's.
        """
        if gpu is None:
            self.module |= module is not None
            return
        if module is None or module - gpu < MIN_POWER:
            return
        self._of_gpu.feed(at, gpu, counter)
        self._of_module.feed(at, module, counter)
        inner, counted = self._of_gpu.compared or (0, 0)
        outer, _ = self._of_module.compared or (0, 0)
        known = outer - inner >= MIN_DIFFERENCE
        self.module = not known or abs(counted - outer) <= abs(counted - inner)
