"""The name of engines' energy in a draft for OpenTelemetry."""

from __future__ import annotations

from testbed.exporting import serving
from testbed.scrapes import full_host, parse, value

from wattspan_exporters.catalogue.inference import GEN_AI_PROPOSAL
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer

NAME = "gen_ai_infrastructure_energy_joules_total"


def test_alias_has_the_energy_of_every_engine() -> None:
    body = Renderer(GEN_AI_PROPOSAL).render(full_host(), ExpositionFormat.OPENMETRICS)
    found = parse(body, ExpositionFormat.OPENMETRICS)
    assert value(found, NAME) == 8_000.0
    (labels,) = (dict(pairs) for name, pairs in found if name == NAME)
    assert labels.pop("provenance")
    assert labels == {
        "gen_ai_request_model": "llama", "server_address": "node7", "engine": "chat",
        "owner": "vllm",
    }  # fmt: skip


def test_alias_is_served_on_request_only() -> None:
    with serving() as served:
        assert NAME.encode() not in served.ask().body
    with serving(aliases=["gen_ai", "dcgm", "gen_ai"]) as served:
        body = served.ask().body
    assert body.count(f"# TYPE {NAME} counter".encode()) == 1
    assert b"DCGM_FI_DEV_POWER_USAGE" in body
