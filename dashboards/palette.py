"""Meanings of colours, and Grafana's names of units."""

from __future__ import annotations

GOOD, NOTICE, BAD = "green", "orange", "red"
CALM = "blue"

IDLE = "#8e8e8e"
UNATTRIBUTED = "#ffb000"
OTHERS = "#5c6b7a"

ACCOUNTS = {
    "idle": IDLE,
    "unattributed": UNATTRIBUTED,
    "other groups": OTHERS,
    "in no group of this kind": "#9fb0c0",
    "other processes": OTHERS,
    "/^other ?( on .+)?$/": OTHERS,  # the row of all processes that are not listed has no pid
    "cpu": "#5794f2",
    "gpu": "#73bf69",
    "memory": "#b877d9",
    "enclosure": "#37872d",
}
"""Series that are the same on every panel, by their names in legends."""

PROVENANCE = {
    "measured": "green",
    "derived": "blue",
    "estimated": "orange",
    "emulated": "purple",
}
"""Provenances of figures."""

CERTAINTY = {"lower_bound": NOTICE, "unknown": BAD}
"""Certainties of figures that are not known."""

MARK = "#8ab8ff"

STATES = {
    "waiting": "#8e8e8e",
    "exploring": "blue",
    "holding": "green",
    "released": "#9fb0c0",
    "declined": "orange",
    "ended": "#5c6b7a",
}
"""States of a tuned job, in the order of their numbers on the state timeline."""

LIMITS = {
    "power": "blue",
    "enforced": "red",
    "requested": "orange",
    "original": "#9fb0c0",
    "default": "#9fb0c0",
    "maximum": "#5c6b7a",
    "minimum": "#5c6b7a",
    "ceiling": "purple",
}

CURRENCIES = (
    "BRL", "CHF", "CZK", "DKK", "EUR", "GBP", "IDR", "ILS", "INR", "JPY", "KRW", "MYR", "NOK",
    "PHP", "PLN", "SEK", "TRY", "USD", "VND",
)  # fmt: skip
"""The codes that Grafana can write with their sign; any other is a plain number."""

WATT, JOULE, KWH = "watt", "joule", "kwatth"
SECONDS, BYTES, HERTZ, CELSIUS = "s", "bytes", "hertz", "celsius"
SHARE = "percentunit"
GRAMS = "massg"
PLAIN = "short"
PER_SECOND = "cps"
