"""Modules in place of PyTorch, JAX and Hugging Face's, which compute nothing.

With them an example of Zeus runs to its end without a GPU, a model or a data set, and calls Zeus
as often as it would. ``python -m testbed.framework_stand_ins SCRIPT [ARGUMENT]...`` runs a script.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

FRAMEWORKS = frozenset(
    (
        *("datasets", "evaluate", "jax", "peft", "tensorboardX", "torch", "torchvision", "tqdm"),
        *("transformers", "trl"),
    )
)
LENGTH = 2
"""Items of everything: batches of a loader, tensors of a batch, results of a function."""

SIZE = 4
"""What ``len`` says of everything."""

STEPS = 3
"""Steps of a trainer of Hugging Face."""

LONGEST_PAUSE = 0.2  # seconds
BLOCKING = frozenset(("block_until_ready", "recv"))
"""Functions that last so long."""

VALUES = {
    "compute": {"accuracy": 0.6},
    "get_process_log_level": 30,
    "get_rank": 0,
    "is_initialized": False,
    "keys": (),
}
"""Results of functions of which an example, or Zeus's interface, needs a certain one."""


class StandIn:
    """Any object: a tensor, a function, a class. All that is done with it gives another one."""

    def __init__(self, *given: Any, **_: Any) -> None:
        self._name = given[0] if given else ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        if self._name in BLOCKING:
            time.sleep(LONGEST_PAUSE)
        return VALUES.get(self._name, StandIn())

    def __iter__(self) -> Iterator[Any]:
        return iter([StandIn() for _ in range(LENGTH)])

    def __len__(self) -> int:
        return SIZE

    def __contains__(self, _: object) -> bool:
        return True

    def __getitem__(self, _: object) -> Any:
        return StandIn()

    def __setitem__(self, _: object, __: object) -> None:
        pass

    def __enter__(self) -> Any:
        return StandIn()

    def __exit__(self, *_: object) -> None:
        pass

    def __float__(self) -> float:
        return 1.0

    def __int__(self) -> int:
        return 1

    def __lt__(self, _: object) -> bool:
        return False

    def __format__(self, form: str) -> str:
        return format(1.0, form) if form else "<stand-in>"

    def __fspath__(self) -> str:
        return "/nonexistent"

    def _computed(self, _: object) -> Any:
        return StandIn()

    __gt__ = __lt__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _computed
    __truediv__ = __rtruediv__ = __matmul__ = _computed


class Module(ModuleType):
    """A module of a framework."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(name)


class TrainerCallback:
    """The base class of callbacks of Hugging Face's trainers."""


class Trainer(StandIn):
    """Calls the hooks of its callbacks, as a training of one epoch does."""

    def __init__(self, *, callbacks: Sequence[Any], **_: Any) -> None:
        super().__init__()
        self._callbacks = callbacks

    def train(self, **_: Any) -> Any:
        state = SimpleNamespace(
            epoch=0.0,
            global_step=0,
            is_local_process_zero=True,
            is_world_process_zero=True,
            max_steps=STEPS,
            num_input_tokens_seen=0,
            num_train_epochs=1,
            train_batch_size=1,
        )
        names = ("evaluate", "save", "epoch_stop", "training_stop")
        control = SimpleNamespace(**{f"should_{name}": False for name in names})
        steps = ["on_step_begin", "on_step_end"] * STEPS
        for hook in ("on_train_begin", "on_epoch_begin", *steps, "on_epoch_end", "on_train_end"):
            state.global_step += hook == "on_step_end"
            for callback in self._callbacks:
                getattr(callback, hook)(SimpleNamespace(train_batch_size=1), state, control)
        return StandIn()


class HfArgumentParser:
    """Arguments for a local file; the dataclasses of a script have their own defaults."""

    def __init__(self, kinds: Any) -> None:
        self._kinds = kinds if isinstance(kinds, tuple) else (kinds,)

    def parse_args_into_dataclasses(self) -> list[Any]:
        return [self._parsed(kind) for kind in self._kinds]

    @staticmethod
    def _parsed(kind: Any) -> Any:
        if not dataclasses.is_dataclass(kind):
            return StandIn()
        given = {
            "model_name_or_path": "model",
            "train_file": "train.txt",
            "validation_file": "validation.txt",
        }
        names = {field.name for field in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in given.items() if name in names})


PRESENT: dict[str, dict[str, Any]] = {
    "torchvision.models": {"resnet18": StandIn("resnet18")},
    "transformers": {
        "HfArgumentParser": HfArgumentParser,
        "MODEL_FOR_CAUSAL_LM_MAPPING": {},
        "Trainer": Trainer,
        "TrainerCallback": TrainerCallback,
    },
    "trl": {"SFTTrainer": Trainer},
}
"""Names that need more than a StandIn, by module."""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds each module of the frameworks."""

    def find_spec(
        self, name: str, _: object = None, __: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in FRAMEWORKS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(PRESENT.get(module.__name__, {}))


def provide() -> None:
    """Provide the modules in this process, and shorten each pause of the script."""
    sys.meta_path.insert(0, Finder())
    pause = time.sleep
    time.sleep = lambda seconds: pause(min(seconds, LONGEST_PAUSE))


if __name__ == "__main__":
    provide()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
