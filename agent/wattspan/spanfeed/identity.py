"""Which process spans belong to.

In order of trust: the credentials of a Unix socket's peer; the kernel's owner of a TCP
connection on this host; a claimed pid whose time of birth fits; a pid in a claimed container.
What cannot be true is not believed, and where nothing tells, nobody is charged.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from wattspan.http.messages import Peer
from wattspan.model import MILLISECOND, SECOND, Consumer
from wattspan.ports import Clock
from wattspan.spanfeed.births import Births
from wattspan.spanfeed.claims import Claims
from wattspan.spanfeed.containers import Containers
from wattspan.spanfeed.delivery import Claim
from wattspan.spanfeed.evidence import Allowance, Kernel
from wattspan.spanfeed.peers import UNDATED, Senders
from wattspan.spans.values import Outcome

SURE = 250 * MILLISECOND
"""How long an answer stands unchecked: no host gives out all of its pids in so short a time."""

UNSURE = 2 * SECOND
"""How long it stands that nobody can be named, before all is looked at again."""

AFTERLIFE = 60 * SECOND
"""How long spans may come after the end of their process, over somebody else's connection."""

MOST = 4096
LONGEST = 512
"""Characters of a claim that are read and kept: more than any true one has."""

_Key = tuple[Peer, int | None, str, str]
"""Who sends, and what is said of the process: its pid, its birth, its container."""


class _Answer(NamedTuple):
    found: Consumer | Outcome
    judged: int
    until: int
    ended: int | None = None  # when its process was first found to be gone


class Identities:
    """Resolves senders and claims to processes. Safe from any thread.

    An answer is a pid with its start time, so whoever is given the same pid later is another
    process. A sender is best asked about while it waits for the response: then it lives.
    """

    def __init__(self, clock: Clock, kernel: Kernel) -> None:
        looking = Allowance(clock)
        self._clock = clock
        self._kernel = kernel
        self._births = Births()
        self._senders = Senders(kernel, Allowance(clock), looking)
        self._claims = Claims(kernel, Containers(kernel, clock, looking), self._births)
        self._answers: dict[_Key, _Answer] = {}
        self._lock = threading.Lock()
        self._births.observe(clock.now())

    def identify(self, pid: int) -> Consumer | None:
        """The process that has ``pid`` now."""
        return self._kernel.identify(pid)

    def resolve(self, peer: Peer, claim: Claim) -> Consumer | Outcome:
        """The process of spans that ``peer`` sends and of which ``claim`` is said.

        Outcome.NOT_BELIEVED for what cannot be true, UNKNOWN_PROCESS where nothing tells.
        """
        _, pid, created, container = claim
        if len(created) + len(container) > LONGEST:
            created, container = created[: LONGEST // 2], container[: LONGEST // 2]
        key = (peer, pid, created, container)
        answer = self._answers.get(key)
        if answer is not None and self._clock.monotonic() < answer.until:
            return answer.found
        with self._lock:
            return self._renew(key, answer).found

    # ------------------------------------------------------------------------------- details

    def _renew(self, key: _Key, old: _Answer | None) -> _Answer:
        peer, pid, created, container = key
        claim = Claim("", pid, created, container)
        now = self._clock.now()
        self._births.observe(now)
        answer = self._still(peer, claim, old, now.mono)
        if answer is None:
            sender = self._senders.of(peer, claim.pid, now)
            found = self._claims.judge(sender, claim) if sender else Outcome.UNKNOWN_PROCESS
            stands = SURE if isinstance(found, Consumer) else UNSURE
            answer = _Answer(found, now.mono, now.mono + stands)
        self._answers.pop(key, None)
        self._answers[key] = answer
        if len(self._answers) > MOST:
            self._answers = dict(list(self._answers.items())[MOST // 4 :])
        return answer

    def _still(self, peer: Peer, claim: Claim, old: _Answer | None, now: int) -> _Answer | None:
        """The old answer, where its process still lives, or has only just died."""
        if old is None or not isinstance(old.found, Consumer):
            return None
        present = self._kernel.identify(old.found.pid)
        if present == old.found:
            # An undated connection may be another one by now.
            undated = peer.accepted is None and now - old.judged >= UNDATED
            disowned = claim.pid is None and self._claims.forwards(old.found)
            return None if undated or disowned else old._replace(until=now + SURE)
        ended = now if old.ended is None else old.ended
        if present is None and now - ended < AFTERLIFE:
            return old._replace(until=now + SURE, ended=ended)
        return None
