"""Why a whole request cannot be taken, in words for its sender."""

from __future__ import annotations


class MalformedError(ValueError):
    """This is no request; the message says where it is not."""


class TooLargeError(ValueError):
    """The request is larger than is taken."""


def too_many(most: int) -> TooLargeError:
    """There are more spans, or more of what they are wrapped in, than ``most``."""
    return TooLargeError(f"a request has at most {most} spans")
