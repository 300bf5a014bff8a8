"""Acquire and release, driven by hand: each answer, each failure, and a stop at each step."""

import asyncio
import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from fencing import flows
from fencing.backends.base import (
    CALL_TIMEOUT,
    Acquire,
    Behind,
    Busy,
    Command,
    Done,
    Granted,
    NotHeld,
    Orphan,
    Poisoned,
    Release,
    Remint,
    Seen,
    Target,
)
from fencing.errors import BackendUnavailable, ConfigurationError, LeaseUnavailable, TokenRegression
from fencing.events import BackendFailed, Event, GivenBack, TokenRegressed
from fencing.flows import ATTEMPTS, HEALS, Ask, Claim, Freed, Held, Sleep, Step, Tell, acquire, release
from fencing.policies import Wait
from fencing.token import Grant, HeldBy

TARGET = Target("billing", ("invoice:42",))
ME, OTHER = "a" * 32, "b" * 32
ORDER = Acquire(TARGET, ME, "me:1", 9000)
FREE = Release(TARGET, ME)
THEM = HeldBy("invoice:42", OTHER, 99, "them:1", 1_800_000_000.0, 4.0)
BUSY = Busy(THEM)
ONCE, PATIENT = Wait(budget=0.0), Wait(budget=60.0, backoff=1.0, jitter=0.0)
CONVICTED = (AssertionError, pytest.fail.Exception)

GivesAnswer = Callable[["Time"], object]


def lost() -> BackendUnavailable:
    return BackendUnavailable("the answer was lost", sent=True)


def unsent() -> BackendUnavailable:
    return BackendUnavailable("no route", sent=False)


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def after(seconds: float, answer: object) -> GivesAnswer:
    """An answer that takes its time."""

    def slow(time: Time) -> object:
        time.now += seconds
        return answer

    return slow


@dataclass
class Played:
    """What a flow asked for, what it was given each time, and how it ended."""

    log: list[tuple[Step, object]] = field(default_factory=list)
    result: Any = None
    error: BaseException | None = None

    @property
    def asked(self) -> list[Command]:
        return [step.command for step, _ in self.log if isinstance(step, Ask)]

    @property
    def told(self) -> list[Event]:
        return [step.event for step, _ in self.log if isinstance(step, Tell)]

    @property
    def slept(self) -> list[float]:
        return [step.seconds for step, _ in self.log if isinstance(step, Sleep)]

    @property
    def claimed(self) -> list[Grant]:
        return [step.grant for step, _ in self.log if isinstance(step, Claim)]

    @property
    def gave_back(self) -> bool:
        return FREE in self.asked


def play(
    flow: Generator[Step, Any, Any],
    answers: Iterable[object],
    time: Time,
    *,
    stop_at: int | None = None,
    stop: BaseException | None = None,
) -> Played:
    """Be the driver. Sleeps move the time; asks and claims get the answers in turn, errors are thrown in.

    At step `stop_at` the flow is stopped from outside instead; a release asked for after that is done.
    """
    played, upcoming = Played(), iter(answers)
    answer: object = None
    while True:
        try:
            step = flow.throw(answer) if isinstance(answer, BaseException) else flow.send(answer)
        except StopIteration as end:
            played.result = end.value
            return played
        except BaseException as error:
            played.error = error
            return played
        answer = None
        if len(played.log) == stop_at:
            answer, upcoming = stop, iter(())
        elif isinstance(step, Sleep):
            time.now += step.seconds
        elif isinstance(step, Ask | Claim):
            answer = next(upcoming, None if isinstance(step, Claim) else unasked(step))
            answer = answer(time) if callable(answer) else answer
        played.log.append((step, answer))


def unasked(step: Ask) -> object:
    """What a request gets when the answers have run out: only giving back is expected then."""
    return Done() if isinstance(step.command, Release) else AssertionError(f"did not expect {step}")


def play_acquire(
    answers: Sequence[object], *, wait: Wait = PATIENT, claims: bool = False, **how: Any
) -> Played:
    time = how.pop("time", None) or Time()
    flow = acquire(
        ORDER, wait, now=time, roll=lambda: 0.5, started=time.now, claims=claims, first=how.pop("first", None)
    )
    return play(flow, answers, time, **how)


