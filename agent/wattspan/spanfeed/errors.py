"""Why a whole request cannot be taken, in words for its sender."""

from __future__ import annotations


class MalformedError(ValueError):
    """This is no request; the message says where it is not."""


class TooLargeError(ValueError):
    """The request is larger than is taken."""


def too_many(most: int) -> TooLargeError:
    """There are more spans, or more of what they are wrapped in, than ``most``."""
    return TooLargeError(f"a request has at most {most} spans")


def too_many_fields(what: str, most: int) -> TooLargeError:
    """``what``, such as "a span", has more fields, attributes, events and links than ``most``."""
    return TooLargeError(f"{what} has at most {most} fields, attributes, events and links together")
