"""``@wattspan.measured``: a window around every call of a function."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar, overload

from wattspan.sdk.window import Window, window

WINDOWS_KEPT = 1000
"""The newest windows that a measured function keeps."""

F = TypeVar("F", bound=Callable[..., Any])
Hook = str | Callable[[], object] | None


@overload
def measured(name: F, /) -> F: ...


@overload
def measured(
    name: str = "",
    *,
    synchronize: Hook = None,
    report: Callable[[Window], object] | None = None,
) -> Callable[[F], F]: ...


def measured(
    name: Any = "",
    *,
    synchronize: Hook = None,
    report: Callable[[Window], object] | None = None,
) -> Any:
    """Measure every call: ``@wattspan.measured`` or ``@wattspan.measured("step")``.

    The function gets an attribute ``windows`` with the last 1000 windows. ``report`` is called
    with each window at its end; it should not read values at once, because they settle later.
    Works on functions, coroutine functions, and generators of both kinds, whose window lasts from
    the first step to the end and includes the time of the caller in between.
    """
    if callable(name):
        return _wrap(name, _name_of(name), None, None)
    return lambda function: _wrap(function, name or _name_of(function), synchronize, report)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _wrap(
    function: Any, name: str, synchronize: Hook, report: Callable[[Window], object] | None
) -> Any:
    windows: deque[Window] = deque(maxlen=WINDOWS_KEPT)
    window(name, synchronize=synchronize)  # raises for an unknown hook now, not at the first call

    class MeasuredCall:
        """The window of one call, kept at its end, also after an exception."""

        __slots__ = ("_window",)

        def __enter__(self) -> None:
            self._window = window(name, synchronize=synchronize).begin()

        def __exit__(self, *outcome: Any) -> None:
            try:
                self._window.__exit__(*outcome)
            finally:
                windows.append(self._window)
                if report is not None:
                    report(self._window)

    wrapper = _wrap_by_kind(function, MeasuredCall)
    wrapper.windows = windows
    return wrapper


def _wrap_by_kind(function: Any, call: Callable[[], Any]) -> Any:
    """``function`` in the context ``call()``, as the same kind of function."""
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def steps_awaited(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            with call(), contextlib.suppress(StopAsyncIteration):
                inner = function(*args, **kwargs)
                step = anext(inner)
                while True:
                    item = await step
                    try:
                        step = inner.asend((yield item))
                    except BaseException as error:  # noqa: BLE001 - as `yield from` passes it on
                        step = inner.athrow(error)

        return steps_awaited
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with call():
                return await function(*args, **kwargs)

        return awaited
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def steps(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with call():
                return (yield from function(*args, **kwargs))

        return steps

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with call():
            return function(*args, **kwargs)

    return called
