"""Ownership: only its holder can renew, remint or release a lease; others are told whose it is."""

from __future__ import annotations

from contract.subjects import DAY_US, LONG, Subject, Taken

from fencing.backends.base import Done, Granted, NotHeld, Reply
from fencing.token import HeldBy


def assert_refused_in_favour_of(taken: Taken, reply: Reply) -> None:
    assert isinstance(reply, NotHeld), reply
    assert reply.resource == "invoice:42"
    assert reply.held_by is not None
    assert (reply.held_by.holder, reply.held_by.token, reply.held_by.label) == (
        taken.holder,
        taken.token,
        taken.label,
    )
    assert LONG - 10 < reply.held_by.time_left <= LONG


def assert_unchanged(subject: Subject, before: HeldBy | None) -> None:
    after = subject.peek("invoice:42")
    assert before is not None
    assert after is not None
    assert after._replace(time_left=0) == before._replace(time_left=0)
    assert after.time_left <= before.time_left


def test_release_frees_the_resource(subject: Subject) -> None:
    taken = subject.take("invoice:42")

    assert subject.release("invoice:42", holder=taken.holder) == Done()
    assert subject.is_free("invoice:42")


def test_release_frees_nothing_else(subject: Subject) -> None:
    taken = subject.take("invoice:42")
    subject.take("invoice:43", holder=taken.holder)
    subject.release("invoice:42", holder=taken.holder)

    assert not subject.is_free("invoice:43")


def test_release_by_another_holder_is_refused_and_changes_nothing(subject: Subject) -> None:
    taken = subject.take("invoice:42", label="worker 7")
    before = subject.peek("invoice:42")

    assert_refused_in_favour_of(taken, subject.release("invoice:42", holder=subject.fresh_holder()))
    assert_unchanged(subject, before)


def test_renewal_by_another_holder_is_refused_and_changes_nothing(subject: Subject) -> None:
    taken = subject.take("invoice:42", label="worker 7")
    before = subject.peek("invoice:42")

    refused = subject.renew("invoice:42", holder=subject.fresh_holder(), ttl=10 * LONG)
    assert_refused_in_favour_of(taken, refused)
    assert_unchanged(subject, before)


def test_remint_by_another_holder_is_refused_and_changes_nothing(subject: Subject) -> None:
    taken = subject.take("invoice:42", label="worker 7")
    before = subject.peek("invoice:42")
    floor = subject.wall_us() + DAY_US

    assert_refused_in_favour_of(
        taken, subject.remint("invoice:42", holder=subject.fresh_holder(), floor=floor)
    )
    assert_unchanged(subject, before)
    assert subject.take("invoice:43").token <= floor, "the refused remint moved the counter"


def test_release_of_a_free_resource_is_refused(subject: Subject) -> None:
    reply = subject.release("invoice:42", holder=subject.fresh_holder())

    assert reply == NotHeld("invoice:42", None)


def test_renewal_of_a_free_resource_is_refused_and_takes_nothing(subject: Subject) -> None:
    reply = subject.renew("invoice:42", holder=subject.fresh_holder())

    assert reply == NotHeld("invoice:42", None)
    assert subject.is_free("invoice:42")


def test_remint_of_a_free_resource_is_refused_and_takes_nothing(subject: Subject) -> None:
    reply = subject.remint("invoice:42", holder=subject.fresh_holder(), floor=0)

    assert reply == NotHeld("invoice:42", None)
    assert subject.is_free("invoice:42")


def test_a_holder_of_one_resource_has_no_say_over_another(subject: Subject) -> None:
    holder = subject.take("invoice:43").holder
    taken = subject.take("invoice:42")

    assert_refused_in_favour_of(taken, subject.release("invoice:42", holder=holder))
    assert_refused_in_favour_of(taken, subject.renew("invoice:42", holder=holder))


def test_remint_goes_one_above_a_floor_that_has_reached_the_token(subject: Subject) -> None:
    taken = subject.take("invoice:42")
    floor = subject.wall_us() + DAY_US
    reply = subject.remint("invoice:42", holder=taken.holder, floor=floor)
    held_by = subject.peek("invoice:42")

    assert reply == Granted(floor + 1)
    assert held_by is not None
    assert held_by.token == floor + 1


def test_remint_goes_above_a_floor_that_equals_the_token(subject: Subject) -> None:
    taken = subject.take("invoice:42")
    reply = subject.remint("invoice:42", holder=taken.holder, floor=taken.token)

    assert isinstance(reply, Granted)
    assert reply.token > taken.token


def test_remint_returns_a_token_that_is_above_the_floor_as_it_is(subject: Subject) -> None:
    taken = subject.take("invoice:42")
    before = subject.peek("invoice:42")

    reply = subject.remint("invoice:42", holder=taken.holder, floor=taken.token - 1)
    assert reply == Granted(taken.token)
    assert_unchanged(subject, before)


def test_remint_leaves_the_ttl_running(subject: Subject) -> None:
    taken = subject.take("invoice:42", label="worker 7")
    subject.elapse_past(0.01)
    subject.remint("invoice:42", holder=taken.holder, floor=taken.token)
    held_by = subject.peek("invoice:42")

    assert held_by is not None
    assert LONG - 10 < held_by.time_left < LONG - 0.008
    assert (held_by.holder, held_by.label) == (taken.holder, "worker 7")


def test_a_reminted_lease_is_still_its_holders(subject: Subject) -> None:
    taken = subject.take("invoice:42")
    subject.remint("invoice:42", holder=taken.holder, floor=taken.token)

    assert subject.renew("invoice:42", holder=taken.holder) == Done()
    assert subject.release("invoice:42", holder=taken.holder) == Done()
    assert subject.is_free("invoice:42")


def test_who_was_taken_over_cannot_remint_its_way_over_the_live_holder(subject: Subject) -> None:
    lost = subject.abandoned("invoice:42")
    live = subject.take("invoice:42")
    before = subject.peek("invoice:42")

    reply = subject.remint("invoice:42", holder=lost.holder, floor=live.token + DAY_US)
    assert_refused_in_favour_of(live, reply)
    assert_unchanged(subject, before)


def test_who_was_taken_over_can_neither_renew_nor_release(subject: Subject) -> None:
    lost = subject.abandoned("invoice:42")
    live = subject.take("invoice:42")
    before = subject.peek("invoice:42")

    assert_refused_in_favour_of(live, subject.renew("invoice:42", holder=lost.holder, ttl=10 * LONG))
    assert_refused_in_favour_of(live, subject.release("invoice:42", holder=lost.holder))
    assert_unchanged(subject, before)
