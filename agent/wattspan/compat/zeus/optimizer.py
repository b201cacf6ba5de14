"""Zeus's power-limit optimizers, which ask the agent's tuner, and its optimum selectors.

Names and signatures are those of ``zeus.optimizer.power_limit`` 0.16. The optimizers neither
profile nor write a power limit: they report each step, and declare the job with the budget and the
objective of the selector. The tuner of the agent decides within the operator's settings.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from wattspan.compat.zeus.callback import Callback
from wattspan.integrations.huggingface import TrainerHooks
from wattspan.training.session import (
    TrainingSession,
    TuningRequest,
    is_local_rank_zero,
    start_session,
)

_log = logging.getLogger("wattspan")

NO_BUDGET = 1.0
"""The largest slowdown budget that an operator can allow."""


class GpuMonitor(Protocol):
    """A ``ZeusMonitor``, of which the optimizers read the list of GPUs only."""

    @property
    def gpu_indices(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class PowerLimitMeasurement:
    """The energy and time of some steps at one power limit: watts, joules, seconds."""

    power_limit: int
    energy: float
    time: float

    def __post_init__(self) -> None:
        for name in ("power_limit", "energy", "time"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ValueError(f"{name}={value!r} is not positive: give a measured value")


class OptimumSelector(ABC):
    """Selects one power limit from measurements."""

    @abstractmethod
    def select(self, measurements: list[PowerLimitMeasurement]) -> int:
        """The power limit in watts."""


class Energy(OptimumSelector):
    """The least energy, at any slowdown.

    The tuner keeps the operator's slowdown budget unless ``[autotune] declared = "allow"``.
    """

    def select(self, measurements: list[PowerLimitMeasurement]) -> int:
        """The power limit with the least energy."""
        return min(measurements, key=lambda one: one.energy).power_limit


class Time(OptimumSelector):
    """The least time."""

    def select(self, measurements: list[PowerLimitMeasurement]) -> int:
        """The power limit with the least time."""
        return min(measurements, key=lambda one: one.time).power_limit


class ZeusCost(OptimumSelector):
    """The least cost: eta · energy + (1 - eta) · maximum power · time, as in Zeus (NSDI '23)."""

    def __init__(self, eta_knob: float, world_size: int = 1) -> None:
        """ValueError for ``eta_knob`` outside of 0 to 1, or a ``world_size`` below 1."""
        if not 0 <= eta_knob <= 1:
            raise ValueError(f"eta_knob={eta_knob!r} is not a weight: give a number from 0 to 1")
        if world_size < 1:
            raise ValueError(f"world_size={world_size!r} is no number of GPUs: give 1 or more")
        self.eta_knob = eta_knob
        self.world_size = world_size

    def select(self, measurements: list[PowerLimitMeasurement]) -> int:
        """The power limit with the least cost."""
        power = max(one.power_limit for one in measurements) * self.world_size
        eta = self.eta_knob
        return min(
            measurements, key=lambda one: eta * one.energy + (1 - eta) * power * one.time
        ).power_limit


class MaxSlowdownConstraint(OptimumSelector):
    """The least energy within a slowdown.

    Zeus selects the lowest power limit within it, which can cost more energy than a higher one.
    """

    def __init__(self, factor: float) -> None:
        """``factor`` is the time relative to the maximum power limit. ValueError below 1."""
        if not (isfinite(factor) and factor >= 1):
            raise ValueError(
                f"factor={factor!r} is no slowdown factor: give 1 or more, 1.05 is 5 % slower"
            )
        self.factor = factor

    def select(self, measurements: list[PowerLimitMeasurement]) -> int:
        """The power limit with the least energy of those within the factor."""
        fastest = max(measurements, key=lambda one: one.power_limit).time
        within = [one for one in measurements if one.time <= self.factor * fastest]
        return min(within, key=lambda one: one.energy).power_limit


CUSTOM_SELECTOR = (
    "The tuner cannot run a selector of the application, so that the job is measured and not "
    "tuned. Give MaxSlowdownConstraint, ZeusCost, Time or Energy."
)


def tuning_request(selector: OptimumSelector) -> TuningRequest | None:
    """The wish that a selector expresses; None for a selector of the application."""
    kind = next((each for each in _KNOWN if isinstance(selector, each)), None)
    if kind is None or type(selector).select is not kind.select:
        return None
    if isinstance(selector, MaxSlowdownConstraint):
        return TuningRequest(max_slowdown=round(selector.factor - 1, 9), objective="energy")
    if isinstance(selector, ZeusCost):
        return TuningRequest(objective="cost", eta=selector.eta_knob)
    if kind is Time:
        return TuningRequest(objective="time")
    return TuningRequest(max_slowdown=NO_BUDGET, objective="energy")


_KNOWN: tuple[type[OptimumSelector], ...] = (MaxSlowdownConstraint, ZeusCost, Time, Energy)


def _prepare(
    monitor: GpuMonitor,
    selector: OptimumSelector | None,
    profile_path: str | Path | None,
    **steps: int,
) -> tuple[OptimumSelector, TuningRequest | None]:
    """The selector of an optimizer and its wish. ValueError for the values that Zeus refuses."""
    for name, value in steps.items():
        least = 1 if name in ("profile_steps", "pl_step") else 0
        if value < least:
            raise ValueError(f"{name}={value!r} is too small: give {least} or more")
    _log.info(
        "The agent's tuner does not use %s: it judges blocks of steps until a setting is certain.",
        ", ".join(steps),
    )
    if profile_path is not None:
        _log.warning(
            "The profile %s is neither read nor written: the agent keeps its own results. "
            "`wattspan tune explain` shows them.",
            profile_path,
        )
    selector = selector or ZeusCost(eta_knob=0.5, world_size=max(1, len(monitor.gpu_indices)))
    request = tuning_request(selector)
    if request is None:
        _log.warning("%s", CUSTOM_SELECTOR)
    return selector, request


class GlobalPowerLimitOptimizer(Callback):
    """Reports each step, and asks the agent to tune the power limit for the selector.

    A unit of work lasts from one ``on_step_begin`` to the next, and ends at ``on_step_end`` if an
    evaluation, or the end of an epoch, follows. The default selector is ``ZeusCost(0.5)``.
    """

    def __init__(
        self,
        monitor: GpuMonitor,
        optimum_selector: OptimumSelector | None = None,
        wait_steps: int = 1,
        warmup_steps: int = 10,
        profile_steps: int = 40,
        pl_step: int = 25,
        profile_path: str | Path | None = None,
    ) -> None:
        """ValueError for invalid options. ``monitor`` measures; it needs no right to set limits."""
        self.monitor = monitor
        self.optimum_selector, self._request = _prepare(
            monitor,
            optimum_selector,
            profile_path,
            wait_steps=wait_steps,
            warmup_steps=warmup_steps,
            profile_steps=profile_steps,
            pl_step=pl_step,
        )
        self._session: TrainingSession | None = None

    @property
    def declined(self) -> str | None:
        """The reason if the job is not tuned as asked; None before the first hook."""
        if self._request is None:
            return CUSTOM_SELECTOR
        return None if self._session is None else self._session.declined

    def on_train_begin(self) -> None:
        """Before the first step of training; the other hooks do it too."""
        self._started()

    def on_train_end(self) -> None:
        """After the training; the end of the process does it too."""
        if self._session is not None:
            self._session.complete_step()
            self._session.stop()
            self._session = None

    def on_epoch_begin(self) -> None:
        """Before the first step of an epoch."""
        self._started().begin_epoch()

    def on_epoch_end(self) -> None:
        """After the last step of an epoch, before its evaluation."""
        session = self._started()
        session.complete_step()
        session.end_epoch()

    def on_step_begin(self) -> None:
        """Before a step; the step before it is complete."""
        session = self._started()
        session.complete_step()
        session.begin_step()

    def on_step_end(self) -> None:
        """After a step."""
        self._started().complete_step()

    def on_evaluate(self, metric: float) -> None:
        """After an evaluation."""
        self._started().interrupt_late()

    def _started(self) -> TrainingSession:
        if self._session is None:
            self._session = self._start(self._request)
        return self._session

    def _start(self, request: TuningRequest | None) -> TrainingSession:
        return start_session(
            request or TuningRequest(), declares=request is not None and is_local_rank_zero()
        )


class HFOptimizerHooks(TrainerHooks):
    """The hooks of ``HFGlobalPowerLimitOptimizer`` without the base class of transformers."""

    def __init__(
        self,
        monitor: GpuMonitor,
        optimum_selector: OptimumSelector | None = None,
        wait_steps: int = 1,
        warmup_steps: int = 10,
        profile_steps: int = 40,
        pl_step: int = 25,
        profile_path: str | Path | None = None,
    ) -> None:
        """As ``GlobalPowerLimitOptimizer``."""
        self.monitor = monitor
        self.optimum_selector, request = _prepare(
            monitor,
            optimum_selector,
            profile_path,
            wait_steps=wait_steps,
            warmup_steps=warmup_steps,
            profile_steps=profile_steps,
            pl_step=pl_step,
        )
        super().__init__(**(request or TuningRequest())._asdict())
        self._declares = request is not None

    @property
    def declined(self) -> str | None:
        """The reason if the job is not tuned as asked; None before the training."""
        return super().declined if self._declares else CUSTOM_SELECTOR


if TYPE_CHECKING:
    from wattspan.integrations.huggingface import WattspanCallback

    class HFGlobalPowerLimitOptimizer(HFOptimizerHooks, WattspanCallback): ...


@functools.cache
def _huggingface_class() -> type[HFOptimizerHooks]:
    from wattspan.integrations.huggingface import WattspanCallback

    class HFGlobalPowerLimitOptimizer(HFOptimizerHooks, WattspanCallback):
        __doc__ = HFOptimizerHooks.__doc__

    HFGlobalPowerLimitOptimizer.__qualname__ = "HFGlobalPowerLimitOptimizer"
    return HFGlobalPowerLimitOptimizer


def __getattr__(name: str) -> Any:
    if name == "HFGlobalPowerLimitOptimizer":
        return _huggingface_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
