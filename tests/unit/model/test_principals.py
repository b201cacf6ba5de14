"""Principals as texts in files."""

import pytest

from wattspan.model.consumers import Principal, parse_principal, principal_text


@pytest.mark.parametrize(
    ("principal", "text"),
    [
        (Principal(1000), '[1000,"",""]'),
        (Principal(None, "c", "p\u00f6d"), '[null,"c","p\\u00f6d"]'),
    ],
)
def test_text_of_a_principal_is_stable(principal: Principal, text: str) -> None:
    assert principal_text(principal) == text
    assert parse_principal(text) == principal


@pytest.mark.parametrize(
    "text", ["", "1000", '[1000,""]', '[true,"",""]', '[1000, "", ""]', '["0","",""]', "[", "null"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not the text of a principal"):
        parse_principal(text)
