"""One script a claim: cost of the agent, measured next to its peers."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
