"""Tokens from a file, and the requests they admit."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattspan.config.settings import SpansSettings
from wattspan.http.access_policy import AccessError, FileReloader, TokenCheck, token_check

TOKEN, OTHER = "0123456789abcdef-first", "0123456789abcdef-other"


def written(path: Path, *lines: str, mode: int = 0o640) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    path.chmod(mode)
    return path


def check(path: Path, log: list[str] | None = None) -> TokenCheck:
    told = log if log is not None else []
    admits = token_check(SpansSettings(token_file=str(path)), where="in [spans]", log=told.append)
    assert admits is not None
    return admits


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_token_is_not_required_without_a_file() -> None:
    assert token_check(SpansSettings(), where="in [spans]", log=print) is None


def test_every_token_of_the_file_is_admitted_except_comments(tmp_path: Path) -> None:
    path = written(
        tmp_path / "tokens", "# of Prometheus", TOKEN, "", f"  {OTHER}  ", "#" + "x" * 20
    )
    admits = check(path)
    assert admits(f"Bearer {TOKEN}")
    assert admits(f"bearer  {OTHER}")
    assert admits(basic("anybody", OTHER))
    assert not admits("Bearer #" + "x" * 20)


@pytest.mark.parametrize(
    "sent",
    ["", "Bearer", "Bearer ", TOKEN, f"Token {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}",
     "Basic !!!", basic(TOKEN, ""), "Basic " + base64.b64encode(TOKEN.encode()).decode(),
     f"Bearer {TOKEN} {OTHER}", f"Bearer {TOKEN}, Bearer {TOKEN}", "Bearer \udcff", "Basic \xff"],
)  # fmt: skip
def test_unknown_token_is_rejected(tmp_path: Path, sent: str) -> None:
    assert not check(written(tmp_path / "tokens", TOKEN))(sent)


@given(st.text())
def test_arbitrary_header_is_parsed_without_error(
    tmp_path_factory: pytest.TempPathFactory, sent: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "property-tokens"
    if not path.exists():
        written(path, TOKEN)
    admits = check(path)
    for header in (sent, f"Bearer {sent}", f"Basic {sent}"):
        assert admits(header) == (header == f"Bearer {TOKEN}")


@pytest.mark.parametrize("mode", [0o644, 0o666, 0o642, 0o660])
def test_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "tokens", TOKEN, mode=mode)
    with pytest.raises(AccessError, match=r"other users can read or change them; run `chmod 0640"):
        check(path)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ((), "there is none; put one into it"),
        (("# nothing",), "there is none"),
        ((TOKEN, "short"), "that on line 2 is not 16 or more visible ASCII characters"),
        (("with a blank in it",), "that on line 1 is not"),
        (("ÿ" * 20,), "that on line 1 is not"),
        ([f"{n:032}" for n in range(1001)], "there are more than 1000 of them"),
    ],
)
def test_invalid_tokens_are_refused_and_not_logged(
    tmp_path: Path, lines: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(AccessError, match=sentence) as caught:
        check(written(tmp_path / "tokens", *lines))
    assert all(line not in str(caught.value) for line in lines if line.strip("# "))


def test_missing_file_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="no such file or directory; correct token_file in"):
        check(tmp_path / "none")


def test_removed_token_is_rejected(tmp_path: Path) -> None:
    path = written(tmp_path / "tokens", TOKEN)
    admits = check(path)
    assert admits(f"Bearer {TOKEN}")
    written(path, OTHER)
    assert not admits(f"Bearer {TOKEN}")
    assert admits(f"Bearer {OTHER}")


def test_invalid_token_file_keeps_the_last_tokens(tmp_path: Path) -> None:
    log: list[str] = []
    path = written(tmp_path / "tokens", TOKEN)
    admits = check(path, log)
    path.chmod(0o644)
    assert [admits(f"Bearer {TOKEN}") for _ in range(3)] == [True] * 3
    assert len(log) == 1
    assert log[0].startswith("The previous content stays in force: Cannot use the tokens in")
    assert TOKEN not in log[0]


def test_removed_token_file_keeps_the_last_tokens(tmp_path: Path) -> None:
    log: list[str] = []
    path = written(tmp_path / "tokens", TOKEN)

    def read() -> str:
        if not path.stat().st_size:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return path.read_text(encoding="utf-8")

    current = FileReloader((str(path),), read, log.append)
    path.write_text("", encoding="utf-8")
    assert [current() for _ in range(2)] == [TOKEN] * 2
    assert len(log) == 1
