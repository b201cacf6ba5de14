"""Why a whole request cannot be taken, in words for its sender."""

from __future__ import annotations


class MalformedError(ValueError):
    """This is no request; the message says where it is not."""


class TooLargeError(ValueError):
    """The request is larger than is taken."""
