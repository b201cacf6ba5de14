"""Every benchmark, one after the other: `make bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if '__name__ == "__main__"' in path.read_text() and path.stem != "__main__"
)

failed = []
for script in SCRIPTS:
    print(f"\n## {script}\n", flush=True)
    if subprocess.run([sys.executable, "-m", f"benchmarks.{script}"], check=False).returncode:
        failed.append(script)
if failed:
    sys.exit(f"failed: {', '.join(failed)}")
