"""Principals as texts in files."""

import pytest

from wattspan.model import service_label
from wattspan.model.consumers import Principal, principal_text


@pytest.mark.parametrize(
    ("principal", "text"),
    [
        (Principal(1000), '[1000,"",""]'),
        (Principal(None, "c", "p\u00f6d"), '[null,"c","p\\u00f6d"]'),
    ],
)
def test_text_of_a_principal_is_stable(principal: Principal, text: str) -> None:
    assert principal_text(principal) == text


def test_label_of_a_service_has_its_owner_if_there_is_one() -> None:
    assert service_label("chat", "ann") == "chat@ann"
    assert service_label("chat", "") == "chat"
