"""The provisional energy of a request, before the energy of its time has settled.

The learned energy of tokens gives the energy of the request's own work. Iterations and active time
are common to concurrent requests, most of which have not ended; a request gets the mean parts of
recent requests of its engine. Their estimates are compared with the settled energy, which gives
the uncertainty.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import NamedTuple

from wattspan.inference.requests import InferenceRequest
from wattspan.inference.token_power import NO_WORK, TokenEnergy, TokenWork
from wattspan.model import SECOND, Microjoules

_MEMORY = 200.0  # requests to which older ones fade
_FEWEST = 20  # compared requests before the uncertainty is known
_SURE = 2.0  # standard deviations of 95 %


class RequestEstimate(NamedTuple):
    """The expected energy of a request. ``input`` and ``output`` add up to ``energy``.

    ``uncertainty`` is the half-width of the 95 % range; None before it is known.
    """

    energy: Microjoules
    input: Microjoules
    output: Microjoules
    uncertainty: Microjoules | None


class RequestEstimator(NamedTuple):
    """The estimator of one engine: immutable.

    ``energies`` are those of each identified model, summed over the boards. ``active`` is the part
    of a request's active time that it bears, ``iterations`` are those that it bears for each
    decode token. ``error`` is the relative standard error; None before it is known.
    """

    energies: Mapping[str, TokenEnergy]
    active: float
    iterations: float
    error: float | None

    def estimate(self, request: InferenceRequest) -> RequestEstimate | None:
        """The expected energy of a request; None for a model that is not identified."""
        energies = self.energies.get(request.cost_model)
        if energies is None:
            return None
        cached = request.context - request.prefill
        work = TokenWork(
            request.prefill,
            request.prefill * (cached + request.prefill / 2),
            request.decode,
            request.decode * (request.context + 1 + request.decode / 2),
            request.decode * self.iterations,
            (request.end - request.start) / SECOND * self.active,
        )
        prompt, rest = energies.parts(work)
        energy = round(prompt + rest)
        of_prompt = min(energy, round(prompt))
        return RequestEstimate(
            Microjoules(energy),
            Microjoules(of_prompt),
            Microjoules(energy - of_prompt),
            None if self.error is None else Microjoules(round(_SURE * self.error * energy)),
        )


class SharingMeans:
    """The parts of common work that recent requests of an engine had, and the estimates' errors."""

    def __init__(self) -> None:
        self._work = NO_WORK
        self._time = 0.0  # seconds of requests
        self._squares = 0.0  # of relative errors
        self._compared = 0.0

    def estimator(self, energies: Mapping[str, TokenEnergy]) -> RequestEstimator:
        """The estimator with these energies of models."""
        error = sqrt(self._squares / self._compared) if self._compared >= _FEWEST else None
        active = self._work.active / self._time if self._time else 1.0
        iterations = self._work.iterations / self._work.decode if self._work.decode else 1.0
        return RequestEstimator(energies, active, iterations, error)

    def add(self, request: InferenceRequest, work: TokenWork) -> None:
        """Add the whole work of a settled request."""
        kept = 1 - 1 / _MEMORY
        self._work = TokenWork(*(each * kept for each in self._work)).plus(work)
        self._time = self._time * kept + (request.end - request.start) / SECOND

    def compare(self, estimate: RequestEstimate, energy: int) -> None:
        """Compare an estimate with the settled energy."""
        if energy > 0:
            kept = 1 - 1 / _MEMORY
            self._compared = self._compared * kept + 1
            self._squares = self._squares * kept + (estimate.energy / energy - 1) ** 2
