"""Exclusive: as long as a lease lasts nobody else gets its resource, and who asks learns who has it."""

from __future__ import annotations

import pytest
from contract.subjects import LONG, Subject, race

from fencing.backends.base import Acquire, Busy, Granted
from fencing.policies import MAX_TTL


def test_busy_names_holder_token_and_label(subject: Subject) -> None:
    taken = subject.take("invoice:42", label="worker 7")
    reply = subject.acquire("invoice:42", label="worker 8")

    assert isinstance(reply, Busy)
    assert reply.held_by.resource == "invoice:42"
    assert reply.held_by.holder == taken.holder
    assert reply.held_by.token == taken.token
    assert reply.held_by.label == "worker 7"


def test_busy_says_how_long_the_lease_still_lasts(subject: Subject) -> None:
    before = subject.now()
    subject.take("invoice:42", ttl=LONG)
    subject.elapse_past(0.01)
    reply = subject.acquire("invoice:42", ttl=LONG)

    assert isinstance(reply, Busy)
    assert LONG - (subject.now() - before) - 0.002 <= reply.held_by.time_left < LONG - 0.008


def test_busy_says_since_when_the_lease_is_held(subject: Subject) -> None:
    before = subject.wall_us()
    subject.take("invoice:42")
    after = subject.wall_us()
    reply = subject.acquire("invoice:42")

    assert isinstance(reply, Busy)
    assert before / 1e6 - 1e-5 <= reply.held_by.held_since <= after / 1e6 + 1e-5


def test_busy_changes_nothing(subject: Subject) -> None:
    taken = subject.take("invoice:42", ttl=LONG, label="first")
    subject.acquire("invoice:42", ttl=10 * LONG, label="second", floor=taken.token + 1000)
    held_by = subject.peek("invoice:42")

    assert held_by is not None
    assert held_by.time_left <= LONG
    assert (held_by.holder, held_by.token, held_by.label) == (taken.holder, taken.token, "first")


def test_exactly_one_of_two_threads_wins_each_of_a_hundred_races(subject: Subject) -> None:
    def acquirer():
        return lambda number: subject.acquire(f"invoice:{number}")

    for replies in race(acquirer(), acquirer(), rounds=100):
        assert sorted(type(reply).__name__ for reply in replies) == ["Busy", "Granted"]


def test_the_loser_of_a_race_is_told_of_the_winner(subject: Subject) -> None:
    def acquirer():
        def acquire(number: int):
            holder = subject.fresh_holder()
            return holder, subject.acquire(f"invoice:{number}", holder=holder)

        return acquire

    for outcomes in race(acquirer(), acquirer(), rounds=20):
        winners = [holder for holder, reply in outcomes if isinstance(reply, Granted)]
        told = [reply.held_by.holder for _, reply in outcomes if isinstance(reply, Busy)]
        assert len(winners) == 1
        assert told == winners


def test_a_released_resource_goes_to_whoever_asks_next(subject: Subject) -> None:
    taken = subject.take("invoice:42")
    subject.release("invoice:42", holder=taken.holder)
    successor = subject.take("invoice:42")

    reply = subject.acquire("invoice:42", holder=taken.holder)
    assert isinstance(reply, Busy)
    assert reply.held_by.holder == successor.holder


def test_different_resources_do_not_exclude_each_other(subject: Subject) -> None:
    for name in ("a", "A", "a ", " a", "a:b", "a\n", "ä", "a\u0308", "lease:a", "note:a"):
        subject.take(name)


def test_different_namespaces_do_not_exclude_each_other(subject: Subject) -> None:
    subject.take("invoice:42")
    elsewhere = subject.target("invoice:42", namespace=f"{subject.namespace}-other")

    assert isinstance(subject.ask(Acquire(elsewhere, subject.fresh_holder(), "", 60_000)), Granted)


def test_peek_sees_nobody_where_nobody_was(subject: Subject) -> None:
    assert subject.peek("invoice:42") is None


def test_peek_sees_the_holder_and_changes_nothing(subject: Subject) -> None:
    taken = subject.take("invoice:42", ttl=LONG, label="worker 7")
    first = subject.peek("invoice:42")
    subject.elapse_past(0.01)
    second = subject.peek("invoice:42")

    assert first is not None
    assert second is not None
    assert first._replace(time_left=0) == second._replace(time_left=0)
    assert (first.holder, first.token, first.label) == (taken.holder, taken.token, "worker 7")
    assert LONG >= first.time_left > second.time_left + 0.008


def test_a_label_comes_back_as_it_was_given(subject: Subject) -> None:
    for number, label in enumerate(
        ("", " ", "host:1 two  ", "line\r\nline", "nul\0nul", "größer 🔒", "x" * 200)
    ):
        subject.take(f"invoice:{number}", label=label)
        held_by = subject.peek(f"invoice:{number}")
        assert held_by is not None
        assert held_by.label == label


def test_a_holder_is_compared_whole(subject: Subject) -> None:
    subject.take("invoice:42", holder="0" * 31 + "1")

    assert isinstance(subject.acquire("invoice:42", holder="0" * 31 + "2"), Busy)
    assert isinstance(subject.acquire("invoice:42", holder="1" + "0" * 30 + "1"), Busy)


def test_the_longest_lease_there_can_be_is_taken(subject: Subject) -> None:
    subject.take("invoice:42", ttl=MAX_TTL)
    held_by = subject.peek("invoice:42")

    assert held_by is not None
    assert held_by.time_left == pytest.approx(MAX_TTL, abs=10)
