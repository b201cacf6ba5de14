"""Label values that come from outside, made fit."""

from __future__ import annotations

from hashlib import blake2s


def marked(value: str, fit: str, most: int) -> str:
    """``fit``, which is ``value`` as it may be shown, in at most ``most`` characters.

    What had to be changed is marked with a digest of the original, so that two names stay two
    series.
    """
    if fit == value and len(value) <= most:
        return value
    digest = blake2s(value.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{fit[: most - 9]}~{digest}"
