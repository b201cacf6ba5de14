"""Principals as texts in files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattspan.model.consumers import Principal, parse_principal, principal_text

NAMES = st.text(st.characters(codec=None))
PRINCIPALS = st.builds(Principal, st.none() | st.integers(0, 2**32), NAMES, NAMES)


@given(PRINCIPALS)
def test_text_of_a_principal_returns_it(principal: Principal) -> None:
    text = principal_text(principal)
    assert parse_principal(text) == principal
    assert text.isascii()
    assert text.isprintable()


@given(PRINCIPALS, PRINCIPALS)
def test_texts_of_different_principals_differ(one: Principal, other: Principal) -> None:
    assert (principal_text(one) == principal_text(other)) == (one == other)


@pytest.mark.parametrize(
    "text", ["", "1000", '[1000,""]', '[true,"",""]', '[1000, "", ""]', '["0","",""]', "[", "null"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not the text of a principal"):
        parse_principal(text)
