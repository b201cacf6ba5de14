"""wattspan: where do the joules go, and how many can we give back?"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("wattspan")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
