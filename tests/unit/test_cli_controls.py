from dataclasses import replace

import pytest

from wattspan.cli.controls import By, Options, Sort, press


def typed(options: Options, *keys: str) -> Options:
    for key in keys:
        chosen = press(options, key)
        assert chosen is not None
        options = chosen
    return options


@pytest.mark.parametrize("key", ["q", "ctrl-c", "ctrl-d"])
def test_these_keys_end_it(key: str) -> None:
    assert press(Options(), key) is None


def test_s_goes_through_the_orders_and_comes_back() -> None:
    assert [typed(Options(), *"s" * n).sort for n in range(4)] == [
        Sort.WATTS,
        Sort.JOULES,
        Sort.NAME,
        Sort.WATTS,
    ]
    assert typed(Options(), "s", "S") == Options()


def test_spans_have_no_watts_to_be_sorted_by() -> None:
    spans = Options(by=By.SPAN)
    assert spans.order is Sort.JOULES
    assert [typed(spans, *"s" * n).order for n in range(3)] == [Sort.JOULES, Sort.NAME, Sort.JOULES]
    assert typed(spans, "s", "S").order is Sort.JOULES
    assert typed(spans, "tab").order is Sort.WATTS


def test_tab_goes_through_the_views_and_backtab_back() -> None:
    assert typed(Options(), "tab").by is By.PROCESS
    assert typed(Options(), "tab", "backtab") == Options()


def test_a_filter_is_typed_and_kept() -> None:
    options = typed(Options(offset=3), "/", "q", "s", "x", "backspace", "enter")
    assert (options.filter, options.editing, options.offset) == ("qs", False, 0)


def test_escape_clears_the_filter_while_it_is_typed_and_after() -> None:
    assert typed(Options(), "/", "a", "escape") == Options()
    assert typed(Options(filter="a"), "escape") == Options()


def test_keys_that_are_no_letters_do_not_get_into_the_filter() -> None:
    assert typed(Options(editing=True), "up", "f1", "\x00") == Options(editing=True)


def test_scrolling_stops_at_the_top() -> None:
    assert typed(Options(), "down", "j", "pagedown", "up").offset == 11
    assert typed(Options(offset=5), "pageup").offset == 0
    assert typed(Options(offset=5), "home").offset == 0


def test_any_key_leaves_the_help() -> None:
    options = typed(Options(), "?")
    assert options.help
    assert typed(options, "s") == Options()


def test_what_means_nothing_changes_nothing() -> None:
    options = replace(Options(), offset=2)
    assert press(options, "z") == options
