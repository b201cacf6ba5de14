"""``python -m wattspan`` is the ``wattspan`` program."""

from wattspan.cli import main

main()