def play_release(answers: Sequence[object], *, bound: float = CALL_TIMEOUT, **how: Any) -> Played:
    time = how.pop("time", None) or Time()
    flow = release(FREE, now=time, started=time.now, bound=bound, first=how.pop("first", None))
    return play(flow, answers, time, **how)


# Acquire: granted, busy, budget


def test_granted_at_once() -> None:
    orphan = Orphan(THEM, 2.0)
    played = play_acquire([Granted(7, (orphan,))])
    assert played.result == Held(token=7, since=1000.0, orphans=(orphan,), asked=1)
    assert played.log == [(Ask(ORDER, CALL_TIMEOUT), Granted(7, (orphan,)))]


def test_busy_then_granted_and_valid_from_before_the_request_that_was_granted() -> None:
    played = play_acquire([after(0.5, BUSY), after(0.25, Granted(8))])
    assert played.asked == [ORDER, ORDER]
    assert played.slept == [1.0]
    assert played.result == Held(8, 1001.5, (), 2)


def test_a_wait_is_no_longer_than_the_present_lease() -> None:
    ends_soon = Busy(THEM._replace(time_left=0.25))
    assert play_acquire([ends_soon, Granted(8)]).slept == [pytest.approx(0.251)]


def test_after_the_budget_it_is_unavailable_and_says_who_holds_it() -> None:
    played = play_acquire([BUSY] * 4, wait=Wait(budget=2.5, backoff=1.0, jitter=0.0))
    assert isinstance(played.error, LeaseUnavailable)
    assert (played.error.resource, played.error.held_by, played.error.retry_after) == (
        "invoice:42",
        THEM,
        4.0,
    )
    assert "them:1" in str(played.error)
    assert "99" in str(played.error)
    assert played.slept == [1.0, 1.0, 0.5]
    assert not played.gave_back


def test_without_a_budget_it_asks_once() -> None:
    played = play_acquire([BUSY], wait=ONCE)
    assert isinstance(played.error, LeaseUnavailable)
    assert (played.asked, played.slept) == ([ORDER], [])


# Acquire: the backend fails


@pytest.mark.parametrize("failure", [lost, unsent])
def test_a_failed_request_is_sent_again_by_the_same_holder(failure: Callable[[], BackendUnavailable]) -> None:
    played = play_acquire([failure(), failure(), Granted(7)], wait=ONCE)
    assert played.asked == [ORDER] * 3
    assert played.result.token == 7
    assert played.result.since == 1000.0 + 2 * ONCE.backoff
    assert [(type(event), event.verb, event.sent) for event in played.told] == [
        (BackendFailed, "acquire", failure().sent)
    ] * 2


@pytest.mark.parametrize("failure", [lost, unsent])
def test_three_failures_in_a_row_are_the_end(failure: Callable[[], BackendUnavailable]) -> None:
    failures = [failure() for _ in range(ATTEMPTS)]
    played = play_acquire(failures)
    assert ATTEMPTS == 3
    assert played.error is failures[-1]
    assert played.asked.count(ORDER) == 3
    assert played.gave_back is failures[-1].sent


def test_an_answer_in_between_resets_the_count_of_failures() -> None:
    played = play_acquire([unsent(), unsent(), BUSY, unsent(), unsent(), Granted(7)])
    assert played.result.asked == 6


def test_the_budget_counts_from_the_start_and_the_lease_from_the_request() -> None:
    """The wait in front of the backend, among the threads of the process, is part of the budget."""
    time = Time()
    wait = Wait(budget=10.0, backoff=1.0, jitter=0.0)
    flow = acquire(
        ORDER, wait, now=time, roll=lambda: 0.5, started=991.5, claims=False, first=BUSY, since=time.now
    )
    played = play(flow, [BUSY] * 2, time)
    assert isinstance(played.error, LeaseUnavailable)
    assert played.slept == [1.0, 0.5]
    granted = acquire(
        ORDER, wait, now=time, roll=lambda: 0.5, started=991.5, claims=False, first=Granted(7), since=999.0
    )
    assert play(granted, [], time).result.since == 999.0


