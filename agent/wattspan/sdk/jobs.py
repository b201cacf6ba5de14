"""Declaration of tuning jobs: an application names its unit of work, and its terms of tuning.

The agent answers with the terms that the operator's configuration gives the job. Without an agent
the application runs as before: no function here raises for a missing or failing agent. The
declaration ends with the process, and when the agent ends; ``renew`` repeats it to the next agent.
"""

from __future__ import annotations

import os
from time import monotonic

from wattspan.sdk import API_SOCKET, MeasurementError, RefusedError, run_directories

TYPE_CHECKING = False  # the sdk imports `typing` for type checkers only

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Self

JOBS_PATH = "/v1/jobs"

UNAVAILABLE = "unavailable"
"""The decision while no agent has answered."""

CHECK_INTERVAL = 1.0
"""Seconds between two looks for a new agent."""

RETRY_AFTER = 10.0
"""Seconds until the next attempt if an agent listens and has not accepted the declaration."""

DECLARE_TIMEOUT, RENEW_TIMEOUT = 2.0, 0.2  # seconds


def check_terms(
    max_slowdown: float | None,
    eta: float | None,
    first_watts: float | None = None,
    floor_watts: float | None = None,
) -> None:
    """ValueError: a slowdown budget, a weight of energy or a limit that no agent accepts."""
    for name, watts in (("first_watts", first_watts), ("floor_watts", floor_watts)):
        if watts is not None and not 0 < watts < float("inf"):
            raise ValueError(f"{name} = {watts} is no power limit. Give watts above 0.")
    if max_slowdown is not None and not 0 <= max_slowdown < float("inf"):
        raise ValueError(
            f"max_slowdown = {max_slowdown} is no slowdown. Give 0 or more: 0.05 is 5 %."
        )
    if eta is not None and not 0 <= eta <= 1:
        raise ValueError(f"eta = {eta} is no weight. Give a number from 0 to 1.")


def declare(
    *,
    name: str,
    service: str,
    span: str,
    work: str = "",
    max_slowdown: float | None = None,
    objective: str | None = None,
    eta: float | None = None,
    knobs: Sequence[str] | None = None,
    first_watts: float | None = None,
    floor_watts: float | None = None,
    directories: tuple[str, ...] = (),
) -> JobDeclaration:
    """Declare the spans ``span`` of ``service`` as the units of work of this process.

    ``work`` is the span attribute with the amount of work of a unit, "tokens" for its
    ``gen_ai.usage.*`` tokens, "" if each span counts as 1. The other terms are wishes; None leaves
    them to the operator: the slowdown budget (0.05 is 5 %; 0: do not tune this job), the
    ``objective`` ("energy", "cost" or "time") with ``eta``, the weight of energy in "cost", and
    the names of the ``knobs``. ``first_watts`` is the power limit of a GPU to certify first, such
    as the result of an earlier measurement, and ``floor_watts`` the lowest one that may be set.
    ``directories`` are the run directories of agents, by default those of
    this host. ValueError: a term that no agent accepts. Waits for an agent for 2 seconds at most.
    """
    for key, text in (("name", name), ("service", service), ("span", span)):
        if not text:
            raise ValueError(f"{key} is empty. Give the {key} of the job.")
    check_terms(max_slowdown, eta, first_watts, floor_watts)
    asked = {
        "service": service,
        "span": span,
        "work": work,
        "max_slowdown": None if max_slowdown is None else float(max_slowdown),
        "objective": objective,
        "eta": None if eta is None else float(eta),
        "knobs": None if knobs is None else list(knobs),
    }
    # An agent of an earlier release refuses unknown terms.
    limits = {"first_watts": first_watts, "floor_watts": floor_watts}
    asked |= {key: float(watts) for key, watts in limits.items() if watts is not None}
    declaration = JobDeclaration(name, asked, directories)
    declaration._declare(DECLARE_TIMEOUT)  # noqa: SLF001 - the only other user
    return declaration


