"""The one place where caps are asked for, held, let go of and shown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from wattspan.capper.audit import AuditEvent
from wattspan.capper.devices import matches_device
from wattspan.capper.journal import EntrySource
from wattspan.capper.leases import CapGrant, LeaseRegistry
from wattspan.capper.limits import OperatorLimits
from wattspan.capper.protocol import RefusalReason
from wattspan.capper.reconciler import Reconciler
from wattspan.capper.resolver import UNKNOWN_PEER, CapResolver, ImposedLimits
from wattspan.capper.writer import LimitWriter, WriteCause, foreign_limit_error
from wattspan.model import MILLISECOND, SECOND, CapKey, CapRow, Knob, KnobState
from wattspan.ports import SUSPENDED, CapsError, Clock
from wattspan.util.peer_credentials import PeerCredentials

READ_INTERVAL = 10 * SECOND
"""How often devices that nobody holds are looked at, and new ones looked for."""
_UNUSABLE = (
    RefusalReason.NO_PERMISSION,
    RefusalReason.LOCKED,
    RefusalReason.LOST,
    RefusalReason.NOT_HONOURED,
)


class CapManager:
    """Answers for every cap; belongs to one thread.

    ``turn`` is to be called every second or so, whatever else happens.
    """

    def __init__(
        self,
        writer: LimitWriter,
        clock: Clock,
        rules: OperatorLimits,
        *,
        longest: int,
        record: Callable[[AuditEvent], None],
        tunable: Collection[str] = (),
        knobs: Collection[Knob] = (),
    ) -> None:
        """``tunable`` and ``knobs`` are what a tuner may hold; none named: all."""
        self._writer, self._devices = writer, writer.devices
        self._clock, self._tunable, self._knobs = clock, tunable, knobs
        self._wishes = CapResolver(writer, rules, longest)
        self._settler = Reconciler(writer, self._wishes, clock, record)
        self._looked: int | None = None

    @property
    def leases(self) -> LeaseRegistry:
        return self._wishes.leases

    @property
    def journal_trouble(self) -> str:
        """Why the journal is not as it should be, if it is not."""
        return self._settler.journal_trouble

    @property
    def rules(self) -> OperatorLimits:
        """The operator's floors and steps."""
        return self._wishes.rules

    def settle_for(
        self,
        rules: OperatorLimits,
        *,
        longest: int,
        tunable: Collection[str] = (),
        knobs: Collection[Knob] = (),
    ) -> None:
        """Keep to other rules from now on. What is held and still permitted stays as it is."""
        self._wishes.rules, self.leases.longest = rules, longest
        self._tunable, self._knobs = tunable, knobs
        for key in self.leases.held():
            held, state = self.leases.holding(key), self._devices.states.get(key)
            if held is not None and state is not None and self._barred(state) is not None:
                self._let_go(held[0], held[2].job, "it is not to be tuned any more")

    # ---------------------------------------------------------------------------- what is asked

    def hold(
        self,
        holder: int,
        job: str,
        wishes: Mapping[CapKey, int],
        why: str,
        *,
        lease: int = 0,
        peer: PeerCredentials = UNKNOWN_PEER,
        within: int = 500 * MILLISECOND,
    ) -> None:
        """Hold exactly ``wishes`` for ``job``, or nothing: CapsError says what was refused.

        It returns after about ``within`` nanoseconds even if not every device is set by then; the
        next turn goes on.
        """
        now = self._clock.now()
        self._refuse(holder, job, wishes)
        had = self.leases.grant_of(holder, job)
        self._wishes.peers[holder] = peer
        caps = {key: self._wishes.one_step(key, value) for key, value in wishes.items()}
        since = had.since if had is not None and had.asked == wishes else now
        grant = CapGrant(job, why, since, dict(wishes), caps)
        self.leases.grant(holder, grant, length=lease, now=now.mono)
        concerned = {*wishes, *(had.caps if had is not None else ())}
        troubles = self._settler.settle(concerned, until=now.mono + within)
        refused = next((troubles[key] for key in wishes if key in troubles), None)
        if refused is not None:
            self._let_go(holder, job, "the hold could not be had whole")
            raise refused

    def renew(self, holder: int) -> None:
        """The holder's loop runs."""
        self.leases.renew(holder, self._clock.monotonic())

    def release(self, holder: int, job: str = "") -> None:
        """Give back what ``holder`` holds for ``job``, or all it holds."""
        self._let_go(holder, job, "its holder let go")

    def gone(self, holder: int) -> None:
        """The connection has ended, and its leases with it."""
        self._let_go(holder, "", "its holder has gone")
        self._wishes.peers.pop(holder, None)

    def impose(self, imposed: ImposedLimits) -> None:
        """What holds from the next turn on, whoever holds what."""
        self._wishes.asked_for = imposed

    def accept(self) -> int:
        """Take what somebody else has written as the original from now on; how many knobs.

        An entry of an earlier boot is dropped if its device has not answered yet.
        """
        theirs = [
            key
            for key, entry in self._writer.entries.items()
            if entry.left_alone or entry.source is EntrySource.EARLIER
        ]
        for key in theirs:
            self._writer.accept(key)
        self._settler.settle(theirs)
        return len(theirs)

    def restore(self) -> tuple[CapsError, ...]:
        """Give everything back, imposed caps too; what could not be given back, and why.

        What somebody else has written is left. Nothing is set again by this keeper.
        """
        self._wishes.suspended = True
        return self._release_all("everything is given back")

    def stop(self) -> tuple[CapsError, ...]:
        """End every lease: each knob goes to its imposed limit, or to its original.

        Returns the failures. Fixed caps and budgets stay in force until the operator lifts them.
        """
        return self._release_all("the capper stops")

    def impose_retained(self) -> None:
        """Impose the limits that the journal retains, for there is nobody else to say."""
        entries = self._writer.entries.items()
        limits = {key: entry.imposed for key, entry in entries if entry.imposed is not None}
        self.impose(ImposedLimits(fixed=limits))

    # ------------------------------------------------------------------------ what time brings

    def turn(self) -> None:
        """Let leases lapse, look at every knob that anybody holds, and set what is to be set."""
        ended = {
            key: WriteCause(grant.job, "its lease lapsed")
            for grant in self.leases.lapse(self._clock.monotonic())
            for key in grant.caps
        }
        self.look()
        self._settler.settle({*self._writer.entries, *self._wishes.keys()}, ended=ended)
        self._settler.see_whether_obeyed()

    def look(self) -> None:
        """Look for devices, if that was not done of late."""
        now = self._clock.monotonic()
        due = self._looked is None or now - self._looked >= READ_INTERVAL
        if due or self._devices.listing_stuck:
            self._looked = now
            self._devices.look()

    # ------------------------------------------------------------------------------ what is so

    @property
    def suspended(self) -> bool:
        """Whether everything was given back, and nothing is set any more."""
        return self._wishes.suspended

    def standing(self) -> dict[CapKey, KnobState]:
        """Every knob with its range as it was before we wrote, ``requested`` being the original."""
        found = {}
        for key, state in self._devices.states.items():
            entry = self._writer.entries.get(key)
            ours = entry is not None and not entry.left_alone
            original = entry.original if entry is not None and ours else state.requested
            found[key] = replace(self._wishes.ranged(state), requested=original)
        return found

    @property
    def stuck(self) -> dict[CapKey, int]:
        """Knobs that cannot be turned now, somebody else's or broken, and what stands on them."""
        return {
            key: max(state.requested or 0, state.enforced or 0)
            for key, state in self._devices.states.items()
            if self._theirs(key) or self._settler.broken(key)
        }

    def wants(self) -> dict[CapKey, int]:
        """What tuners hold."""
        held = ((key, self.leases.holding(key)) for key in self.leases.held())
        return {key: grant[2].caps[key] for key, grant in held if grant is not None}

    def rows(self) -> tuple[CapRow, ...]:
        """Every knob as it was last seen, and who holds it."""
        return tuple(self._row(state) for _, state in sorted(self._devices.states.items()))

    # --------------------------------------------------------------------------- inner workings

    def _release_all(self, why: str) -> tuple[CapsError, ...]:
        self.leases.clear()
        self._settler.rested()
        keys = set(self._writer.entries)
        troubles = self._settler.settle(keys, ended=dict.fromkeys(keys, WriteCause(why=why)))
        return tuple(e for e in troubles.values() if e.refusal != RefusalReason.FOREIGN)

    def _let_go(self, holder: int, job: str, why: str) -> None:
        ended = {
            key: self._wishes.cause_of(holder, grant)._replace(why=why)
            for grant in self.leases.release(holder, job)
            for key in grant.caps
        }
        self._settler.settle(ended, ended=ended)

    def _theirs(self, key: CapKey) -> bool:
        entry = self._writer.entries.get(key)
        return entry is not None and entry.left_alone

    def _refuse(self, holder: int, job: str, wishes: Mapping[CapKey, int]) -> None:
        """CapsError if the wishes cannot be granted; nothing has been changed then."""
        if self.suspended and wishes:
            raise CapsError(SUSPENDED, RefusalReason.NOT_ALLOWED)
        if any(key not in self._devices.states for key in wishes):
            self._devices.look()
        for key, value in wishes.items():
            self._devices.refresh(key)
            state = self._devices.states.get(key)
            if state is None:
                raise CapsError(
                    f"No {key.knob} of {key.device!r} can be set here; `wattspan caps status`"
                    " lists what can.",
                    RefusalReason.UNKNOWN_DEVICE,
                    key.device,
                )
            if (why := self._barred(state)) is not None:
                raise CapsError(why, RefusalReason.NOT_ALLOWED, key.device)
            if value <= 0:
                raise CapsError(
                    f"A cap of {value} {key.knob.unit} on {state.name} makes no sense.",
                    RefusalReason.MALFORMED,
                    key.device,
                )
            held = self.leases.holding(key)
            if held is not None and (held[0], held[2].job) != (holder, job):
                raise CapsError(
                    f"{state.name} is held for {held[2].job!r}; one job at a time holds a device.",
                    RefusalReason.HELD,
                    key.device,
                )
            entry = self._writer.entries.get(key)
            if entry is not None and entry.left_alone:
                raise foreign_limit_error(entry)

    def _barred(self, state: KnobState) -> str | None:
        """Why no tuner may hold a knob, if none may."""
        if self._knobs and state.key.knob not in self._knobs:
            return (
                f"The {state.key.knob} of {state.name} is not to be tuned: [autotune] knobs does"
                " not name it."
            )
        if self._tunable and not matches_device(self._tunable, state):
            return f"{state.name} is not to be tuned: [autotune] gpus does not name it."
        return None

    def _row(self, state: KnobState) -> CapRow:
        key, entry = state.key, self._writer.entries.get(state.key)
        held, cause, imposed = (
            self.leases.holding(key),
            self._wishes.cause(key),
            self._wishes.imposed,
        )
        rest = self._settler.resting(key)
        if rest is None and entry is not None and entry.left_alone:
            rest = foreign_limit_error(entry)
        return CapRow(
            state=self._wishes.ranged(state),
            original=entry.original if entry is not None else state.requested,
            wanted=held[2].asked[key] if held is not None else imposed.fixed.get(key),
            ceiling=imposed.shares.get(key),
            holder=cause.job,
            why=cause.why,
            since=held[2].since if held is not None else None,
            expires=held[1].until if held is not None else None,
            foreign=self._theirs(key),
            lost=entry is not None and entry.lost,
            usable=rest is None or rest.refusal not in _UNUSABLE,
            trouble="" if rest is None else str(rest),
        )
