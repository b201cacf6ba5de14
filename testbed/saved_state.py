"""Simulated worlds as they are after minutes that many tests have in common.

A simulation is deterministic: instead of running it again, each test takes a copy of its state.
"""

from __future__ import annotations

import functools
import gc
import io
import pickle
import threading
from collections.abc import Callable
from types import FunctionType, MappingProxyType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_functions: list[FunctionType] = []


def saved(simulate: Callable[P, T]) -> Callable[P, T]:
    """A function with the result of ``simulate``, which runs once for the same arguments.

    Each call returns a copy, with copies of everything that can be reached from it. Raises
    ``pickle.PicklingError`` if that includes a function with a closure, whose variables would be
    those of the original.
    """

    @functools.cache
    def state(*args: P.args, **kwargs: P.kwargs) -> bytes:
        written = io.BytesIO()
        _Pickler(written).dump(simulate(*args, **kwargs))
        return written.getvalue()

    @functools.wraps(simulate)
    def copy(*args: P.args, **kwargs: P.kwargs) -> T:
        state_of: T = pickle.loads(state(*args, **kwargs))
        return state_of

    return copy


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        if isinstance(value, FunctionType) and "<" in value.__qualname__ and not value.__closure__:
            _functions.append(value)
            return _function, (len(_functions) - 1,)
        if isinstance(value, MappingProxyType):
            return _proxy, tuple(gc.get_referents(value))
        if isinstance(value, type(threading.Lock())):
            return threading.Lock, ()
        if isinstance(value, type(threading.RLock())):
            return threading.RLock, ()
        return NotImplemented


def _function(number: int) -> FunctionType:
    return _functions[number]


def _proxy(of: dict[object, object]) -> MappingProxyType[object, object]:
    return MappingProxyType(of)
