"""Policies decide: when to renew, how long to wait, when to give up."""

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencing.errors import ConfigurationError
from fencing.policies import (
    APPROVAL,
    JOB_TRANSITION,
    MAX_TTL,
    MIN_TTL,
    SNAPSHOT_WRITER,
    WORKFLOW_RUN,
    Policy,
    Renewal,
    Wait,
    periodic_loop,
    ttl_ms,
)

calm = settings(deadline=None, derandomize=True, database=None)
ttls = st.floats(MIN_TTL, MAX_TTL)
NAN, INF = float("nan"), float("inf")


# Renewal


@pytest.mark.parametrize("ttl", [0.09, 9.0, 30.0, 60.0, 86400.0])
def test_three_tries_are_due_at_three_five_and_seven_ninths_of_the_ttl(ttl: float) -> None:
    renewal = Renewal(failures=3)
    due = [renewal.due(ttl, failed) for failed in range(3)]
    assert due == pytest.approx([ttl * 3 / 9, ttl * 5 / 9, ttl * 7 / 9], rel=1e-12)


@pytest.mark.parametrize("ttl", [0.05, 0.9, 9.0, 17.9, 18.0, 18.1, 60.0, 3600.0])
def test_one_try_takes_at_most_a_ninth_of_the_ttl_and_at_most_two_seconds(ttl: float) -> None:
    assert Renewal(failures=3).bound(ttl) == pytest.approx(min(2.0, ttl / 9), rel=1e-12)


def schedule_holds(renewal: Renewal, ttl: float) -> bool:
    """Tries in order, none before the end of the one before, the last over before 8/9 of the TTL."""
    due = [Fraction(renewal.due(ttl, failed)) for failed in range(renewal.failures)]
    bound = Fraction(renewal.bound(ttl))
    whole = Fraction(ttl)
    slack = whole * Fraction(1, 10**12)
    return (
        abs(due[0] - whole / 3) <= slack
        and bound > 0
        and all(before + bound <= after + slack for before, after in pairwise(due))
        and due[-1] + bound <= whole * 8 / 9 + slack
    )


@given(st.integers(1, 10), ttls)
@calm
def test_the_last_try_has_failed_before_eight_ninths_of_the_ttl(failures: int, ttl: float) -> None:
    assert schedule_holds(Renewal(failures=failures), ttl)


@given(st.integers(1, 10), ttls, st.integers(0, 20))
@calm
def test_a_try_is_never_due_after_the_last_one_of_the_schedule(
    failures: int, ttl: float, failed: int
) -> None:
    """However many failed before a policy was switched."""
    renewal = Renewal(failures=failures)
    assert ttl / 3 <= renewal.due(ttl, failed) <= ttl * 7 / 9 * (1 + 1e-12)


class TooLate(Renewal):
    def due(self, ttl: float, failed: int) -> float:
        return ttl / 3 * (failed + 1)


class TooSlow(Renewal):
    def bound(self, ttl: float) -> float:
        return 2.0


class Crowded(Renewal):
    def due(self, ttl: float, failed: int) -> float:
        return ttl / 3


@pytest.mark.parametrize("mutant", [TooLate, TooSlow, Crowded])
def test_the_check_of_the_schedule_convicts_a_wrong_one(mutant: type[Renewal]) -> None:
    assert schedule_holds(Renewal(failures=3), 9.0)
    assert not schedule_holds(mutant(failures=3), 9.0)


# Wait


@given(
    st.floats(0, 1e6),
    st.floats(1e-6, 1e4),
    st.floats(0, 1),
    st.floats(0, 1e6),
    st.floats(0, 1e4),
    st.floats(0, 1),
)
@calm
def test_a_pause_is_never_longer_than_the_lease_lasts_nor_than_the_budget_allows(
    budget: float, backoff: float, jitter: float, waited: float, left: float, roll: float
) -> None:
    pause = Wait(budget=budget, backoff=backoff, jitter=jitter).pause(waited=waited, left=left, roll=roll)
    if budget - waited < 1e-6:
        assert pause is None
    else:
        assert pause is not None
        assert 0 <= pause <= min(left + 0.001, budget - waited)


@given(st.floats(0, 1), st.floats(0, 1))
@calm
def test_jitter_spreads_a_pause_around_the_backoff(jitter: float, roll: float) -> None:
    wait = Wait(budget=1e9, backoff=2.0, jitter=jitter)
    pause = wait.pause(waited=0, left=1e9, roll=roll)
    assert pause is not None
    assert 2.0 * (1 - jitter) - 1e-9 <= pause <= 2.0 * (1 + jitter) + 1e-9


def test_the_roll_moves_the_pause_from_half_to_one_and_a_half_backoffs() -> None:
    wait = Wait(budget=60, backoff=2.0, jitter=0.5)
    pauses = [wait.pause(waited=0, left=60, roll=roll) for roll in (0.0, 0.5, 1.0)]
    assert pauses == pytest.approx([1.0, 2.0, 3.0])


def test_a_budget_of_nothing_asks_once() -> None:
    assert Wait(budget=0).pause(waited=0, left=10, roll=0.5) is None


def test_the_last_pause_ends_with_the_budget() -> None:
    assert Wait(budget=2.0, backoff=1.0, jitter=0).pause(waited=1.75, left=60, roll=0) == 0.25


def test_a_waiter_looks_again_one_millisecond_after_the_lease_ends() -> None:
    assert Wait(budget=60, backoff=10, jitter=0).pause(waited=0, left=3.0, roll=0) == pytest.approx(3.001)


