"""The provisional energy of requests, from learned energies and the shares of recent requests."""

from __future__ import annotations

import pytest

from wattspan.inference.estimate import RequestEstimate, RequestEstimator, SharingMeans
from wattspan.inference.requests import InferenceRequest
from wattspan.inference.token_power import TokenEnergy, TokenWork
from wattspan.model import SECOND, Microjoules
from wattspan.spans.values import InferenceDetails

ENERGY = TokenEnergy(1000.0, 0.0, 2000.0, 1.0, 100_000.0, 50e6)
REQUEST = InferenceRequest.of(
    b"r" * 8,
    0,
    2 * SECOND,
    (100, 11),
    InferenceDetails("m", cached=40, queue=0, first_token=SECOND),
)


def test_estimate_is_the_energy_of_own_and_of_shared_work() -> None:
    estimator = RequestEstimator({"m": ENERGY}, active=0.25, iterations=0.1, error=None)

    found = estimator.estimate(REQUEST)

    own = 60 * 1000 + 10 * 2000 + 10 * (101 + 5)
    shared = 10 * 0.1 * 100_000 + 2 * 0.25 * 50e6
    assert found.energy == round(own + shared)
    assert found.input + found.output == found.energy
    assert found.input == pytest.approx(found.energy * 60_000 / (own + 100_000), rel=1e-6)
    assert found.uncertainty is None


def test_unidentified_model_has_no_estimate() -> None:
    estimator = RequestEstimator({"m": ENERGY}, 1.0, 1.0, None)

    assert estimator.estimate(REQUEST._replace(model="other")) is None


def test_first_request_bears_all_common_work() -> None:
    estimator = SharingMeans().estimator({})

    assert (estimator.active, estimator.iterations, estimator.error) == (1.0, 1.0, None)


def test_parts_of_common_work_are_those_of_recent_requests() -> None:
    means = SharingMeans()
    for _ in range(1000):
        means.add(REQUEST, TokenWork(60, 0, 10, 1000, 2, 0.5))

    estimator = means.estimator({})

    assert estimator.active == pytest.approx(0.25)
    assert estimator.iterations == pytest.approx(0.2)


def test_uncertainty_is_two_standard_errors_of_earlier_estimates() -> None:
    means = SharingMeans()
    estimate = RequestEstimate(Microjoules(110), Microjoules(0), Microjoules(110), None)
    means.compare(estimate, 0)
    for _ in range(19):
        means.compare(estimate, 100)
    assert means.estimator({}).error is None
    for _ in range(200):
        means.compare(estimate, 100)

    found = means.estimator({"m": ENERGY}).estimate(REQUEST)

    assert found.uncertainty == pytest.approx(0.2 * found.energy, abs=1)


def test_estimate_without_own_work_is_all_output() -> None:
    estimator = RequestEstimator({"m": TokenEnergy(0, 0, 0, 0, 0, 1e6)}, 1.0, 1.0, 0.1)

    found = estimator.estimate(REQUEST)

    assert found == RequestEstimate(
        Microjoules(2_000_000), Microjoules(0), Microjoules(2_000_000), Microjoules(400_000)
    )
