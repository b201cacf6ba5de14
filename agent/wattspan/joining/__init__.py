"""A process's energy divided among its spans, exactly.

At every instant the power of a process belongs to its active *leaf* spans: those that are open
and have no open child in the same process. They divide it by weight. Energy is thus divided as
a fair queue divides a line: while energy flows, a *virtual* account grows by energy divided by
the weight of all leaves, and what a span gets is its weight times the growth of that account
while it was a leaf. So a span costs a few steps when it begins and ends, however many others
there are.

A plain OTLP span is told when it is over, in batches, parents after their children. Time whose
energy was divided is *covered* and never divided again: a span that comes later shares only what
is not covered yet. What no span ever claims is the process's own, *outside*.

A process that announces its spans when they open (:class:`Started`, :class:`Ended`) gets more:
an open span takes part from its start, and its energy is held for it until it comes.

Every division rounds down, in units of 2**-104 microjoules; what is lost so is far less than a
microjoule a span, and falls to *outside*.
"""

from __future__ import annotations

from wattspan.joining.covered import Covered, Stretch
from wattspan.joining.process import ProcessSpans
from wattspan.joining.recent import Recent
from wattspan.joining.weights import HEAVIEST

__all__ = ["HEAVIEST", "Covered", "ProcessSpans", "Recent", "Stretch"]