# The presets: what the lock paths of a job scheduler want


def test_a_job_transition_is_held_for_60_seconds_and_fenced_after_three_failures_every_20() -> None:
    assert JOB_TRANSITION.ttl == 60
    assert JOB_TRANSITION.renewal.due(60, 0) == 20
    assert (JOB_TRANSITION.renewal.failures, JOB_TRANSITION.renewal.on_failure) == (3, "fence")


def test_a_workflow_run_is_held_for_30_seconds_renewed_every_10_and_goes_on() -> None:
    assert WORKFLOW_RUN.ttl == 30
    assert WORKFLOW_RUN.renewal.due(30, 0) == 10
    assert (WORKFLOW_RUN.renewal.failures, WORKFLOW_RUN.renewal.on_failure) == (3, "continue")


def test_an_approval_waits_two_seconds_in_steps_of_25_milliseconds_for_a_lease_of_10() -> None:
    assert (APPROVAL.ttl, APPROVAL.wait.budget, APPROVAL.wait.backoff) == (10, 2.0, 0.025)
    assert APPROVAL.renewal.on_failure == "fence"


def test_a_periodic_loop_holds_two_polls_and_does_not_release() -> None:
    policy = periodic_loop(30)
    assert (policy.ttl, policy.hold_to_ttl, policy.poll, policy.wait.budget) == (60, True, 30, 0)
    assert policy.takeover_window == 90
    assert periodic_loop() == policy


def test_a_snapshot_writer_is_taken_over_within_15_seconds() -> None:
    assert (SNAPSHOT_WRITER.ttl, SNAPSHOT_WRITER.wait.budget) == (10, 0)
    assert SNAPSHOT_WRITER.takeover_window == 15
    assert not SNAPSHOT_WRITER.hold_to_ttl


def test_who_waits_takes_over_within_the_ttl_and_one_pause() -> None:
    policy = Policy(ttl=10, wait=Wait(budget=60, backoff=2.0, jitter=0.5))
    assert policy.takeover_window == 13


def test_no_policy_goes_on_without_a_lease_unless_it_says_so() -> None:
    quiet = [Policy(), JOB_TRANSITION, APPROVAL, SNAPSHOT_WRITER, periodic_loop()]
    assert {policy.renewal.on_failure for policy in quiet} == {"fence"}


# What is refused


@pytest.mark.parametrize("ttl", [0, -1, 0.049, MAX_TTL + 1, NAN, INF, True, "30", None])
def test_a_senseless_ttl_is_refused(ttl: object) -> None:
    with pytest.raises(ConfigurationError):
        ttl_ms(ttl)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        Policy(ttl=ttl)  # type: ignore[arg-type]


@given(ttls)
@calm
def test_a_ttl_is_sent_in_whole_milliseconds_and_never_rounded_up(ttl: float) -> None:
    """So nobody else is kept waiting for longer than was asked; deadlines must count what was sent."""
    assert ttl - 0.001 < ttl_ms(ttl) / 1000 <= ttl


BAD: list[Callable[[], object]] = [
    lambda: Wait(budget=-0.001),
    lambda: Wait(budget=NAN),
    lambda: Wait(backoff=0),
    lambda: Wait(backoff=-1),
    lambda: Wait(backoff=NAN),
    lambda: Wait(jitter=-0.1),
    lambda: Wait(jitter=1.1),
    lambda: Wait(jitter=NAN),
    lambda: Renewal(failures=0),
    lambda: Renewal(failures=-1),
    lambda: Renewal(failures=101),
    lambda: Renewal(failures=2.0),  # type: ignore[arg-type]
    lambda: Renewal(failures="3"),  # type: ignore[arg-type]
    lambda: Renewal(on_failure="ignore"),  # type: ignore[arg-type]
    lambda: Renewal(on_failure=None),  # type: ignore[arg-type]
    lambda: Renewal(max_hold=0),
    lambda: Renewal(max_hold=-5),
    lambda: Renewal(max_hold=NAN),
    lambda: Policy(poll=0),
    lambda: Policy(poll=-1),
    lambda: Policy(poll=NAN),
    lambda: periodic_loop(0),
    lambda: periodic_loop(MAX_TTL),
]


@pytest.mark.parametrize("make", BAD, ids=range(len(BAD)))
def test_a_senseless_value_is_a_configuration_error(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError):
        make()


WRONG_TYPE: list[Callable[[], object]] = [
    lambda: Wait(budget="2"),  # type: ignore[arg-type]
    lambda: Wait(budget=None),  # type: ignore[arg-type]
    lambda: Wait(backoff="2"),  # type: ignore[arg-type]
    lambda: Renewal(failures=True),
    lambda: Renewal(max_hold="2"),  # type: ignore[arg-type]
    lambda: Policy(poll="2"),  # type: ignore[arg-type]
    lambda: Policy(ttl=[30]),  # type: ignore[arg-type]
    lambda: Policy(wait=2.0),  # type: ignore[arg-type]
    lambda: Policy(renewal=None),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("make", WRONG_TYPE, ids=range(len(WRONG_TYPE)))
def test_a_value_of_the_wrong_type_is_a_configuration_error(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_policies_are_values() -> None:
    assert Policy() == Policy()
    assert hash(Policy()) == hash(Policy())
    with pytest.raises(AttributeError):
        Policy().ttl = 5  # type: ignore[misc]
