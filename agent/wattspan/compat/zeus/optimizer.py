"""Zeus's callbacks and power-limit optimizers, which ask the agent's tuner.

Names and signatures are those of ``zeus.callback`` and ``zeus.optimizer.power_limit`` 0.16. The
optimizers neither profile nor write a power limit: they report each step, and declare the job with
the budget and the objective of the selector. The tuner of the agent decides within the operator's
settings.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from wattspan.compat.zeus.limits import ZeusBaseError
from wattspan.compat.zeus.profile import (
    Energy,
    MaxSlowdownConstraint,
    OptimumSelector,
    ProfileExport,
    Time,
    ZeusCost,
    read_profile,
)
from wattspan.integrations import lazy_class
from wattspan.integrations.huggingface import TrainerHooks
from wattspan.training.loop import TrainingCallback
from wattspan.training.session import TrainingSession, TuningRequest, is_local_rank_zero

_log = logging.getLogger("wattspan")


class Callback:
    """The base class of callbacks; each hook does nothing."""

    def on_train_begin(self) -> None:
        """Before the first step of training."""

    def on_train_end(self) -> None:
        """After the last step of training."""

    def on_epoch_begin(self) -> None:
        """Before the first step of an epoch."""

    def on_epoch_end(self) -> None:
        """After the last step of an epoch."""

    def on_step_begin(self) -> None:
        """Before a step."""

    def on_step_end(self) -> None:
        """After a step."""

    def on_evaluate(self, metric: float) -> None:
        """After an evaluation, with its result."""

    def on_instruction_begin(self, name: str) -> None:
        """Before an instruction of a pipeline, such as ``forward``."""

    def on_instruction_end(self, name: str) -> None:
        """After an instruction of a pipeline."""


class CallbackSet(Callback):
    """Calls each hook on several callbacks, in their order; once on one that is given twice."""

    def __init__(self, callbacks: list[Callback]) -> None:
        once = list({id(each): each for each in callbacks}.values())
        if len(once) < len(callbacks):
            _log.warning(
                "A callback is attached twice to a CallbackSet; its hooks are called once. "
                "Remove one of them."
            )
            callbacks = once
        self.callbacks = callbacks


def _on_each(hook: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(hook)
    def call(self: CallbackSet, *arguments: Any, **options: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook.__name__)(*arguments, **options)

    return call


for _hook in (one for name, one in vars(Callback).items() if name.startswith("on_")):
    setattr(CallbackSet, _hook.__name__, _on_each(_hook))


NO_BUDGET = 1.0
"""The largest slowdown budget that an operator can allow."""


class GpuMonitor(Protocol):
    """A ``ZeusMonitor``, of which the optimizers read the list of GPUs only."""

    @property
    def gpu_indices(self) -> Sequence[int]: ...


CUSTOM_SELECTOR = (
    "A selector of the application chooses from a profile, and there is none yet, so that the job "
    "is measured and not tuned. Give profile_path the file of `wattspan frontier run`, or of an "
    "earlier training with MaxSlowdownConstraint, ZeusCost, Time or Energy."
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
) -> tuple[OptimumSelector, TuningRequest | None, ProfileExport | None]:
    """The selector of an optimizer, its request, None if the job is not tuned, and its export.

    ValueError for the values that Zeus refuses, and for a file that is no profile.
    """
    for name, value in steps.items():
        least = 1 if name in ("profile_steps", "pl_step") else 0
        if value < least:
            raise ValueError(f"{name}={value!r} is too small: give {least} or more")
    _log.info(
        "The agent's tuner does not use %s: it judges blocks of steps until a setting is certain.",
        ", ".join(steps),
    )
    selector = selector or ZeusCost(eta_knob=0.5, world_size=max(1, len(monitor.gpu_indices)))
    request = tuning_request(selector)
    path = None if profile_path is None else Path(profile_path)
    if path is None or not path.exists():
        if request is None:
            _log.warning("%s", CUSTOM_SELECTOR)
        export = None if path is None else ProfileExport(path, steps["profile_steps"])
        return selector, request, export
    watts = selector.select(read_profile(path))
    _log.info("%d W is the choice from %s. The agent certifies it before it is held.", watts, path)
    if request is None:  # the selector decides, as far as the operator's budget permits
        request = TuningRequest(objective="energy", floor_watts=watts)
    return selector, request._replace(first_watts=watts).check(), None


class _PowerLimitOptimizer(TrainingCallback):
    """The options of Zeus's optimizers, and the request that follows from them."""

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
        """ValueError for invalid options. ``monitor`` measures; it needs no right to set limits.

        ``profile_path``: an existing profile, or a file of ``wattspan frontier run``, is what the
        selector chooses from; the agent certifies its choice first. A new file gets what the agent
        has tried, at the end of each epoch and of the training.
        """
        self.monitor = monitor
        self.optimum_selector, request, self._export = _prepare(
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
        self._before_end = None if self._export is None else self._export.write

    @property
    def declined(self) -> str | None:
        """The reason if the job is not tuned as asked; None before the training."""
        return super().declined if self._declares else CUSTOM_SELECTOR


class GlobalPowerLimitOptimizer(_PowerLimitOptimizer, Callback):
    """Reports each step, and asks the agent to tune the power limit for the selector.

    A unit of work lasts from one ``on_step_begin`` to the next, and ends at ``on_step_end`` if an
    evaluation, or the end of an epoch, follows. The default selector is ``ZeusCost(0.5)``.
    """

    def on_train_begin(self) -> None:
        """Before the first step of training; the other hooks do it too."""
        self._started()

    def on_train_end(self) -> None:
        """After the training; the end of the process does it too."""
        if self._session is not None:
            self._session.complete_step()
            self._stop()
            self._session = None

    def on_epoch_begin(self) -> None:
        """Before the first step of an epoch."""
        self._started().begin_epoch()

    def on_epoch_end(self) -> None:
        """After the last step of an epoch, before its evaluation."""
        session = self._started()
        session.complete_step()
        session.end_epoch()
        if self._export is not None:
            self._export.write(session.declaration)

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
            return self._start(declares=is_local_rank_zero(), steps=0, epochs=0)
        return self._session


class HFOptimizerHooks(_PowerLimitOptimizer, TrainerHooks):
    """The hooks of ``HFGlobalPowerLimitOptimizer`` without the base class of transformers."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        super().on_epoch_end(args, state, control, **options)
        if self._export is not None and (session := self._session_of(state)):
            self._export.write(session.declaration)


class ZeusBSOBadOperationError(ZeusBaseError):
    """A rank other than 0 asks for a batch size."""


class ZeusBSOTrainFailError(ZeusBaseError):
    """The training ends without its target metric, or costs too much."""


class JobSpec(SimpleNamespace):
    """The terms of a recurring training by Zeus's names, which BatchSizeOptimizer checks."""


_DEFAULT_TERMS = {"target_metric": 0.5, "higher_is_better_metric": True, "max_epochs": 100}


class BatchSizeOptimizer(Callback):
    """``wattspan.recurring.BatchSizeOptimizer`` by Zeus's names; ``server_url`` is not used.

    Rank 0 of a training chooses the size, measures and reports; the others do nothing.
    """

    def __init__(self, monitor: GpuMonitor, server_url: str, job: JobSpec, rank: int = 0) -> None:
        """ValueError or TypeError for invalid terms. Those that begin with ``mab_`` do nothing."""
        recurring: Any = import_module("wattspan.recurring.optimizer")  # imports this package
        given = {key: one for key, one in vars(job).items() if not key.startswith("mab_")}
        given = {**_DEFAULT_TERMS, **given}
        prefix = given.pop("job_id_prefix", None)
        meter = recurring.AgentMeter(gpu_indices=monitor.gpu_indices or None)
        if given.get("beta_knob", 0) is None:
            given["beta_knob"] = import_module("wattspan.recurring.jobs").MAX_FIGURE
        self._runs = recurring.BatchSizeOptimizer(
            given.pop("job_id", None) or prefix, meter=meter, **given
        )
        self._terms, self.monitor, self.rank = given, monitor, rank
        self.current_batch_size = self.trial_number = 0

    @property
    def training_finished(self) -> bool:
        """True once the target metric is reached, or the run is not worth its further cost."""
        return bool(self._runs.training_finished)

    def get_batch_size(self) -> int:
        """The batch size of this run; the default one, after a warning, without an agent."""
        if self.rank:
            raise ZeusBSOBadOperationError("Only rank 0 chooses the batch size. Ask there.")
        self.current_batch_size = self._runs.get_batch_size()
        return self.current_batch_size

    def on_train_begin(self) -> None:
        """Begin to measure the run."""
        if not self.rank:
            self._runs.on_train_begin()

    def on_evaluate(self, metric: float) -> None:
        """Report an epoch. ZeusBSOTrainFailError if the run ends without the target metric."""
        if self.rank or self.training_finished:
            return
        self._runs.on_evaluate(metric)
        short = self._terms["target_metric"] - metric
        if not self._terms["higher_is_better_metric"]:
            short = -short
        if self._runs.training_finished and short > 0:
            raise ZeusBSOTrainFailError(
                f"Batch size {self.current_batch_size} costs too much, or has had all its epochs. "
                "Start the training again: another size is tried."
            )


if TYPE_CHECKING:
    from wattspan.integrations.huggingface import WattspanCallback

    class HFGlobalPowerLimitOptimizer(HFOptimizerHooks, WattspanCallback): ...


def _huggingface_base() -> type:
    from wattspan.integrations.huggingface import WattspanCallback

    base: type = WattspanCallback
    return base


__getattr__ = lazy_class("HFGlobalPowerLimitOptimizer", HFOptimizerHooks, _huggingface_base)
