"""Make the pictures of the documentation: ``python -m testbed.drawing --help``."""

from __future__ import annotations

import argparse
import io
import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from dashboards.queries import GRAFANA, documents
from PIL import Image

from testbed.drawing.answers import Picture, Window, answered, prometheus, seconds
from testbed.drawing.browser import Drawing, browser, draw

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / ".tools" / "grafana" / "dist"
IMAGES = ROOT / "docs" / "images" / "dashboards"


def main() -> int:
    told = _arguments()
    if not (told.page / "index.html").exists():
        print(f"Nothing is built in {told.page}; run `scripts/test-tools`.", file=sys.stderr)
        return 1
    end = datetime.fromisoformat(told.end) if told.end else datetime.now(UTC)
    start = end - timedelta(seconds=seconds(told.last))
    window = Window(start.timestamp(), end.timestamp(), seconds(told.scrape))
    chosen = dict(one.split("=", 1) for one in told.set)
    ask, bad = prometheus(told.prometheus), 0
    told.out.mkdir(parents=True, exist_ok=True)
    with browser() as chromium:
        for name, document in documents(told.dashboards).items():
            stem = name.removesuffix(".json")
            if told.only and stem not in told.only:
                continue
            picture = Picture(told.theme, told.width, told.note, chosen)
            given = answered(document, ask, window, picture)
            if told.keep:
                (told.out / f"{stem}.answers.json").write_text(json.dumps(given))
            drawing = draw(chromium, told.page, given)
            path = told.out / f"{stem}.png"
            path.write_bytes(smaller(drawing.image))
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
            bad += _complain(drawing)
    return 1 if bad else 0


def _complain(drawing: Drawing) -> int:
    """Print the defects of a drawing; return their number."""
    lines = [
        f"  {panel.state}: {panel.title} (panel {panel.id}) {'; '.join(panel.problems)}"
        for panel in drawing.panels
        if panel.state in ("error", "empty")
    ]
    lines += [f"  console: {line}" for line in drawing.console]
    lines += [f"  asked elsewhere: {address}" for address in drawing.strangers]
    print("\n".join(lines), end="\n" if lines else "")
    return len(lines)


def smaller(image: bytes) -> bytes:
    """``image`` in at most 128 colors: a third of the size."""
    with Image.open(io.BytesIO(image)) as full:
        few = full.convert("RGB").quantize(
            128, Image.Quantize.MEDIANCUT, kmeans=1, dither=Image.Dither.NONE
        )  # without kmeans a point of a few pixels has another color
        written = io.BytesIO()
        few.save(written, "PNG", optimize=True)
    return written.getvalue()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m testbed.drawing",
        description="Draw the dashboards with Grafana's own components, from what a Prometheus "
        "answers, and say which panels have nothing to show.",
    )
    option = parser.add_argument
    option("only", nargs="*", help="names of dashboards, as host; all without it")
    option("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    option("--last", default="15m", metavar="TIME", help="the time to show (default: 15m)")
    option("--end", default="", metavar="TIME", help="its end, ISO 8601 with a zone (default: now)")
    option("--scrape", default="15s", metavar="TIME", help="how often Prometheus scrapes")
    option("--theme", choices=("dark", "light"), default="dark")
    option("--width", type=int, default=1440, metavar="PIXELS")
    option("--note", default="Emulated host", help="what stands beside the time")
    option("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable's value")
    option("--keep", action="store_true", help="keep what Prometheus answered beside the picture")
    option("--dashboards", type=Path, default=GRAFANA, metavar="FOLDER")
    option("--page", type=Path, default=PAGE, metavar="FOLDER", help="the built page")
    option("--out", type=Path, default=IMAGES, metavar="FOLDER")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
