"""Backends that each break one promise, to see whether the contract notices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from fencing.backends.base import (
    Acquire,
    Busy,
    Command,
    Done,
    Granted,
    NotHeld,
    Orphan,
    Peek,
    Poisoned,
    Release,
    Remint,
    Renew,
    Reply,
    Target,
)
from fencing.backends.memory import MemoryBackend, _Entry
from fencing.errors import FencingError
from fencing.token import HeldBy

DAY = 86_400

C = TypeVar("C", bound=Command)


def keys_of(target: Target) -> list[tuple[str, str]]:
    return [(target.namespace, resource) for resource in target.resources]


def first_alone(command: C) -> C:
    """The command as if it were about its first resource only."""
    return command._replace(target=Target(command.target.namespace, command.target.resources[:1]))


class Mutant(MemoryBackend):
    """What the mutants need to misbehave."""

    def mine(self, command: Acquire | Renew | Remint | Release) -> list[_Entry]:
        live = [self._live(key) for key in keys_of(command.target)]
        return [entry for entry in live if entry is not None and entry.holder == command.holder]

    def one_by_one(self, command: Command) -> list[Reply]:
        """The answers to the command if it were a command for each resource."""
        target = command.target
        alone = [command._replace(target=Target(target.namespace, (name,))) for name in target.resources]
        return [self._answer(each) for each in alone]


# Monotonic.


class RepeatsTokens(Mutant):
    """The clock alone: two mints in one microsecond are the same."""

    def _mint(self, namespace: str, floor: int) -> int | None:
        self._counters.clear()
        return super()._mint(namespace, floor)


class CountsDown(Mutant):
    last = 0

    def _mint(self, namespace: str, floor: int) -> int | None:
        self.last = (self.last or int(self.clock.wall() * 1e6)) - 1
        return self.last


class NeverLifts(Mutant):
    """INCR alone."""

    def _mint(self, namespace: str, floor: int) -> int | None:
        self._counters[namespace] = self._counters.get(namespace, 0) + 1
        return self._counters[namespace]


class LiftsOnce(Mutant):
    """Only a new counter starts at the clock."""

    def _mint(self, namespace: str, floor: int) -> int | None:
        if namespace not in self._counters:
            return super()._mint(namespace, floor)
        return NeverLifts._mint(self, namespace, floor)


class IgnoresTheFloor(Mutant):
    def _mint(self, namespace: str, floor: int) -> int | None:
        return super()._mint(namespace, 0)


class JumpsAboveTheFloor(Mutant):
    """The floor is raised by two, and even a low floor raises the token."""

    def _mint(self, namespace: str, floor: int) -> int | None:
        return super()._mint(namespace, max(floor, int(self.clock.wall() * 1e6)) + 1)


class MintsPoison(Mutant):
    """Any floor will do."""

    def _mint(self, namespace: str, floor: int) -> int | None:
        token = super()._mint(namespace, floor)
        if token is None:
            token = self._counters[namespace] = floor + 1
        return token


class RemembersPoison(Mutant):
    """A refused floor is refused, and yet the counter is raised to it."""

    def _mint(self, namespace: str, floor: int) -> int | None:
        token = super()._mint(namespace, floor)
        if token is None:
            self._counters[namespace] = floor + 1
        return token


class FearsTheFuture(Mutant):
    """A floor of more than a day is poison."""

    def _mint(self, namespace: str, floor: int) -> int | None:
        if floor > (self.clock.wall() + 2 * DAY) * 1e6:
            return None
        return super()._mint(namespace, floor)


# Exclusive.


class TakesOverTheLiving(Mutant):
    """An acquire does not look whether somebody holds it."""

    def _acquire(self, command: Acquire) -> Reply:
        for key in keys_of(command.target):
            self._leases.pop(key, None)
        return super()._acquire(command)


class ProlongsWhenBusy(Mutant):
    def _acquire(self, command: Acquire) -> Reply:
        reply = super()._acquire(command)
        if isinstance(reply, Busy):
            for key in keys_of(command.target):
                if (entry := self._live(key)) is not None:
                    entry.ends = self.clock.now() + command.ttl_ms / 1000
        return reply


class MisreportsTheHolder(Mutant):
    def _look(self, key: tuple[str, str]) -> HeldBy | None:
        found = super()._look(key)
        return found and HeldBy(
            key[1], found.holder[::-1], found.token - 1, found.label.strip() + ".", found.held_since - 1, 1.0
        )


class SeesGhosts(Mutant):
    def _look(self, key: tuple[str, str]) -> HeldBy | None:
        return super()._look(key) or HeldBy(key[1], "0" * 32, 1, "", 0.0, 1.0)


class ProlongsOnPeek(Mutant):
    def _answer(self, command: Command) -> Reply:
        if isinstance(command, Peek) and (entry := self._live(keys_of(command.target)[0])):
            entry.ends = self.clock.now() + 60
        return super()._answer(command)


class ConfusesNames(Mutant):
    def target(self, namespace: str, resources: tuple[str, ...]) -> Target:
        return Target(namespace, tuple(resource.strip().casefold() for resource in resources))


class ConfusesNamespaces(Mutant):
    def target(self, namespace: str, resources: tuple[str, ...]) -> Target:
        return Target("all", resources)


class ComparesTheEndOfHolders(Mutant):
    def ask(self, command: Command, timeout: float) -> Reply:
        if not isinstance(command, Peek):
            command = command._replace(holder=command.holder[-1] * 32)
        return super().ask(command, timeout)


class CapsTheTtl(Mutant):
    def _acquire(self, command: Acquire) -> Reply:
        return super()._acquire(command._replace(ttl_ms=min(command.ttl_ms, DAY * 1000)))


class LocksTheNamespace(Mutant):
    """One lease at a time, whatever it is about."""

    def _acquire(self, command: Acquire) -> Reply:
        for key, entry in self._leases.items():
            if self._live(key) and entry.holder != command.holder:
                return Busy(self._look(key))
        return super()._acquire(command)


# Expiry.


class NeverExpires(Mutant):
    def _live(self, key: tuple[str, str]) -> _Entry | None:
        return self._leases.get(key)


class ExpiresAtOnce(Mutant):
    def _acquire(self, command: Acquire) -> Reply:
        return super()._acquire(command._replace(ttl_ms=1))


class DoesNotRenew(Mutant):
    def _renew(self, command: Renew) -> Reply:
        return Done()


class ShortensOnRenewal(Mutant):
    def _renew(self, command: Renew) -> Reply:
        for entry in self.mine(command):
            entry.ends = self.clock.now() + command.ttl_ms / 1000
        return Done()


class RenewsOnce(Mutant):
    def _renew(self, command: Renew) -> Reply:
        earlier = [asked for asked in self.asked[:-1] if asked == command]
        return NotHeld(command.target.resources[0], None) if earlier else super()._renew(command)


class RenewsIntoANewLease(Mutant):
    def _renew(self, command: Renew) -> Reply:
        for entry in self.mine(command):
            entry.token += 1
        return super()._renew(command)


class LeavesNoNotes(Mutant):
    def _acquire(self, command: Acquire) -> Reply:
        return super()._acquire(command._replace(note=False))


class AlwaysLeavesNotes(Mutant):
    def _acquire(self, command: Acquire) -> Reply:
        return super()._acquire(command._replace(note=True))


class KeepsNotesAfterRelease(Mutant):
    def _release(self, command: Release) -> Reply:
        notes = dict(self._notes)
        reply = super()._release(command)
        self._notes = notes
        return reply


class KeepsTheFirstNote(Mutant):
    """Neither a new note nor none replaces an old one."""

    def _acquire(self, command: Acquire) -> Reply:
        notes = dict(self._notes)
        reply = super()._acquire(command)
        self._notes |= notes
        return reply


class DropsTheNoteWhenBusy(Mutant):
    def _acquire(self, command: Acquire) -> Reply:
        reply = super()._acquire(command)
        if isinstance(reply, Busy):
            self._notes.pop(keys_of(command.target)[0], None)
        return reply


class NeverUpdatesNotes(Mutant):
    """A note is written with the lease, and neither renewal nor remint touches it."""

    def _acquire(self, command: Acquire) -> Reply:
        reply = super()._acquire(command)
        self._notes = {key: dataclasses.replace(note) for key, note in self._notes.items()}
        return reply


class InventsOrphans(Mutant):
    def _acquire(self, command: Acquire) -> Reply:
        reply = super()._acquire(command)
        if isinstance(reply, Granted) and not reply.orphans:
            ghost = HeldBy(command.target.resources[0], "0" * 32, 1, "", 0.0, 0.0)
            return Granted(reply.token, (Orphan(ghost, 0.0),))
        return reply


class MisreportsOrphans(Mutant):
    def _acquire(self, command: Acquire) -> Reply:
        reply = super()._acquire(command)
        if isinstance(reply, Granted):
            wrong = {"holder": command.holder, "token": reply.token, "held_since": self.clock.wall()}
            orphans = [Orphan(found.previous._replace(**wrong), 0.0) for found in reply.orphans]
            return Granted(reply.token, tuple(orphans))
        return reply


# Ownership.


class ReleasesForAnybody(Mutant):
    def _release(self, command: Release) -> Reply:
        for key in keys_of(command.target):
            self._leases.pop(key, None)
        return Done()


class ReleasesWhileRefusing(Mutant):
    """Says no, and deletes."""

    def _release(self, command: Release) -> Reply:
        reply = self._foreign(command)
        ReleasesForAnybody._release(self, command)
        return reply or Done()


class ReleasesAllOfTheHolder(Mutant):
    def _release(self, command: Release) -> Reply:
        reply = super()._release(command)
        self._leases = {key: entry for key, entry in self._leases.items() if entry.holder != command.holder}
        return reply


class DoesNotRelease(Mutant):
    def _release(self, command: Release) -> Reply:
        return self._foreign(command) or Done()


class RenewsForAnybody(Mutant):
    def _answer(self, command: Command) -> Reply:
        if isinstance(command, Renew) and all(map(self._live, keys_of(command.target))):
            return self._renew(command)
        return super()._answer(command)


class RenewsWhileRefusing(Mutant):
    """Says no, and prolongs what it can."""

    def _answer(self, command: Command) -> Reply:
        reply = super()._answer(command)
        if isinstance(command, Renew):
            for key in keys_of(command.target):
                if (entry := self._live(key)) is not None:
                    entry.ends = self.clock.now() + command.ttl_ms / 1000
        return reply


class RemintsForAnybody(Mutant):
    def _answer(self, command: Command) -> Reply:
        if isinstance(command, Remint) and all(map(self._live, keys_of(command.target))):
            return self._remint(command)
        return super()._answer(command)


class RemintsWhileRefusing(Mutant):
    """Says no, and mints for what it can."""

    def _answer(self, command: Command) -> Reply:
        reply = super()._answer(command)
        if isinstance(command, Remint) and isinstance(reply, NotHeld):
            token = self._mint(command.target.namespace, command.floor)
            for key in keys_of(command.target):
                if (entry := self._live(key)) is not None:
                    entry.token = token or 0
        return reply


class TakesWhatIsFree(Mutant):
    """Renewal and remint of what nobody holds acquire it; to release it is fine."""

    def _answer(self, command: Command) -> Reply:
        if isinstance(command, (Renew, Remint)) and not any(map(self._live, keys_of(command.target))):
            self._acquire(Acquire(command.target, command.holder, "", 60_000))
        if isinstance(command, Release) and not any(map(self._live, keys_of(command.target))):
            return Done()
        return super()._answer(command)


class NeverRemints(Mutant):
    def _remint(self, command: Remint) -> Reply:
        return Granted(self.mine(command)[0].token)


class AlwaysRemints(Mutant):
    def _remint(self, command: Remint) -> Reply:
        for entry in self.mine(command):
            entry.token = 0
        return super()._remint(command)


class RemintsOnlyBelowTheFloor(Mutant):
    def _remint(self, command: Remint) -> Reply:
        return super()._remint(command._replace(floor=command.floor - 1))


class RemintsAndRenews(Mutant):
    def _remint(self, command: Remint) -> Reply:
        for entry in self.mine(command):
            entry.ends = self.clock.now() + 60
        return super()._remint(command)


class LosesWhatItRemints(Mutant):
    def _remint(self, command: Remint) -> Reply:
        reply = super()._remint(command)
        for key in keys_of(command.target):
            del self._leases[key]
        return reply


# Replay.


class MintsAtEachReplay(Mutant):
    def _acquire(self, command: Acquire) -> Reply:
        if len(self.mine(command)) == len(command.target.resources):
            for key in keys_of(command.target):
                del self._leases[key], self._notes[key]
        return super()._acquire(command)


class BurnsATokenAtEachReplay(Mutant):
    def _acquire(self, command: Acquire) -> Reply:
        if self.mine(command):
            self._mint(command.target.namespace, 0)
        return super()._acquire(command)


class LetsTheTtlRunOnAtReplay(Mutant):
    def _acquire(self, command: Acquire) -> Reply:
        ends = [entry.ends for entry in self.mine(command)]
        reply = super()._acquire(command)
        for entry, end in zip(self.mine(command), ends, strict=False):
            entry.ends = end
        return reply


class IsBusyForItself(Mutant):
    def _acquire(self, command: Acquire) -> Reply:
        if self.mine(command):
            return Busy(self._look(keys_of(command.target)[0]))
        return super()._acquire(command)


class RemembersTokensForEver(Mutant):
    """A cache of answers, by holder, that nothing clears."""

    def _acquire(self, command: Acquire) -> Reply:
        reply = super()._acquire(command)
        if isinstance(reply, Granted):
            self.cache = getattr(self, "cache", {})
            return Granted(self.cache.setdefault(command.holder, reply.token), reply.orphans)
        return reply


# Several at once.


class TakesWhatItCanGet(Mutant):
    def _acquire(self, command: Acquire) -> Reply:
        if len(command.target.resources) == 1:
            return super()._acquire(command)
        replies = self.one_by_one(command)
        return next((reply for reply in replies if isinstance(reply, Busy)), replies[0])


class SeesOnlyTheFirst(Mutant):
    """Of several resources the others are overlooked, by every command."""

    def _answer(self, command: Command) -> Reply:
        return super()._answer(first_alone(command))


class LooksOnlyAtTheFirst(Mutant):
    """The rest is taken from whoever has it."""

    def _acquire(self, command: Acquire) -> Reply:
        for key in keys_of(command.target)[1:]:
            self._leases.pop(key, None)
        return super()._acquire(command)


class RenewsOnlyTheFirst(Mutant):
    def _renew(self, command: Renew) -> Reply:
        return super()._renew(first_alone(command))


class ReplaysOnlyTheFirst(Mutant):
    def _acquire(self, command: Acquire) -> Reply:
        ends = [entry.ends for entry in self.mine(command)]
        reply = super()._acquire(command)
        for entry, end in list(zip(self.mine(command), ends, strict=False))[1:]:
            entry.ends = end
        return reply


class RemintsOnlyTheFirst(Mutant):
    def _remint(self, command: Remint) -> Reply:
        return super()._remint(first_alone(command))


class ReleasesOnlyTheFirst(Mutant):
    def _release(self, command: Release) -> Reply:
        return super()._release(first_alone(command))


class RenewsWhatIsLeft(Mutant):
    """And calls it done."""

    def _answer(self, command: Command) -> Reply:
        if isinstance(command, Renew) and (entries := self.mine(command)):
            for entry in entries:
                entry.ends = self.clock.now() + command.ttl_ms / 1000
            return Done()
        return super()._answer(command)


class ReplaysWhatIsLeft(Mutant):
    """Part of the set is taken for the whole of it."""

    def _acquire(self, command: Acquire) -> Reply:
        if entries := self.mine(command):
            return Granted(entries[0].token)
        return super()._acquire(command)


class ReleasesAllOrNothing(Mutant):
    def _release(self, command: Release) -> Reply:
        return self._foreign(command) or super()._release(command)


class ReleasesInSilence(Mutant):
    def _release(self, command: Release) -> Reply:
        super()._release(command)
        return Done()


class AnswersInAnyOrder(Mutant):
    def ask_many(self, commands: Sequence[Command], timeout: float) -> Sequence[Reply | FencingError]:
        return super().ask_many(commands, timeout)[::-1]


class AnswersTheFirstHundred(Mutant):
    def ask_many(self, commands: Sequence[Command], timeout: float) -> Sequence[Reply | FencingError]:
        return super().ask_many(commands, timeout)[:100]


class AnswersUnasked(Mutant):
    def ask_many(self, commands: Sequence[Command], timeout: float) -> Sequence[Reply | FencingError]:
        return super().ask_many(commands, timeout) or [Poisoned(0)]
