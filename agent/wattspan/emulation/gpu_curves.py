"""The published power-limit curves that come with wattspan; their origin is beside them."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files

from wattspan.emulation.physics import CurvePoint, PublishedCurve

_ORIGIN = "published measurement, ml-energy/zeus (NSDI '23), Apache-2.0"


@cache
def published_curves() -> dict[tuple[str, str], PublishedCurve]:
    """Every published curve by GPU ("A40", "V100") and workload ("bert", "resnet50", ...)."""
    points: dict[tuple[str, str], list[CurvePoint]] = {}
    text = files("wattspan.emulation").joinpath("curves", "power_limit.csv").read_text("utf-8")
    for row in csv.DictReader(text.splitlines()):
        point = CurvePoint(
            round(float(row["limit_w"]) * 1000),
            round(float(row["mean_power_w"]) * 1000),
            float(row["time_ratio"]),
        )
        points.setdefault((row["gpu"], row["workload"]), []).append(point)
    return {key: PublishedCurve(tuple(sorted(found)), _ORIGIN) for key, found in points.items()}


def published_curve(gpu: str, workload: str) -> PublishedCurve:
    """The curve of one workload on one GPU; KeyError names those there are."""
    curves = published_curves()
    if (gpu, workload) not in curves:
        known = ", ".join(f"{a} {b}" for a, b in sorted(curves))
        raise KeyError(f"no published curve for {gpu} {workload}; there are: {known}")
    return curves[gpu, workload]