def test_a_failure_after_the_budget_is_the_end_at_once() -> None:
    played = play_acquire([after(2.5, unsent())], wait=Wait(budget=1.0))
    assert isinstance(played.error, BackendUnavailable)
    assert len(played.asked) == 1


def test_one_lost_answer_among_failures_is_enough_to_give_back() -> None:
    assert play_acquire([lost(), unsent(), unsent()]).gave_back


def test_busy_after_a_lost_answer_means_that_there_is_nothing_to_give_back() -> None:
    played = play_acquire([lost(), BUSY], wait=ONCE)
    assert isinstance(played.error, LeaseUnavailable)
    assert not played.gave_back


def test_a_backend_error_that_is_no_outage_is_raised_at_once() -> None:
    error = ConfigurationError("another number of shards")
    played = play_acquire([error])
    assert played.error is error
    assert played.asked == [ORDER]


def test_a_backend_error_that_is_no_outage_does_not_undo_that_an_answer_was_lost_before() -> None:
    assert play_acquire([lost(), ConfigurationError("another number of shards")]).gave_back


@pytest.mark.parametrize("nonsense", [Done(), Seen(None)])
def test_an_answer_that_is_none_is_refused_and_given_back(nonsense: object) -> None:
    played = play_acquire([nonsense])
    assert isinstance(played.error, ConfigurationError)
    assert played.gave_back


def test_giving_back_is_told_with_its_cause() -> None:
    [*_, given_back] = play_acquire([lost(), lost(), lost()]).told
    assert given_back == GivenBack(
        namespace="billing",
        resource="invoice:42",
        holder=ME,
        token=0,
        label="me:1",
        cause="BackendUnavailable",
    )


def test_giving_back_that_fails_is_told_and_the_first_error_is_raised() -> None:
    failures = [lost(), lost(), lost()]
    played = play_acquire([*failures, unsent()])
    assert played.error is failures[-1]
    assert played.asked[-1] == FREE
    [*_, failed] = played.told
    assert isinstance(failed, BackendFailed)
    assert failed.verb == "give back"


# Acquire: the claim


def test_a_claim_is_made_for_what_was_granted_before_the_caller_gets_it() -> None:
    played = play_acquire([after(0.5, Granted(7)), None], claims=True)
    assert played.claimed == [Grant("billing", ("invoice:42",), ME, 7, 1009.0, "me:1")]
    assert played.result == Held(7, 1000.0, (), 1)


def test_a_claim_that_finds_the_ledger_ahead_lifts_the_counter_and_claims_again() -> None:
    orphan = Orphan(THEM, 2.0)
    played = play_acquire([Granted(7, (orphan,)), Behind(9, OTHER), Granted(10), None], claims=True)
    assert played.asked == [ORDER, Remint(TARGET, ME, 9)]
    assert [grant.token for grant in played.claimed] == [7, 10]
    assert played.result == Held(10, 1000.0, (orphan,), 2)
    assert played.told == [
        TokenRegressed(
            namespace="billing",
            resource="invoice:42",
            holder=ME,
            token=10,
            label="me:1",
            ledger_token=9,
            refused_token=7,
        )
    ]


def test_healing_does_not_lengthen_the_lease() -> None:
    played = play_acquire(
        [after(1, Granted(7)), after(1, Behind(9, OTHER)), after(1, Granted(10)), after(1, None)], claims=True
    )
    assert played.result.since == 1000.0
    assert {grant.deadline for grant in played.claimed} == {1009.0}


def test_a_lost_answer_while_healing_is_asked_for_again() -> None:
    played = play_acquire([Granted(7), Behind(9, OTHER), lost(), Granted(10), None], claims=True)
    assert played.asked == [ORDER, Remint(TARGET, ME, 9), Remint(TARGET, ME, 9)]
    assert played.result.token == 10


@pytest.mark.parametrize("held_by", [THEM, None])
def test_who_lost_it_while_healing_waits_and_asks_afresh(held_by: HeldBy | None) -> None:
    """Never a mint over a live holder: after the refusal comes an ordinary acquire, with no floor."""
    answers = [Granted(7), Behind(9, OTHER), NotHeld("invoice:42", held_by), BUSY, Granted(12), None]
    played = play_acquire(answers, claims=True)
    assert played.asked == [ORDER, Remint(TARGET, ME, 9), ORDER, ORDER]
    assert len(played.slept) == 2
    assert [grant.token for grant in played.claimed] == [7, 12]
    assert played.result.since == 1000.0 + sum(played.slept)


