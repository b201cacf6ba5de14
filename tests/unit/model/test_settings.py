import re
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
import pytest

from wattspan.model import IdlePolicy
from wattspan.model.settings import (
    REDACTED,
    Duration,
    Listen,
    SettingError,
    Size,
    Table,
    about,
    convert,
    keys,
    redacted,
    table_text,
    to_plain,
)


class Everything(Table, frozen=True):
    """One key of each kind."""

    pause: Annotated[Duration, about("How long.", least="10ms", most="1m")] = Duration.parse("1s")
    room: Size | None = None
    listen: Listen = Listen("")
    mode: bool | Literal["auto"] = "auto"
    idle: IdlePolicy = IdlePolicy.SEPARATE
    ratio: Annotated[float, about("A part.", least=0, most=1)] = 0.5
    rows: Annotated[int, msgspec.Meta(ge=1, le=10)] = 5
    names: tuple[str, ...] = ()


class Nested(Table, frozen=True):
    """Keys with entries, and a secret."""

    knobs: tuple[Literal["clock", "power"], ...] = ()
    parts: dict[Literal["day", "night"], float] = msgspec.field(default_factory=dict)
    row: tuple[Everything, ...] = ()
    token: Annotated[str, about("Key.", secret=True)] = ""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.token in self.parts:
            yield "token", "it is a part"


def fault(**raw: object) -> str:
    with pytest.raises(SettingError) as caught:
        convert(raw, Everything, "sources.test")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [("100ms", 10**8), ("1.5s", 1_500_000_000), ("2m", 120 * 10**9), ("7d", 604_800 * 10**9)],
)
def test_duration_is_parsed_as_nanoseconds(text: str, nanoseconds: int) -> None:
    assert Duration.parse(text) == nanoseconds


@pytest.mark.parametrize("text", ["", "100", "ms", "-1s", "1e3s", "9" * 400 + "d", "1 s s", "١s"])
def test_invalid_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r'duration such as "100ms"'):
        Duration.parse(text)


def test_duration_beyond_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="too much"):
        Duration.parse("999999d")


@pytest.mark.parametrize(
    ("text", "size"), [("64MiB", 2**26), ("1.5GB", 15 * 10**8), ("0B", 0), ("1kB", 1000)]
)
def test_size_is_parsed_as_bytes(text: str, size: int) -> None:
    assert Size.parse(text) == size


@pytest.mark.parametrize(
    "text", ["127.0.0.1:9949", "[::1]:0", ":80", "*:80", "node-7.lan:65535", ""]
)
def test_listen_address_keeps_its_text(text: str) -> None:
    assert Listen.parse(text) == text


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("127.0.0.1", "names no port"),
        ("localhost:http", 'the port "http"'),
        ("localhost:65536", "65535"),
        ("::1:80", "brackets"),
        ("[::1:80", "brackets"),
        ("two words:80", "not a host"),
        ("http://x:80", "brackets"),
        ("x:٣", "65535"),
    ],
)
def test_invalid_listen_address_is_refused_with_the_invalid_part(text: str, fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        Listen.parse(text)


def test_listen_address_has_host_and_port() -> None:
    assert (Listen("[::1]:9949").host, Listen("[::1]:9949").port) == ("::1", 9949)
    assert Listen("*:1").host == Listen(":1").host == ""
    loopback = [Listen(f"{host}:1").loopback for host in ("127.1.2.3", "localhost", "x", "")]
    assert loopback == [True, True, False, False]


def test_faults_of_a_table_are_reported_together() -> None:
    told = fault(pause="5s s", rows=0, modus="auto", ratio="x").splitlines()
    assert len(told) == 4


def test_mistyped_word_is_reported_with_the_nearest_match() -> None:
    assert fault(idle="seperate") == (
        'Bad value for \'sources.test.idle\': "seperate" is not "separate", '
        '"proportional" or "equal"; did you mean "separate"?'
    )


def test_wrong_type_is_reported_with_the_expected_type() -> None:
    assert fault(pause=100) == (
        "Bad value for 'sources.test.pause': "
        'expected a duration such as "100ms", "2s" or "24h", got 100.'
    )
    assert 'expected "auto", true or false, got 3' in fault(mode=3)
    assert fault(pause=True).endswith("got true.")


@pytest.mark.parametrize("value", ["9ms", "61s"])
def test_bounds_are_written_like_values(value: str) -> None:
    assert f'"{value}" is out of bounds, at' in fault(pause=value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 10**400])
