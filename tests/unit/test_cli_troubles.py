"""What fails is told once, in one sentence for all that fail alike."""

import pytest

from wattspan.model import SECOND, Failure, SourceHealth, Trouble
from wattspan.ports import SourceError
from wattspan.service.daemon import (
    REPEAT_INTERVAL,
    FailureReporter,
    merge_failures,
    require_readable_counters,
)

SENT = ("forward", "forward_logs", "otlp")
"""What the ways to a collector are called."""


def failing(
    thing: str, trouble: Trouble = Trouble.DENIED, cause: str = "permission denied"
) -> Failure:
    return Failure("rapl", thing, trouble, cause, "Allow it.", domain_id=thing)


def health(*failures: Failure, source: str = "rapl", up: bool = False) -> SourceHealth:
    return SourceHealth(source, up, 1, len(failures), failures)


def test_what_fails_alike_is_one_sentence() -> None:
    failures = [failing("/a"), failing("/b"), failing("/c", cause="it is gone"), failing("/d")]
    assert [str(failure) for failure in merge_failures(failures)] == [
        "Cannot read /a and 2 more: permission denied. Allow it.",
        "Cannot read /c: it is gone. Allow it.",
    ]


def test_what_lasts_or_flickers_is_told_now_and_then() -> None:
    said: list[str] = []
    troubles = FailureReporter(said.append)
    for second in range(0, 1300):
        broken = health(failing("/a", cause=f"{second} bytes")) if second % 3 else health()
        troubles.report([broken], second * SECOND)
    assert len(said) == 1300 * SECOND // REPEAT_INTERVAL + 1
    troubles.report([health(failing("/b"))], 1300 * SECOND)
    assert said[-1] == "Cannot read /b: permission denied. Allow it."


def test_what_was_told_in_other_words_is_not_told_again() -> None:
    said: list[str] = []
    troubles = FailureReporter(said.append, known=["/a"])
    elsewhere = [health(failing("/b"), source=source) for source in ("store", "files", *SENT)]
    troubles.report([health(failing("/a")), *elsewhere], 0)
    assert said == []


def test_only_want_of_rights_everywhere_is_hopeless() -> None:
    processes = health(source="processes")
    others = [health(source=source, up=True) for source in ("files", *SENT, "cost", "carbon")]
    with pytest.raises(SourceError, match=r"and 1 more: permission denied\. Allow it\."):
        require_readable_counters([health(failing("/a"), failing("/b")), processes, *others])
    require_readable_counters([health(failing("/a"), up=True), processes])
    require_readable_counters(
        [health(failing("/a")), health(source="nvml"), processes]
    )  # not yet known
    require_readable_counters([health(failing("/a", Trouble.RETRY)), processes])
    require_readable_counters([processes])