def test_who_lost_it_while_healing_and_may_not_wait_has_nothing_to_give_back() -> None:
    played = play_acquire([Granted(7), Behind(9, OTHER), NotHeld("invoice:42", THEM)], claims=True, wait=ONCE)
    assert isinstance(played.error, LeaseUnavailable)
    assert played.error.held_by == THEM
    assert not played.gave_back


def test_who_lost_one_of_several_resources_while_healing_frees_the_others_before_it_waits() -> None:
    time, several = Time(), Target("billing", ("a", "b"))
    order, free = ORDER._replace(target=several), Release(several, ME)
    flow = acquire(order, PATIENT, now=time, roll=lambda: 0.5, started=time.now, claims=True)
    answers = [Granted(7), Behind(9, OTHER), NotHeld("b", THEM), NotHeld("b", THEM), Granted(12), None]
    played = play(flow, answers, time)
    assert played.asked == [order, Remint(several, ME, 9), free, order]
    assert played.result.token == 12


def test_more_than_three_heals_are_a_regression_and_given_back() -> None:
    answers: list[object] = []
    for step in range(HEALS + 1):
        answers += [Granted(10 + step), Behind(10 + step, OTHER)]
    played = play_acquire(answers, claims=True)
    assert HEALS == 3
    assert isinstance(played.error, TokenRegression)
    assert (played.error.resource, played.error.token, played.error.ledger_token) == ("invoice:42", 13, 13)
    assert played.gave_back
    assert [type(command) for command in played.asked] == [Acquire, Remint, Remint, Remint, Release]


def test_a_floor_that_would_poison_the_counter_is_a_regression_and_given_back() -> None:
    played = play_acquire([Granted(7), Behind(2**52, OTHER), Poisoned(2**52)], claims=True)
    assert isinstance(played.error, TokenRegression)
    assert (played.error.token, played.error.ledger_token) == (7, 2**52)
    assert played.gave_back


def test_a_claim_that_raises_gives_back_and_raises_the_same() -> None:
    error = RuntimeError("the database is down")
    played = play_acquire([Granted(7), error], claims=True)
    assert played.error is error
    assert played.asked == [ORDER, FREE]
    assert [type(event) for event in played.told] == [GivenBack]


@pytest.mark.parametrize("seconds", [9.0, 9.5, 100.0])
def test_a_claim_that_outlasts_the_lease_begins_again(seconds: float) -> None:
    played = play_acquire(
        [Granted(7), after(seconds, None), Granted(8), None], claims=True, wait=Wait(budget=200)
    )
    assert played.asked == [ORDER, ORDER]
    assert played.result.token == 8
    assert played.result.since > 1000.0 + seconds


def test_a_claim_that_is_just_in_time_is_good() -> None:
    assert play_acquire([Granted(7), after(8.99, None)], claims=True).result.token == 7


def test_a_claim_that_outlasts_the_lease_and_the_budget_is_given_back() -> None:
    """Given back, since nobody knows whether the backend still has it under our name."""
    played = play_acquire([Granted(7), after(9.0, None)], claims=True, wait=ONCE)
    assert isinstance(played.error, LeaseUnavailable)
    assert (played.error.held_by, played.error.retry_after) == (None, None)
    assert played.gave_back


# Acquire: stopped from outside, at each step of each path

