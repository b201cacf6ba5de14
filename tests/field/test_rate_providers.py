"""Answers of Electricity Maps and OpenEI to the clients with Zeus's names.

Each case is a ``client`` with its ``arguments``, the ``request`` that it sends by ``call``, the
recorded ``body``, and what follows: ``expected``, the intensity or the figures by time, or the
``error``.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from testbed.field import FieldCase, field_cases
from testbed.rate_server import serving

from wattspan.compat.zeus import footprint, providers

CASES = field_cases("rate_providers")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ELECTRICITY_MAPS_TOKEN", "OPENEI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)


def client_at(case: FieldCase, url: str) -> Any:
    """The client of a case, which asks a server at ``url``."""
    named: Any = getattr(providers, case["client"])
    return type(named.__name__, (named,), {"address": url})(**case["arguments"])


def figures(found: Any, times: Any) -> Any:
    if not isinstance(times, dict):
        return found
    if "energy_rate_structure" in found:  # a tariff
        price = footprint.price_at(found, UTC)
        return {time: price(datetime.fromisoformat(time)) for time in times}
    return {start.strftime("%Y-%m-%dT%H:%M+00:00"): value for start, value in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_answer_has_the_expected_figures(case: FieldCase) -> None:
    with serving(case["body"].encode()) as (url, asked):
        call = getattr(client_at(case, url), case["call"])
        if error := case.get("error"):
            with pytest.raises(getattr(providers, error)) as raised:
                call()
            assert str(raised.value) == raised.value.message
        else:
            assert figures(call(), case["expected"]) == case["expected"]
    assert [one.removeprefix("/") for one in asked] == [case["request"].removeprefix("/")]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("status", [301, 401, 403, 429, 500, 503])
def test_refused_request_is_an_error_of_the_request(case: FieldCase, status: int) -> None:
    """Also with a body that a success would have, and with another place to go to."""
    headers = {"Location": "http://127.0.0.1:1/"}
    with serving(case["body"].encode(), status, headers) as (url, asked):
        with pytest.raises(Exception, match=f"answered {status}") as raised:
            getattr(client_at(case, url), case["call"])()
        assert type(raised.value).__name__.endswith("HTTPError")
        assert len(asked) == 1


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [0, 1, 40])
def test_broken_answer_is_an_error_of_the_request(case: FieldCase, length: int) -> None:
    with serving(case["body"].encode()[:length]) as (url, _):
        with pytest.raises(Exception, match="not JSON") as raised:
            getattr(client_at(case, url), case["call"])()
        assert type(raised.value).__name__.endswith("HTTPError")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "body",
    [
        "{}", "[]", "null", "1", '"history"', '{"history":{}}', '{"history":[1]}',
        '{"history":[{"datetime":"yesterday","carbonIntensity":1}]}', '{"carbonIntensity":"466"}',
        '{"carbonIntensity":true}', '{"history":[{"datetime":5,"carbonIntensity":1}]}',
        '{"carbonIntensity":1e999}', '{"items":[{"label":"x"}]}',
        '{"items":[{"label":"539f6e1dec4f024411ecbeaf","energyratestructure":{}}]}',
    ],
)  # fmt: skip
def test_other_json_says_that_nothing_was_found(case: FieldCase, body: str) -> None:
    with serving(body.encode()) as (url, _):
        client = client_at(case, url)
        if case["call"] == "get_recent_carbon_intensity" and body == '{"history":{}}':
            assert client.get_recent_carbon_intensity() == {}
            return
        with pytest.raises(Exception, match="has no ") as raised:
            getattr(client, case["call"])()
        assert type(raised.value).__name__.endswith("NotFoundError")


def test_keys_are_sent_and_no_message_repeats_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENEI_API_KEY", "secret-1\n")
    monkeypatch.setenv("ELECTRICITY_MAPS_TOKEN", "secret-2\n")  # as of a file
    for case in (one.values[0] for one in CASES):
        with serving(b"refused: secret-1 or secret-2", 403) as (url, asked):
            with pytest.raises(Exception, match="Set the environment variable") as raised:
                getattr(client_at(case, url), case["call"])()
            own = "secret-1" if case["client"] == "OpenEIClient" else "secret-2"
            assert own not in str(raised.value)
            assert ("api_key=secret-1" in asked[0]) == (case["client"] == "OpenEIClient")


def test_absent_server_is_an_error_of_the_request() -> None:
    for case in (one.values[0] for one in CASES):
        with pytest.raises(Exception, match="Is it reachable from this host") as raised:
            getattr(client_at(case, "http://127.0.0.1:9"), case["call"])()
        assert type(raised.value).__name__.endswith("HTTPError")
