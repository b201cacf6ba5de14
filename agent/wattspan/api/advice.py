"""Advice and static powers: ``GET /v1/advice``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from wattspan.advice.rules import Advice, BoardFacts, NoAdvice, advise, reasons_for_none
from wattspan.advice.static_power import StaticPowerFit
from wattspan.api.requests import Parameter
from wattspan.model import Consumer, Provenance

ADVICE_PATH = "/v1/advice"

_LONGEST_NAME = 200

ADVICE_PARAMETERS: Mapping[str, Parameter] = {
    "service": Parameter(lambda text: text[:_LONGEST_NAME], "Write the name of a service."),
}


class AdviceFacts(Protocol):
    """Returns the facts about each board, with the uses of visible processes only."""

    def __call__(self, may_see: Callable[[Consumer], bool]) -> tuple[BoardFacts, ...]: ...


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