SCENARIOS: dict[str, tuple[bool, list[object]]] = {
    "granted": (False, [Granted(7)]),
    "busy, granted": (False, [BUSY, BUSY, Granted(8)]),
    "lost, granted": (False, [lost(), Granted(7)]),
    "unsent, granted": (False, [unsent(), Granted(7)]),
    "lost, unsent, busy, granted": (False, [lost(), unsent(), BUSY, unsent(), Granted(7)]),
    "unsent for good": (False, [unsent(), unsent(), unsent()]),
    "lost for good": (False, [lost(), lost(), lost()]),
    "claimed": (True, [Granted(7), None]),
    "claim raises": (True, [Granted(7), RuntimeError("down")]),
    "healed": (True, [Granted(7), Behind(9, OTHER), Granted(10), None]),
    "healed twice": (True, [Granted(7), Behind(9, OTHER), Granted(10), Behind(10, OTHER), Granted(11), None]),
    "healed, answer lost": (True, [Granted(7), Behind(9, OTHER), lost(), Granted(10), None]),
    "healed, unsent": (True, [Granted(7), Behind(9, OTHER), unsent(), Granted(10), None]),
    "lost to another": (
        True,
        [Granted(7), Behind(9, OTHER), NotHeld("invoice:42", THEM), BUSY, Granted(12), None],
    ),
    "poisoned": (True, [Granted(7), Behind(2**52, OTHER), Poisoned(2**52)]),
    "outlasted": (True, [Granted(7), after(9, None), Granted(8), None]),
}


def may_hold(log: Sequence[tuple[Step, object]], stopped: Step) -> bool:
    """Whether somebody who has seen this much must fear that the backend has the lease under our name."""
    fear = False
    for step, given in log:
        if isinstance(step, Ask):
            if isinstance(given, BackendUnavailable):
                fear = fear or given.sent
            elif isinstance(given, Busy | NotHeld):
                fear = False
            else:
                fear = True
    return fear or isinstance(stopped, Ask)


def stop_everywhere(name: str, kind: type[BaseException]) -> int:
    """Stop the scenario at each of its steps and see that it gives back if and only if there is need to."""
    claims, answers = SCENARIOS[name]
    whole = play_acquire(answers, claims=claims)
    stops = 0
    for at, (step, _) in enumerate(whole.log):
        if isinstance(step, Ask) and step.command == FREE:
            break  # from here on it gives back anyway
        stop = kind()
        played = play_acquire(answers, claims=claims, stop_at=at, stop=stop)
        assert played.error is stop, f"stopped at step {at}, {step}"
        assert played.gave_back is may_hold(whole.log[:at], step), f"stopped at step {at}, {step}"
        assert played.asked.count(FREE) <= 1
        assert played.slept == [slept.seconds for slept, _ in whole.log[: at + 1] if isinstance(slept, Sleep)]
        stops += 1
    return stops


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError, SystemExit])
@pytest.mark.parametrize("name", SCENARIOS)
def test_when_stopped_it_gives_back_what_it_has_or_may_have(name: str, kind: type[BaseException]) -> None:
    assert stop_everywhere(name, kind) >= 1


def test_a_second_stop_while_giving_back_ends_it() -> None:
    played = play_acquire([lost(), lost(), lost(), KeyboardInterrupt()])
    assert isinstance(played.error, KeyboardInterrupt)
    assert played.asked[-1] == FREE


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_first_answer_may_come_from_before_there_was_a_flow(name: str) -> None:
    claims, answers = SCENARIOS[name]
    whole = play_acquire(answers, claims=claims)
    resumed = play_acquire(answers[1:], claims=claims, first=answers[0])
    assert [step for step, _ in resumed.log] == [step for step, _ in whole.log[1:]]
    assert resumed.result == whole.result
    assert type(resumed.error) is type(whole.error)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError])
def test_a_stop_before_there_was_a_flow_gives_back_too(kind: type[BaseException]) -> None:
    stop = kind()
    played = play_acquire([], first=stop)
    assert played.error is stop
    assert played.asked == [FREE]


# Release


def test_released() -> None:
    played = play_release([Done()])
    assert played.result == Freed(Done())
    assert played.log == [(Ask(FREE, CALL_TIMEOUT), Done())]


def test_a_mismatch_is_not_held() -> None:
    assert play_release([NotHeld("invoice:42", THEM)]).result == Freed(NotHeld("invoice:42", THEM))


@pytest.mark.parametrize("held_by", [None, THEM])
def test_gone_after_a_lost_answer_is_unknown(held_by: HeldBy | None) -> None:
    assert play_release([lost(), NotHeld("invoice:42", held_by)]).result == Freed(None)


def test_one_lost_answer_among_failures_makes_a_mismatch_unknown() -> None:
    assert play_release([lost(), unsent(), NotHeld("invoice:42", None)]).result == Freed(None)


