"""Streams of events keep every byte in its order, however they are split and released."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from wattspan.sdk.openai_usage import UsageEvents

LINES = st.sampled_from(
    [
        b'data: {"usage": {"completion_tokens": 1}}',
        b'data:{"usage": {}, "choices": [{"finish_reason": "stop"}]}',
        b'data: {"usage": null, "choices": [{}]}',
        b'data: "usage"',
        b"data: [DONE]",
        b": comment",
        b"event: usage",
        b"",
    ]
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(
    lines=st.lists(st.tuples(LINES, ENDS), max_size=20),
    cuts=st.lists(st.integers(0, 300), max_size=20),
    released=st.sets(st.integers(0, 20)),
    most=st.integers(0, 200),
)
def test_events_keep_every_byte_in_its_order(
    lines: list[tuple[bytes, bytes]], cuts: list[int], released: set[int], most: int
) -> None:
    stream = b"".join(line + end for line, end in lines)
    events, found, usages = UsageEvents(most), b"", 0
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for number, (start, end) in enumerate(pairwise(edges)):
        last = number == len(edges) - 2
        part = events.feed(stream[start:end], float(number), last=last)
        found += part.before + (part.usage or b"") + part.after
        usages += part.usage is not None
        assert part.usage is None or part.since <= number
        since = events.held_since
        assert (since is None) == (found == stream[:end])
        assert since is None or since <= number
        if number in released:
            found += events.release()
            assert found == stream[:end]
            assert events.held_since is None

    assert found == stream
    assert usages <= 1
