"""The times up to which engines have had the energy of processes."""

from __future__ import annotations

from wattspan.inference.host_marks import ReadMarks


def test_latest_mark_of_some_processes_is_found_by_counter() -> None:
    marks = ReadMarks()
    marks.set("ab", {"cpu": 5, "memory": 6})
    marks.set("b", {"cpu": 7, "memory": 2})
    assert marks.latest({"a", "b", "c"}) == {"cpu": 7, "memory": 6}
    assert marks.latest({"a"}) == {"cpu": 5, "memory": 6}
    assert marks.latest({"c"}) == {}


def test_processes_without_counters_have_no_mark() -> None:
    marks = ReadMarks()
    marks.set("a", {})
    assert len(marks) == 0


def test_expired_marks_are_removed() -> None:
    marks = ReadMarks()
    marks.set("a", {"cpu": 5, "memory": 6})
    marks.set("b", {"cpu": 5})
    marks.expire(5)
    assert marks.latest("ab") == {"memory": 6}
    assert len(marks) == 1
