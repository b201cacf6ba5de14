"""A host whose load and power feed a model of idle power, second by second."""

from collections.abc import Iterable

from wattspan.attribution.baseline import IdleModel
from wattspan.model import SECOND, Consumer, Instant, Usage, energy_at

CPUS = 4


def used(load: float, seconds: float = 1.0) -> Usage:
    """A process kept this part of all CPUs busy."""
    span = round(seconds * SECOND)
    spent = {Consumer(1, 1): round(load * CPUS * span)}
    return Usage("cpu", Instant(0, 0), Instant(span, 0), spent, capacity=CPUS * span)


def show(model: IdleModel, load: float, power: float) -> None:
    """One second at ``load``, in which ``power`` mW were drawn."""
    model.observe(energy_at(round(power), SECOND), SECOND, used(load))


def watch(
    model: IdleModel, loads: Iterable[float], idle: float = 40_000, per_cpu: float = 9_000
) -> None:
    """Seconds of a host whose power is ``idle`` mW plus ``per_cpu`` mW for each busy CPU."""
    for load in loads:
        show(model, load, idle + per_cpu * CPUS * load)
