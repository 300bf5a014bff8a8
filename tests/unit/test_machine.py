"""Several processes on one backend in every kind of trouble, played by Hypothesis.

Each `Leases` is a process of its own; they share a backend, a ledger and a clock. The rules do what processes and
operators do and what networks and servers do to them; the invariants are the promises of the lease half. The mutants
at the end show that each of them can be broken, and that this is found.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    INVARIANT_MARKER,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fencing import (
    BackendUnavailable,
    ClaimLost,
    Lease,
    LeaseLost,
    LeaseNotHeld,
    Leases,
    LeaseUnavailable,
    Policy,
    Renewal,
    StaleToken,
    Wait,
)
from fencing.backends.base import Behind, Done, Granted, Release, Remint, Reply
from fencing.tenure import TRANSITIONS, Signal, State, Tenure
from fencing.testing import FakeClock, MemoryBackend, MemoryLedger, supersede
from fencing.token import Grant

TTL = 9.0
RESOURCES = ("a", "b")
PROCESSES = 3
FENCE, CONTINUE = Renewal(failures=3), Renewal(failures=3, on_failure="continue")

resources = st.sampled_from(RESOURCES)
processes = st.integers(0, PROCESSES - 1)
durations = st.sampled_from([0.001, 1.0, 3.0, 5.0, 8.999, 9.0, 20.0])
renewals = st.sampled_from([None, FENCE, CONTINUE])
any_lease = st.integers(0, 1000)


class Interruptible(MemoryLedger):
    """A ledger before whose next claim something can happen."""

    before: Callable[[], None] | None = None

    def claim(self, grant: Grant) -> Behind | None:
        happens, self.before = self.before, None
        if happens is not None:
            happens()
        return super().claim(grant)


@dataclass(eq=False)
class Handed:
    """A lease that was handed out, and what has been done to it that it cannot know of."""

    lease: Lease
    resource: str
    process: Leases
    may_go_on: bool
    """Whether its policy was ever to go on without a lease."""
    undone: bool = False
    """The backend was made to forget it: it does not exclude others any more, and learns of that later."""
    lost: LeaseLost | None = None

    @property
    def passes(self) -> bool:
        try:
            self.lease.check()
        except (LeaseLost, LeaseNotHeld):
            return False
        return True


class Processes(RuleBasedStateMachine):
    make_backend: Callable[[FakeClock], MemoryBackend] = MemoryBackend
    make_ledger: Callable[[], Interruptible] = Interruptible

    @initialize()
    def start(self) -> None:
        self.clock = FakeClock()
        self.backend = type(self).make_backend(self.clock)
        self.ledger = type(self).make_ledger()
        self.processes = [self.process() for _ in range(PROCESSES)]
        self.handed: list[Handed] = []
        self.rows: dict[tuple[str, str], tuple[int, str]] = {}

    def process(self) -> Leases:
        policy = Policy(ttl=TTL, wait=Wait(budget=0.0), renewal=FENCE)
        return Leases(self.backend, namespace="test", ledger=self.ledger, policy=policy, observers=[])

    def hand_out(self, lease: Lease, resource: str, process: Leases, renewal: Renewal | None) -> None:
        """Write down that somebody got a lease: the order of the list is the order of the grants."""
        effective = renewal or process.policy.renewal
        self.handed.append(Handed(lease, resource, process, effective.on_failure == "continue"))

    def pick(self, number: int) -> Handed:
        return self.handed[number % len(self.handed)]

    def holds(self, process: Leases, resource: str) -> bool:
        """Whether a process has the resource in hand: asking again would be an error of its program."""
        return any(
            one.process is process and one.resource == resource and one.lease.held for one in self.handed
        )

    # What processes do

    @rule(number=processes, resource=resources, renewal=renewals, wait=st.sampled_from([0.0, 0.0, 2.0, 12.0]))
    def acquire(self, number: int, resource: str, renewal: Renewal | None, wait: float) -> None:
        process = self.processes[number]
        if self.holds(process, resource):
            return
        with suppress(LeaseUnavailable, BackendUnavailable):
            lease = process.acquire(resource, renewal=renewal, wait=wait)
            self.hand_out(lease, resource, process, renewal)

    @rule(number=processes, resource=resources, other=processes, pause=durations)
    def acquire_with_a_pause_before_the_claim(
        self, number: int, resource: str, other: int, pause: float
    ) -> None:
        """Granted, then frozen; meanwhile another process may take the resource over."""
        process, intruder = self.processes[number], self.processes[other]
        if self.holds(process, resource) or process is intruder:
            return

        def meanwhile() -> None:
            self.clock.pause(pause)
            self.acquire(other, resource, None, 0.0)

        self.ledger.before = meanwhile
        self.acquire(number, resource, None, 0.0)
        self.ledger.before = None

    @precondition(lambda self: self.handed)
    @rule(number=any_lease)
    def release(self, number: int) -> None:
        with suppress(LeaseNotHeld, LeaseLost, BackendUnavailable):
            self.pick(number).lease.release()

    @precondition(lambda self: self.handed)
    @rule(number=any_lease)
    def leave_the_block(self, number: int) -> None:
        self.pick(number).lease.__exit__(None, None, None)

    @precondition(lambda self: self.handed)
    @rule(number=any_lease)
    def renew(self, number: int) -> None:
        with suppress(LeaseNotHeld, LeaseLost, BackendUnavailable):
            self.pick(number).lease.renew()

    @precondition(lambda self: self.handed)
    @rule(number=any_lease, ttl=st.sampled_from([0.5, 3.0, 30.0]))
    def extend(self, number: int, ttl: float) -> None:
        with suppress(LeaseNotHeld, LeaseLost, BackendUnavailable):
            self.pick(number).lease.extend(ttl)

    # What operators do

    @rule(number=processes, renewal=st.sampled_from([FENCE, CONTINUE]))
    def switch_policy(self, number: int, renewal: Renewal) -> None:
        process = self.processes[number]
        process.policy = Policy(ttl=TTL, wait=Wait(budget=0.0), renewal=renewal)
        if renewal is CONTINUE:
            for one in self.handed:
                one.may_go_on = one.may_go_on or one.process is process

    # What the world does

    @rule(seconds=durations)
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(seconds=durations)
    def all_processes_are_paused(self, seconds: float) -> None:
        self.clock.pause(seconds)

    @rule(count=st.integers(1, 4))
    def requests_fail(self, count: int) -> None:
        self.backend.fail_next(count)

    @rule(count=st.integers(1, 4))
    def replies_are_lost(self, count: int) -> None:
        self.backend.lose_replies(count)

    @rule()
    def all_is_well(self) -> None:
        self.backend.fail_next(0)
        self.backend.lose_replies(0)

    @rule(back=st.sampled_from([0.0, 0.0, 1.0, 3600.0]))
    def the_backend_restarts_empty(self, back: float) -> None:
        """Perhaps on a machine whose clock is behind."""
        self.backend.forget()
        self.clock.set_wall(self.clock.wall() - back)
        for one in self.handed:
            one.undone = True

    @precondition(lambda self: self.handed)
    @rule(number=any_lease)
    def supersede(self, number: int) -> None:
        """Another process takes the resource over from a holder that does not know of it."""
        one = self.pick(number)
        self.all_is_well()
        with suppress(LeaseUnavailable):
            one.undone = True
            lease = supersede(one.lease)
            self.hand_out(lease, one.resource, lease._leases, None)

    # What is promised

    @invariant()
    def one_holder_at_a_time(self) -> None:
        """Of the leases that must not go on by themselves, at most one a resource says that it is held."""
        for resource in RESOURCES:
            holding = [
                one
                for one in self.handed
                if one.resource == resource and not one.undone and not one.may_go_on and one.passes
            ]
            assert len(holding) <= 1, f"{len(holding)} hold {resource}"

    @invariant()
    def the_backend_knows_who_holds(self) -> None:
        """A lease that says that it is held, and must not go on by itself, is the one at the backend."""
        for one in self.handed:
            if not one.undone and not one.may_go_on and one.passes:
                entry = self.backend._look(("test", one.resource))
                assert entry is not None
                assert (entry.holder, entry.token) == (one.lease.holder, one.lease.token)

    @invariant()
    def tokens_increase_in_the_order_of_grants(self) -> None:
        for resource in RESOURCES:
            tokens = [one.lease.token for one in self.handed if one.resource == resource]
            assert tokens == sorted(set(tokens)), f"tokens of {resource}: {tokens}"

    @invariant()
    def who_passes_is_before_its_deadline(self) -> None:
        for one in self.handed:
            if one.passes and not one.may_go_on:
                assert self.clock.now() < one.lease.grant.deadline

    @invariant()
    def loss_is_sticky(self) -> None:
        for one in self.handed:
            lost = one.lease.lost
            if one.lost is not None:
                assert lost is one.lost
                assert not one.lease.held
            one.lost = lost

    @invariant()
    def the_ledger_never_goes_down(self) -> None:
        for key, (token, holder) in self.rows.items():
            now_token, now_holder = self.ledger.rows[key]
            assert now_token > token or (now_token, now_holder) == (token, holder)
        self.rows = dict(self.ledger.rows)

    @invariant()
    def only_the_newest_is_current_at_the_ledger(self) -> None:
        for resource in RESOURCES:
            older = [one for one in self.handed if one.resource == resource][:-1]
            assert [self.standing(one) for one in older] == ["stale"] * len(older)

    @invariant()
    def who_holds_is_current_at_the_ledger(self) -> None:
        """Nobody who did not get the lease has shut out the one who has it."""
        for one in self.handed:
            if not one.undone and not one.may_go_on and one.passes:
                assert self.standing(one) == "current"

    @invariant()
    def the_ledger_knows_every_claim(self) -> None:
        assert "unknown" not in [self.standing(one) for one in self.handed]

    def standing(self, one: Handed) -> str:
        """What the ledger says of a lease."""
        try:
            self.ledger.assert_current(one.lease.grant)
        except StaleToken:
            return "stale"
        except ClaimLost:
            return "unknown"
        return "current"


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="fencing")  # thousands of losses, all of them wanted


CALM = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_processes_in_every_kind_of_trouble_keep_the_promises() -> None:
    run_state_machine_as_test(Processes, settings=CALM)


# The machine can fail: each mutant breaks one thing, and must be found


class RepeatsTokens(MemoryBackend):
    def _mint(self, namespace: str, floor: int) -> int | None:
        return max(self._counters.setdefault(namespace, int(self.clock.wall() * 1_000_000)), floor + 1)


class MintsOverALiveHolder(MemoryBackend):
    """A paused acquirer heals its way over whoever holds the resource now."""

    def _answer(self, command: object) -> Reply:
        if isinstance(command, Remint):
            token = self._mint(command.target.namespace, command.floor)
            assert token is not None
            for resource in command.target.resources:
                entry = self._live((command.target.namespace, resource))
                if entry is not None:
                    entry.token = token
            return Granted(token)
        return super()._answer(command)  # type: ignore[arg-type]


class ReleasesOthers(MemoryBackend):
    def _release(self, command: Release) -> Reply:
        for resource in command.target.resources:
            self._leases.pop((command.target.namespace, resource), None)
        return Done()


class GrantsWhatIsHeld(MemoryBackend):
    def _live(self, key: tuple[str, str]) -> None:
        return None


class RenewsWhatIsGone(MemoryBackend):
    def _answer(self, command: object) -> Reply:
        try:
            return super()._answer(command)  # type: ignore[arg-type]
        finally:
            self._leases.pop(("test", "a"), None)


class AdmitsEqualTokens(Interruptible):
    def claim(self, grant: Grant) -> Behind | None:
        row = self.rows.get((grant.namespace, grant.resource))
        if row is not None and grant.token == row[0]:
            self.rows[grant.namespace, grant.resource] = (grant.token, grant.holder)
            return None
        return super().claim(grant)


class AdmitsAll(Interruptible):
    def claim(self, grant: Grant) -> Behind | None:
        self.rows[grant.namespace, grant.resource] = (grant.token, grant.holder)
        return None


class Forgets(Interruptible):
    """Says that it has claimed, and has not."""

    def claim(self, grant: Grant) -> Behind | None:
        behind = super().claim(grant)
        if behind is None and grant.token % 2:
            self.rows[grant.namespace, grant.resource] = (1, grant.holder)
        return behind


class StaysBehind(Interruptible):
    """The first claim of a resource is the last one that it writes down."""

    def claim(self, grant: Grant) -> Behind | None:
        self.rows.setdefault((grant.namespace, grant.resource), (grant.token, grant.holder))
        return None


def check_without_a_look_at_the_clock(self: Lease) -> None:
    tenure = self._tenure
    if tenure.lost is not None:
        raise tenure.lost
    if tenure.state not in (State.HELD, State.CONTINUED):
        raise LeaseNotHeld("it is over", resource=self.resource)


INVARIANTS = [name for name, member in vars(Processes).items() if hasattr(member, INVARIANT_MARKER)]


def machine(
    backend: Callable[[FakeClock], MemoryBackend] = MemoryBackend,
    ledger: Callable[[], Interruptible] = Interruptible,
    *,
    only: str | None = None,
) -> type[Processes]:
    """The machine on other parts; `only` one of its invariants, so that it is shown to find something by itself."""
    parts: dict[str, object] = {"make_backend": backend, "make_ledger": ledger}
    if only is not None:
        parts |= {name: None for name in INVARIANTS if name != only}
    return type("Mutant", (Processes,), parts)


QUICK = settings(
    CALM,
    max_examples=300,
    phases=[Phase.generate],
    verbosity=Verbosity.quiet,
    report_multiple_bugs=False,
    print_blob=False,
)


def is_found(mutant: type[Processes]) -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(mutant, settings=QUICK)


MUTANTS: list[tuple[str, str, type[Processes]]] = [
    (what, invariant, machine(*parts, only=invariant))
    for what, invariant, *parts in [
        ("what is held is granted", "one_holder_at_a_time", GrantsWhatIsHeld),
        ("a release deletes somebody else's lease", "one_holder_at_a_time", ReleasesOthers),
        ("healing mints over a live holder", "the_backend_knows_who_holds", MintsOverALiveHolder),
        ("healing mints over a live holder", "who_holds_is_current_at_the_ledger", MintsOverALiveHolder),
        ("leases vanish at the backend", "the_backend_knows_who_holds", RenewsWhatIsGone),
        (
            "tokens are repeated and admitted",
            "tokens_increase_in_the_order_of_grants",
            RepeatsTokens,
            AdmitsEqualTokens,
        ),
        (
            "old tokens are admitted",
            "tokens_increase_in_the_order_of_grants",
            MemoryBackend,
            AdmitsAll,
        ),
        ("old tokens are admitted", "the_ledger_never_goes_down", MemoryBackend, AdmitsAll),
        (
            "the ledger does not move",
            "only_the_newest_is_current_at_the_ledger",
            MemoryBackend,
            StaysBehind,
        ),
        ("the ledger forgets claims", "the_ledger_knows_every_claim", MemoryBackend, Forgets),
    ]
]


@pytest.mark.parametrize(
    "mutant",
    [mutant for *_, mutant in MUTANTS],
    ids=[f"{what} - {invariant}" for what, invariant, _ in MUTANTS],
)
def test_the_machine_finds(mutant: type[Processes]) -> None:
    is_found(mutant)


def test_the_machine_finds_a_lease_that_lasts_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tenure, "over", lambda self, now: now >= self.since + 2 * self.ttl)
    is_found(machine(only="one_holder_at_a_time"))


def test_the_machine_finds_a_check_that_does_not_look_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "check", check_without_a_look_at_the_clock)
    is_found(machine(only="who_passes_is_before_its_deadline"))


def test_the_machine_finds_a_loss_that_is_not_sticky(monkeypatch: pytest.MonkeyPatch) -> None:
    again = {Signal.EXPIRED: State.LOST, Signal.SUPERSEDED: State.LOST}
    monkeypatch.setitem(TRANSITIONS, State.LOST, again)
    is_found(machine(only="loss_is_sticky"))


def test_every_invariant_has_found_something() -> None:
    shown = {invariant for _, invariant, _ in MUTANTS}
    assert shown | {"who_passes_is_before_its_deadline", "loss_is_sticky"} == set(INVARIANTS)


def test_a_ledger_makes_up_for_a_backend_that_repeats_tokens() -> None:
    """No mutant that is found: the database is the authority."""
    run_state_machine_as_test(machine(RepeatsTokens), settings=CALM)