def test_a_mismatch_after_requests_that_were_never_sent_is_not_held() -> None:
    played = play_release([unsent(), unsent(), NotHeld("invoice:42", THEM)])
    assert played.result == Freed(NotHeld("invoice:42", THEM))


def test_done_after_a_lost_answer_is_done() -> None:
    played = play_release([lost(), Done()])
    assert played.result == Freed(Done())
    assert [(type(event), event.verb) for event in played.told] == [(BackendFailed, "release")]


@pytest.mark.parametrize("failure", [lost, unsent])
def test_a_release_that_fails_three_times_raises(failure: Callable[[], BackendUnavailable]) -> None:
    failures = [failure() for _ in range(3)]
    played = play_release(failures)
    assert played.error is failures[-1]
    assert played.asked == [FREE] * 3


@pytest.mark.parametrize("order", [[lost, unsent, unsent], [unsent, lost, unsent], [unsent, unsent, lost]])
def test_a_release_of_which_any_request_may_have_arrived_says_so(
    order: list[Callable[[], BackendUnavailable]],
) -> None:
    error = play_release([failure() for failure in order]).error
    assert isinstance(error, BackendUnavailable)
    assert error.sent


def test_a_release_of_which_no_request_was_sent_says_so() -> None:
    error = play_release([unsent(), unsent(), unsent()]).error
    assert isinstance(error, BackendUnavailable)
    assert not error.sent


def test_a_release_is_bounded_all_tries_together() -> None:
    played = play_release([after(0.75, lost()), after(0.75, lost()), after(0.75, lost())])
    timeouts = [step.timeout for step, _ in played.log if isinstance(step, Ask)]
    assert timeouts == pytest.approx([2.0, 1.25, 0.5])
    assert isinstance(played.error, BackendUnavailable)


def test_a_release_whose_time_is_over_does_not_try_again() -> None:
    played = play_release([after(2.0, lost())])
    assert isinstance(played.error, BackendUnavailable)
    assert len(played.asked) == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize(
    ("again", "reply"), [(Done(), Done()), (NotHeld("invoice:42", None), None)], ids=["done", "gone"]
)
def test_a_release_that_is_stopped_asks_once_more_and_says_what_came_of_it(
    kind: type[BaseException], again: object, reply: Done | None
) -> None:
    stop = kind()
    whole, resumed = play_release([stop, again]), play_release([again], first=stop)
    assert whole.result == resumed.result == Freed(reply, stop)
    assert (whole.asked, resumed.asked) == ([FREE, FREE], [FREE])


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize("failure", [lost, unsent])
def test_a_release_that_is_stopped_and_then_fails_raises_the_stop(
    kind: type[BaseException], failure: Callable[[], BackendUnavailable]
) -> None:
    stop = kind()
    played = play_release([stop, failure()])
    assert played.error is stop
    assert played.asked == [FREE, FREE]


def test_a_release_stopped_at_its_second_try_asks_once_more() -> None:
    stop = asyncio.CancelledError()
    played = play_release([lost(), stop, Done()])
    assert played.result == Freed(Done(), stop)
    assert played.asked == [FREE] * 3


def test_a_release_that_is_stopped_twice_raises_the_second_stop() -> None:
    first, second = asyncio.CancelledError(), KeyboardInterrupt()
    played = play_release([first, second])
    assert played.error is second
    assert played.asked == [FREE, FREE]


def test_a_release_that_the_backend_will_never_answer_is_raised_at_once() -> None:
    error = ConfigurationError("another number of shards")
    played = play_release([error])
    assert played.error is error
    assert played.asked == [FREE]


@pytest.mark.parametrize("nonsense", [Granted(7), BUSY, Seen(None)])
def test_a_senseless_answer_to_a_release_is_refused(nonsense: object) -> None:
    assert isinstance(play_release([nonsense]).error, ConfigurationError)


@pytest.mark.parametrize(
    "answers",
    [[Done()], [lost(), Done()], [lost(), NotHeld("invoice:42", None)], [NotHeld("invoice:42", THEM)]],
    ids=repr,
)
def test_the_first_answer_to_a_release_may_come_from_before_there_was_a_flow(answers: list[object]) -> None:
    assert play_release(answers[1:], first=answers[0]).result == play_release(answers).result


