"""Answers from estimates: ``GET /v1/advice`` (and static powers) and ``GET /v1/inference``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

from wattspan.advice.rules import Advice, BoardFacts, NoAdvice, advise, reasons_for_none
from wattspan.advice.static_power import StaticPowerFit
from wattspan.api.requests import PROCESS_PARAMETERS, Parameter, ProblemError, whole_number
from wattspan.inference.estimate import RequestEstimate
from wattspan.inference.requests import InferenceRequest
from wattspan.model import Consumer, Provenance
from wattspan.model.settings import Duration
from wattspan.spans.values import InferenceDetails

ADVICE_PATH = "/v1/advice"

_LONGEST_NAME = 200

ADVICE_PARAMETERS: Mapping[str, Parameter] = {
    "service": Parameter(lambda text: text[:_LONGEST_NAME], "Write the name of a service."),
}


AdviceFacts = Callable[[Callable[[Consumer], bool]], Iterable[BoardFacts]]
"""Returns the facts about each board, with the uses of visible processes only."""


def advice_response(boards: Iterable[BoardFacts], service: str | None) -> dict[str, Any]:
    """All advice, most energy first, or the reasons for none; the static power of each board."""
    known = tuple(boards)
    advice = advise(known, service)
    reasons = [] if advice else reasons_for_none(known, service)
    return {
        "emulated": Provenance.EMULATED in {board.provenance for board in known},
        "advice": [_advice(one) for one in advice],
        "no_advice": [_no_advice(one) for one in reasons],
        "boards": [_board(board) for board in known],
        "services": sorted({name for board in known for name, _ in board.uses if name}),
    }


def _advice(one: Advice) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "service": one.service or None,
        "hw_id": one.board,
        "hw_name": one.name,
        "joules": one.energy / 1e6,
        "low_joules": one.low / 1e6,
        "high_joules": one.high / 1e6,
        "confidence": one.confidence,
        "observed_seconds": one.observed / 1e9,
        "share": one.share,
        "static_basis": one.basis,
        "provenance": one.provenance,
        "sentence": one.sentence,
        "idle_joules": None if one.idle is None else one.idle / 1e6,
    }


def _no_advice(one: NoAdvice) -> dict[str, Any]:
    return {
        "reason": one.reason,
        "service": one.service or None,
        "hw_id": one.board or None,
        "hw_name": one.name or None,
        "sentence": one.sentence,
    }


def _board(board: BoardFacts) -> dict[str, Any]:
    static, fit = board.static, board.fit
    fitted = fit if isinstance(fit, StaticPowerFit) else None
    return {
        "hw_id": board.board,
        "hw_name": board.name,
        "provenance": board.provenance,
        "observed_seconds": board.observed / 1e9,
        "static_watts": static and static.power / 1e3,
        "static_basis": static and static.basis,
        "fitted_watts": fitted and fitted.power / 1e3,
        "fitted_half_width_watts": fitted and fitted.half_width / 1e3,
        "fitted_celsius": fitted and fitted.celsius,
        "fit_refused": None if isinstance(fit, StaticPowerFit) else fit,
        "idle_watts": None if board.idle_power is None else board.idle_power / 1e3,
    }


# ------------------------------------------------------------------------------- requests to models


INFERENCE_PATH = "/v1/inference"

EstimateRequest = Callable[[Consumer, InferenceRequest], RequestEstimate | None]
"""Returns the provisional energy of a request of the engine of a process. Safe from any thread."""

_MOST_TOKENS = 10**7


_count = whole_number(_MOST_TOKENS, least=0)
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
