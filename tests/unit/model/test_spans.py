"""Rows of spans and of requests."""

from wattspan.model import EngineRow


def test_engines_of_one_name_differ_by_model_and_owner() -> None:
    keys = {EngineRow("chat", model, owner).key for model in ("a", "b") for owner in ("", "u")}
    assert len(keys) == 4
    assert EngineRow("chat", "a", "u").key == ("chat", "a", "u")
