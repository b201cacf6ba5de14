"""``python -m wattspan`` is the ``wattspan`` program."""

import sys

# Python puts the working directory first on the path, unless told otherwise (-I, -P). No module
# of the program is there, and another user may have put one of the same name there.
if not sys.flags.safe_path:
    del sys.path[0]

from wattspan.cli import main

main()
