"""``python -m benchmarks.tuner``"""

from __future__ import annotations

from benchmarks.tuner.command import main

if __name__ == "__main__":
    main()
