"""Monotonic: every token is above all tokens that were issued before it, whatever was lost in between."""

from __future__ import annotations

from contract.subjects import DAY_US, YEAR_US, Subject, race

from fencing.backends.base import Granted, Poisoned
from fencing.token import MAX_TOKEN


def assert_strictly_growing(tokens: list[int]) -> None:
    assert tokens == sorted(set(tokens))


def test_tokens_grow_over_acquisitions_of_one_resource(subject: Subject) -> None:
    tokens = []
    for _ in range(20):
        taken = subject.take("invoice:42")
        tokens.append(taken.token)
        subject.release("invoice:42", holder=taken.holder)

    assert_strictly_growing(tokens)


def test_tokens_grow_over_acquisitions_of_different_resources(subject: Subject) -> None:
    assert_strictly_growing([subject.take(f"invoice:{number}").token for number in range(20)])


def test_tokens_grow_after_an_expiry(subject: Subject) -> None:
    before = subject.abandoned("invoice:42").token

    assert subject.take("invoice:42").token > before


def test_tokens_grow_after_all_data_were_lost(subject: Subject) -> None:
    before = subject.take("invoice:42").token
    subject.forget()
    subject.elapse_past(0.0)

    assert subject.take("invoice:42").token > before


def test_tokens_grow_when_a_remint_comes_between(subject: Subject) -> None:
    taken = subject.take("invoice:42")
    reminted = subject.remint("invoice:42", holder=taken.holder, floor=taken.token)

    assert isinstance(reminted, Granted)
    assert_strictly_growing([taken.token, reminted.token, subject.take("invoice:43").token])


def test_a_token_is_lifted_to_the_clock_in_microseconds(subject: Subject) -> None:
    before = subject.wall_us()
    token = subject.take("invoice:42").token

    assert before <= token <= subject.wall_us()


def test_a_token_is_lifted_to_the_clock_again_after_time_has_passed(subject: Subject) -> None:
    subject.take("invoice:42")
    subject.elapse_past(0.01)
    before = subject.wall_us()

    assert before <= subject.take("invoice:43").token <= subject.wall_us()


def test_a_token_exceeds_a_floor_above_the_clock_by_exactly_one(subject: Subject) -> None:
    floor = subject.wall_us() + DAY_US

    assert subject.take("invoice:42", floor=floor).token == floor + 1


def test_a_token_exceeds_a_floor_that_the_clock_has_just_reached(subject: Subject) -> None:
    floor = subject.wall_us()

    assert subject.take("invoice:42", floor=floor).token > floor


def test_a_floor_below_the_clock_makes_no_difference(subject: Subject) -> None:
    before = subject.wall_us()

    assert before <= subject.take("invoice:42", floor=before - DAY_US).token <= subject.wall_us()


def test_tokens_grow_from_the_floor_on_while_the_clock_is_behind_it(subject: Subject) -> None:
    floor = subject.wall_us() + DAY_US
    first = subject.take("invoice:42", floor=floor)
    subject.release("invoice:42", holder=first.holder)

    assert_strictly_growing([first.token, subject.take("invoice:43").token, subject.take("invoice:42").token])


def test_a_floor_of_almost_a_year_above_the_clock_is_minted(subject: Subject) -> None:
    floor = subject.wall_us() + YEAR_US - DAY_US
    token = subject.take("invoice:42", floor=floor).token

    assert floor < token <= MAX_TOKEN


def test_a_floor_of_more_than_a_year_above_the_clock_is_poisoned(subject: Subject) -> None:
    floor = subject.wall_us() + YEAR_US + DAY_US

    assert subject.acquire("invoice:42", floor=floor) == Poisoned(floor)


def test_a_floor_at_the_end_of_the_range_is_poisoned(subject: Subject) -> None:
    for floor in (MAX_TOKEN - 1, MAX_TOKEN, MAX_TOKEN + 1, 2**63, 10**30):
        assert subject.acquire("invoice:42", floor=floor) == Poisoned(floor)


def test_a_poisoned_acquire_changes_nothing(subject: Subject) -> None:
    before = subject.take("invoice:1").token
    subject.acquire("invoice:42", floor=subject.wall_us() + YEAR_US + DAY_US)

    assert subject.is_free("invoice:42")
    assert before < subject.take("invoice:42").token < subject.wall_us() + DAY_US


def test_a_poisoned_remint_changes_nothing(subject: Subject) -> None:
    taken = subject.take("invoice:42")
    floor = subject.wall_us() + YEAR_US + DAY_US

    assert subject.remint("invoice:42", holder=taken.holder, floor=floor) == Poisoned(floor)
    held_by = subject.peek("invoice:42")
    assert held_by is not None
    assert (held_by.holder, held_by.token) == (taken.holder, taken.token)
    assert subject.take("invoice:43").token < subject.wall_us() + DAY_US


def test_fifty_interleaved_acquires_of_two_threads_have_fifty_tokens(subject: Subject) -> None:
    def acquirer(name: str):
        return lambda number: subject.take(f"{name}:{number}").token

    rounds = race(acquirer("invoice"), acquirer("order"), rounds=25)

    assert len({token for tokens in rounds for token in tokens}) == 50
    for tokens in zip(*rounds, strict=True):
        assert_strictly_growing(list(tokens))