def test_number_out_of_bounds_and_nan_are_refused(value: float) -> None:
    assert "sources.test.ratio" in fault(ratio=value)


def test_bounds_of_msgspec_are_reported() -> None:
    assert fault(rows=11) == "Bad value for 'sources.test.rows': 11 is out of bounds, int <= 10."


def test_environment_values_that_are_not_utf8_are_refused() -> None:
    assert "not UTF-8" in fault(names=None, listen="\udcff:80")


def test_check_of_a_table_is_reported_with_its_name() -> None:
    class Picky(Table, frozen=True):
        low: int = 0

        def __post_init__(self) -> None:
            if self.low > 3:
                raise ValueError("low: it is too high")

    with pytest.raises(SettingError, match=r"\[sources.picky\]: low: it is too high\.$"):
        convert({"low": 4}, Picky, "sources.picky")


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        ({"knobs": ["clok"]}, '"clok" is not "clock" or "power"; did you mean "clock"?'),
        ({"knobs": [3]}, 'expected list of "clock" or "power", got a list.'),
        ({"parts": {"dy": 1}}, '"dy" is not "day" or "night"; did you mean "day"?'),
        ({"parts": {"day": 1, "night": "x"}}, 'expected number for "night", got "x".'),
        ({"row": [{}, 3]}, "'x.row[1]': expected a table, [[x.row]], got 3."),
        ({"token": "day", "parts": {"day": 1}}, "'x.token': it is a part."),
    ],
)
def test_fault_of_an_entry_is_named(raw: dict[str, object], cause: str) -> None:
    with pytest.raises(SettingError, match=re.escape(cause)):
        convert(raw, Nested, "x")


def test_secret_is_not_displayed() -> None:
    assert redacted(Nested(token="a")) == Nested(token=REDACTED)
    assert redacted(Nested()) == Nested()


def test_missing_required_key_is_named() -> None:
    class Push(Table, frozen=True):
        endpoint: Annotated[str, about("Where to push to.")]

    with pytest.raises(SettingError, match=r"'exporters\.push' needs the key 'endpoint'"):
        convert({}, Push, "exporters.push")


def test_key_has_kind_documentation_and_bounds() -> None:
    key = keys(Everything)["pause"]
    assert (key.doc, key.least, key.most) == ("How long.", "10ms", "1m")
    assert [k.kind for k in keys(Everything).values()][3:] == [
        '"auto", true or false',
        '"separate", "proportional" or "equal"',
        "number",
        "whole number",
        "list of text",
    ]


def test_docstring_documents_the_keys_of_its_table_and_of_its_bases() -> None:
    class Rate(Table, frozen=True):
        """A rate.

        Keys:
            url: Server of the rate: one that answers
                numbers.
        """

        url: str = ""

    class Price(Rate, frozen=True):
        """A price.

        It is constant.

        Keys:
            limit: Highest price.
        """

        limit: Annotated[int, about(least=1)] = 2
        other: Annotated[int, about("Something else.")] = 3

    assert {name: key.doc for name, key in keys(Price).items()} == {
        "limit": "Highest price.",
        "other": "Something else.",
        "url": "Server of the rate: one that answers numbers.",
    }
    assert table_text(Price) == "A price.\n\nIt is constant."


def test_table_without_docstring_has_no_text() -> None:
    class Silent(Table, frozen=True):
        size: int = 0

    assert (table_text(Silent), keys(Silent)["size"].doc) == ("", "")


def test_plain_values_are_parsed_back() -> None:
    table = convert({"pause": "1.5s", "room": "1.5MiB"}, Everything, "x")
    plain = to_plain(table)
    assert (plain["pause"], plain["room"]) == ("1500ms", "1536KiB")
    assert convert(plain, Everything, "x") == table
