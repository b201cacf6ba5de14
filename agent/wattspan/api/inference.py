"""The provisional energy of a request to a language model: ``GET /v1/inference``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from wattspan.api.requests import PROCESS_PARAMETERS, Parameter, ProblemError
from wattspan.inference.estimate import RequestEstimate
from wattspan.inference.requests import InferenceRequest
from wattspan.model import Consumer
from wattspan.model.settings import Duration
from wattspan.spans.values import InferenceDetails

INFERENCE_PATH = "/v1/inference"

EstimateRequest = Callable[[Consumer, InferenceRequest], RequestEstimate | None]
"""Returns the provisional energy of a request of the engine of a process. Safe from any thread."""

_MOST_TOKENS = 10**7
_LONGEST_NAME = 200


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and int(text) <= _MOST_TOKENS):
        raise ValueError(f"that is no whole number from 0 to {_MOST_TOKENS}")
    return int(text)


INFERENCE_PARAMETERS = {
    **PROCESS_PARAMETERS,
    "model": Parameter(lambda text: text[:_LONGEST_NAME], "Write the name that spans have."),
    "prompt": Parameter(_count, "Write the tokens of the prompt."),
    "cached": Parameter(_count, "Write the tokens of the prompt that were cached."),
    "completion": Parameter(_count, "Write the generated tokens."),
    "time": Parameter(Duration.parse, 'Write the duration of the request as "1500ms".'),
}


def estimate_response(
    estimate: EstimateRequest, process: Consumer, values: Mapping[str, Any], *, emulated: bool
) -> dict[str, Any]:
    """The provisional energy of a request with these parameters; ProblemError without any."""
    model = values.get("model", "")
    details = InferenceDetails(model, values.get("cached", 0))
    tokens = values.get("prompt", 0), values.get("completion", 0)
    request = InferenceRequest.of(b"", 0, values.get("time", 0), tokens, details)
    found = estimate(process, request)
    if found is None:
        raise ProblemError(
            HTTPStatus.NOT_FOUND,
            f"model {model!r} of process {process.pid}",
            "the energy of its tokens is not known yet",
            "Send the spans of the engine to the agent; it needs at least 30 s of requests with "
            "different mixtures of prompt and generated tokens.",
        )
    uncertainty = found.uncertainty
    return {
        "joules": found.energy / 1e6,
        "input_joules": found.input / 1e6,
        "output_joules": found.output / 1e6,
        "uncertainty_joules": None if uncertainty is None else uncertainty / 1e6,
        "status": "provisional",
        "emulated": emulated,
    }
