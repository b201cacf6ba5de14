"""``zeus.utils``: the helpers that scripts for Zeus import."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import TypeVar
from urllib.request import urlopen

from wattspan.util.text import printable

T = TypeVar("T")
MAX_ANSWER = 1 << 16  # bytes
_TRUTH = {"true": True, "false": False}


def get_env(name: str, valtype: Callable[[str], T], default: T | None = None) -> T:
    """An environment variable as a value of a type. ValueError if it is invalid or missing."""
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"The environment variable {name} is missing. Set it.")
        return default
    if valtype is bool:
        if (truth := _TRUTH.get(text.lower())) is None:
            raise ValueError(f"{name}={text!r} is no truth value. Set true or false.")
        text = "1" * truth
    return valtype(text)


@dataclass
class LinearScaler:
    """A learning rate ``lr`` for batch size ``bs`` that grows with the batch size."""

    bs: int
    lr: float

    def compute_lr(self, new_bs: int) -> float:
        """The learning rate for another batch size."""
        return self.lr * new_bs / self.bs


@dataclass
class SquareRootScaler:
    """A learning rate ``lr`` for batch size ``bs`` that grows with its square root."""

    bs: int
    lr: float

    def compute_lr(self, new_bs: int) -> float:
        """The learning rate for another batch size."""
        return self.lr * sqrt(new_bs / self.bs)


def get_ip_lat_long(url: str = "https://ipinfo.io/json") -> tuple[float, float]:
    """Degrees of latitude and longitude of this network, by a service that it asks.

    OSError, also for an answer without a place.
    """
    with urlopen(url, timeout=10) as answer:  # noqa: S310 - the caller's
        body = answer.read(MAX_ANSWER)
    try:
        latitude, longitude = map(float, json.loads(body)["loc"].split(","))
    except (AttributeError, LookupError, TypeError, ValueError):
        text = printable(body[:200].decode(errors="replace"))
        raise OSError(
            f"{url} does not know the place of this network: {text}. Write its latitude and "
            "longitude instead."
        ) from None
    return latitude, longitude