class JobDeclaration:
    """A declared job, and the answer of the agent. Made by ``declare``.

    ``decision`` is "accepted", "limited" (the operator or another process restricts a term),
    "declined", "ignored", or "unavailable" if no agent answers; ``reason`` is one sentence.
    ``given`` are the terms that apply, with the ``mode`` of tuning ("off", "advise" or "apply"); it
    is empty without an answer. ``asked`` are the declared terms. As a context manager it withdraws
    the declaration at the end.
    """

    __slots__ = (
        "_answered", "_directories", "_due", "_pid", "_provisional", "_retry_at", "_sockets",
        "_withdrawn",
        "asked", "decision", "given", "instance", "name", "reason",
    )  # fmt: skip

    def __init__(
        self, name: str, asked: Mapping[str, Any], directories: tuple[str, ...] = ()
    ) -> None:
        self.name, self.asked = name, dict(asked)
        self.decision, self.reason, self.instance = UNAVAILABLE, "", ""
        self.given: dict[str, Any] = {}
        self._directories = directories
        self._pid, self._withdrawn, self._answered = os.getpid(), False, False
        self._sockets: tuple[tuple[int, int, int] | None, ...] = ()
        self._due = self._retry_at = 0.0
        self._provisional = False  # the answer may change once the process uses a GPU

    @property
    def service(self) -> str:
        """The ``service.name`` of the declared spans."""
        return str(self.asked["service"])

    def renew(self) -> Self:
        """Declare again if the agent has restarted, or one has appeared.

        Every 10 seconds too, while the answer depends on the GPUs that the process will use.

        Takes microseconds in most calls and 0.2 s at most; call it often, such as once per step.
        Never raises. Does nothing in a child of a fork, and after ``withdraw``.
        """
        now = monotonic()
        if now < self._due or self._withdrawn or os.getpid() != self._pid:
            return self
        self._due = now + CHECK_INTERVAL
        if self._socket_identities() != self._sockets or (
            (self._provisional or not self._answered) and now >= self._retry_at
        ):
            self._declare(RENEW_TIMEOUT)
        return self

    def withdraw(self) -> None:
        """End the declaration: the terms of the operator apply to the job again. Never raises."""
        if self._withdrawn or os.getpid() != self._pid:
            return
        self._withdrawn = True
        if not self._answered:
            return
        from urllib.parse import quote

        try:
            self._request(f"{JOBS_PATH}/{quote(self.name, safe='')}", "DELETE", DECLARE_TIMEOUT)
        except MeasurementError:
            return  # it ends with this process, and it ended with the agent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.withdraw()

    def __repr__(self) -> str:
        return f"<JobDeclaration {self.name!r}: {self.decision}. {self.reason}>"

    def _declare(self, timeout: float) -> None:
        self._sockets = self._socket_identities()  # first: an agent may restart meanwhile
        self._answered = self._provisional = False
        self._retry_at = monotonic() + RETRY_AFTER
        self.given, self.instance = {}, ""
        try:
            answer = self._request(JOBS_PATH, "POST", timeout, {"name": self.name, **self.asked})
            self.decision, self.reason = answer["decision"], answer["reason"]
            self.given, self.instance = dict(answer["given"]), answer["instance"]
            self._provisional = bool(answer.get("provisional"))
            self._answered = True
        except RefusedError as error:
            self.decision, self.reason = "declined", str(error)
        except MeasurementError as error:
            self.decision, self.reason = UNAVAILABLE, str(error)
        except (LookupError, TypeError, ValueError) as error:
            self.decision = UNAVAILABLE
            self.reason = (
                f"The agent's answer is not understood ({error!r}). Use the wattspan package "
                "of the agent's version."
            )

    def _request(
        self, path: str, method: str, timeout: float, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        from wattspan.sdk.client import request_json

        return request_json(
            path, {}, method=method, body=body, margin=timeout, directories=self._directories
        )

    def _socket_identities(self) -> tuple[tuple[int, int, int] | None, ...]:
        """The identity of each agent's socket, which a new agent replaces; None without one."""
        return tuple(
            _identity(f"{directory}/{API_SOCKET}")
            for directory in self._directories or run_directories()
        )


def _identity(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - pathlib would be imported for this alone
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
