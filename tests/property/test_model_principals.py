"""Principals as texts in files."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wattspan.model.consumers import Principal, principal_text

NAMES = st.text(st.characters(codec=None))
PRINCIPALS = st.builds(Principal, st.none() | st.integers(0, 2**32), NAMES, NAMES)


@given(PRINCIPALS)
def test_text_of_a_principal_is_printable_ascii(principal: Principal) -> None:
    text = principal_text(principal)
    assert text.isascii()
    assert text.isprintable()


@given(PRINCIPALS, PRINCIPALS)
def test_texts_of_different_principals_differ(one: Principal, other: Principal) -> None:
    assert (principal_text(one) == principal_text(other)) == (one == other)