# The tests above can fail: each of these breaks one line, and a test that must notice


def broken(function: Callable[..., Any], line: str, instead: str) -> Callable[..., Any]:
    source = inspect.getsource(function)
    assert source.count(line) == 1, (
        f"{function.__name__} does not say {line!r} once any more: adapt this mutant"
    )
    scope = dict(vars(flows))
    exec("from __future__ import annotations\n" + source.replace(line, instead), scope)
    return scope[function.__name__]


MUTANTS: list[tuple[Callable[..., Any], str, str, Callable[[], object]]] = [
    (acquire, "if ours:", "if False:", lambda: stop_everywhere("granted", KeyboardInterrupt)),
    (acquire, "if ours:", "if True:", lambda: stop_everywhere("busy, granted", KeyboardInterrupt)),
    (
        acquire,
        "before, ours = ours, True",
        "before = ours",
        lambda: stop_everywhere("granted", asyncio.CancelledError),
    ),
    (
        acquire,
        "ours = before or error.sent",
        "ours = before",
        test_one_lost_answer_among_failures_is_enough_to_give_back,
    ),
    (
        acquire,
        "ours = before or error.sent",
        "ours = error.sent",
        lambda: stop_everywhere("healed, unsent", KeyboardInterrupt),
    ),
    (
        acquire,
        "command, held_by, ours = order, reply.held_by, False",
        "command, held_by = order, reply.held_by",
        test_who_lost_it_while_healing_and_may_not_wait_has_nothing_to_give_back,
    ),
    (
        acquire,
        "command = Remint(target, holder, behind.token)",
        "command = order._replace(floor=behind.token)",
        lambda: test_who_lost_it_while_healing_waits_and_asks_afresh(THEM),
    ),
    (acquire, "if healed > HEALS:", "if False:", test_more_than_three_heals_are_a_regression_and_given_back),
    (
        acquire,
        "if now() < since + ttl:",
        "if True:",
        lambda: test_a_claim_that_outlasts_the_lease_begins_again(9.0),
    ),
    (
        acquire,
        "                since = now()",
        "                pass",
        lambda: test_a_claim_that_outlasts_the_lease_begins_again(9.0),
    ),
    (
        acquire,
        "if command is order and first is None:",
        "if first is None:",
        test_healing_does_not_lengthen_the_lease,
    ),
    (
        acquire,
        "failed >= ATTEMPTS",
        "failed > ATTEMPTS",
        lambda: test_three_failures_in_a_row_are_the_end(unsent),
    ),
    (
        release,
        'unsure = unsure or getattr(error, "sent", False)',
        'unsure = getattr(error, "sent", False)',
        test_one_lost_answer_among_failures_makes_a_mismatch_unknown,
    ),
    (
        release,
        "return Freed(None if unsure else reply, stopped)",
        "return Freed(reply, stopped)",
        lambda: test_gone_after_a_lost_answer_is_unknown(None),
    ),
    (
        release,
        "error.sent = unsure",
        "pass",
        lambda: test_a_release_of_which_any_request_may_have_arrived_says_so([lost, unsent, unsent]),
    ),
    (
        release,
        "first, stopped, unsure = None, error, True",
        "first, stopped = None, error",
        lambda: test_a_release_that_is_stopped_asks_once_more_and_says_what_came_of_it(
            KeyboardInterrupt, NotHeld("invoice:42", None), None
        ),
    ),
    (release, "max(bound - (now() - started), 0.001)", "bound", test_a_release_is_bounded_all_tries_together),
]


@pytest.mark.parametrize(
    ("function", "line", "instead", "test"),
    MUTANTS,
    ids=[
        f"{function.__name__}: {line.strip()} -> {instead.strip()}" for function, line, instead, _ in MUTANTS
    ],
)
def test_a_broken_flow_is_convicted(
    function: Callable[..., Any],
    line: str,
    instead: str,
    test: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), function.__name__, broken(function, line, instead))
    with pytest.raises(CONVICTED):
        test()
    monkeypatch.undo()
    test()
