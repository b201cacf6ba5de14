"""Headers for the collector of spans, from the setting and from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattspan.config import SpansSettings
from wattspan.http.access_policy import AccessError
from wattspan.otlp.destination import forward_headers


def settings(path: Path, inline: str = "") -> SpansSettings:
    return SpansSettings(
        forward="https://c", forward_headers=inline, forward_headers_file=str(path)
    )


def test_headers_of_the_file_complete_and_replace_inline_ones(tmp_path: Path) -> None:
    path = tmp_path / "headers"
    path.write_text("# the tenant\n\nX-Tenant: b c\nauthorization: Bearer abc\n")
    assert forward_headers(settings(path, "x-tenant=a,x-other=1")) == {
        "x-tenant": "b c",
        "x-other": "1",
        "authorization": "Bearer abc",
    }


def test_without_a_file_inline_headers_apply() -> None:
    assert forward_headers(SpansSettings(forward_headers="x-tenant=a")) == {"x-tenant": "a"}


@pytest.mark.parametrize("content", [b"\xff\xfe", b"authorization Bearer s3cret\n"])
def test_invalid_file_is_named_without_its_content(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "headers"
    path.write_bytes(content)
    with pytest.raises(AccessError, match=r"headers.*forward_headers_file in \[spans\]") as error:
        forward_headers(settings(path))
    assert "s3cret" not in str(error.value)
