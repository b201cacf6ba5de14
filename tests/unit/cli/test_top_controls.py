from dataclasses import replace

import pytest

from wattspan.cli.top.controls import SortKey, ViewOptions, ViewSection, handle_key


def typed(options: ViewOptions, *keys: str) -> ViewOptions:
    for key in keys:
        chosen = handle_key(options, key)
        assert chosen is not None
        options = chosen
    return options


@pytest.mark.parametrize("key", ["q", "ctrl-c", "ctrl-d"])
def test_quit_keys_end_the_view(key: str) -> None:
    assert handle_key(ViewOptions(), key) is None


def test_key_s_cycles_through_the_orders() -> None:
    assert [typed(ViewOptions(), *"s" * n).sort for n in range(4)] == [
        SortKey.WATTS,
        SortKey.JOULES,
        SortKey.NAME,
        SortKey.WATTS,
    ]


def test_tab_cycles_through_the_sections() -> None:
    assert typed(ViewOptions(), "tab").by is ViewSection.PROCESS
    assert typed(ViewOptions(), *["tab"] * len(ViewSection)) == ViewOptions()


def test_filter_is_typed_and_kept() -> None:
    options = typed(ViewOptions(offset=3), "/", "q", "s", "x", "backspace", "enter")
    assert (options.filter, options.editing, options.offset) == ("qs", False, 0)


def test_escape_clears_the_filter() -> None:
    assert typed(ViewOptions(), "/", "a", "escape") == ViewOptions()
    assert typed(ViewOptions(filter="a"), "escape") == ViewOptions()


def test_named_keys_do_not_change_the_filter() -> None:
    assert typed(ViewOptions(editing=True), "up", "f1", "\x00") == ViewOptions(editing=True)


def test_scrolling_stops_at_the_top() -> None:
    assert typed(ViewOptions(), "down", "j", "pagedown", "up").offset == 11
    assert typed(ViewOptions(offset=5), "pageup").offset == 0
    assert typed(ViewOptions(offset=5), "home").offset == 0


def test_any_key_closes_the_help() -> None:
    options = typed(ViewOptions(), "?")
    assert options.help
    assert typed(options, "s") == ViewOptions()


def test_unknown_key_changes_nothing() -> None:
    options = replace(ViewOptions(), offset=2)
    assert handle_key(options, "z") == options
