"""Several resources in one lease: all or nothing, one holder, one token. And several commands in one batch."""

from __future__ import annotations

from contract.subjects import LONG, SHORT, Subject, race

from fencing.backends.base import Acquire, Busy, Done, Granted, NotHeld, Peek, Release, Renew, Seen

SET = ("invoice:1", "invoice:2", "invoice:3")


def test_all_are_taken_with_one_token(subject: Subject) -> None:
    taken = subject.take(*SET, label="worker 7")

    for resource in SET:
        held_by = subject.peek(resource)
        assert held_by is not None
        assert (held_by.resource, held_by.holder, held_by.token, held_by.label) == (
            resource,
            taken.holder,
            taken.token,
            "worker 7",
        )


def test_one_that_is_busy_keeps_all_from_being_taken(subject: Subject) -> None:
    for busy in SET:
        taken = subject.take(busy)
        reply = subject.acquire(*SET)

        assert isinstance(reply, Busy), reply
        assert (reply.held_by.resource, reply.held_by.holder) == (busy, taken.holder)
        assert [resource for resource in SET if not subject.is_free(resource)] == [busy]
        subject.release(busy, holder=taken.holder)


def test_each_of_them_is_busy_for_others(subject: Subject) -> None:
    taken = subject.take(*SET)

    for resource in SET:
        reply = subject.acquire(resource)
        assert isinstance(reply, Busy)
        assert (reply.held_by.resource, reply.held_by.holder) == (resource, taken.holder)


def test_overlapping_sets_exclude_each_other(subject: Subject) -> None:
    subject.take("invoice:1", "invoice:2")
    reply = subject.acquire("invoice:3", "invoice:2")

    assert isinstance(reply, Busy)
    assert reply.held_by.resource == "invoice:2"
    assert subject.is_free("invoice:3")


def test_sets_without_a_common_resource_do_not_exclude_each_other(subject: Subject) -> None:
    first = subject.take("invoice:1", "invoice:2")

    assert subject.take("invoice:3", "invoice:4").token > first.token


def test_exactly_one_of_two_threads_takes_a_set_that_both_name_in_another_order(subject: Subject) -> None:
    def acquirer(*names: str):
        return lambda number: subject.acquire(*(f"{name}:{number}" for name in names))

    for replies in race(acquirer("a", "b", "c"), acquirer("c", "b", "a"), rounds=30):
        assert sorted(type(reply).__name__ for reply in replies) == ["Busy", "Granted"]


def test_release_frees_all(subject: Subject) -> None:
    taken = subject.take(*SET)

    assert subject.release(*SET, holder=taken.holder) == Done()
    assert all(map(subject.is_free, SET))


def test_renewal_prolongs_all(subject: Subject) -> None:
    taken = subject.take(*SET, ttl=LONG)

    assert subject.renew(*SET, holder=taken.holder, ttl=2 * LONG) == Done()
    for resource in SET:
        held_by = subject.peek(resource)
        assert held_by is not None
        assert LONG < held_by.time_left <= 2 * LONG


def test_remint_gives_all_the_new_token(subject: Subject) -> None:
    taken = subject.take(*SET)
    reply = subject.remint(*SET, holder=taken.holder, floor=taken.token)

    assert isinstance(reply, Granted)
    assert reply.token > taken.token
    for resource in SET:
        held_by = subject.peek(resource)
        assert held_by is not None
        assert held_by.token == reply.token


def test_all_are_free_again_when_the_ttl_is_over(subject: Subject) -> None:
    subject.abandoned(*SET)

    assert all(map(subject.is_free, SET))


def test_each_that_was_not_released_is_reported_as_an_orphan(subject: Subject) -> None:
    both = subject.take("invoice:1", "invoice:3", ttl=SHORT)
    subject.elapse_past(SHORT)
    orphans = subject.take(*SET).reply.orphans

    assert [orphan.previous.resource for orphan in orphans] == ["invoice:1", "invoice:3"]
    assert {orphan.previous.holder for orphan in orphans} == {both.holder}


def test_an_acquire_sent_again_returns_the_same_token_for_all(subject: Subject) -> None:
    taken = subject.take(*SET)

    assert subject.acquire(*SET, holder=taken.holder) == Granted(taken.token)


def test_an_acquire_sent_again_prolongs_all(subject: Subject) -> None:
    taken = subject.take(*SET, ttl=LONG)
    subject.acquire(*SET, holder=taken.holder, ttl=2 * LONG)

    for resource in SET:
        held_by = subject.peek(resource)
        assert held_by is not None
        assert LONG < held_by.time_left <= 2 * LONG


def test_an_acquire_sent_again_after_one_was_lost_takes_all_with_a_new_token(subject: Subject) -> None:
    taken = subject.take(*SET)
    subject.release("invoice:2", holder=taken.holder)
    again = subject.take(*SET, holder=taken.holder)

    assert again.token > taken.token
    for resource in SET:
        held_by = subject.peek(resource)
        assert held_by is not None
        assert (held_by.holder, held_by.token) == (taken.holder, again.token)


def test_an_acquire_sent_again_after_one_was_lost_reports_no_orphan_of_its_own(subject: Subject) -> None:
    taken = subject.take(*SET)
    subject.release("invoice:2", holder=taken.holder)

    assert subject.take(*SET, holder=taken.holder).reply.orphans == ()


def test_renewal_is_refused_and_prolongs_none_when_one_was_lost(subject: Subject) -> None:
    for lost in SET:
        taken = subject.take(*SET, ttl=LONG)
        subject.release(lost, holder=taken.holder)

        assert subject.renew(*SET, holder=taken.holder, ttl=10 * LONG) == NotHeld(lost, None)
        assert subject.is_free(lost)
        for resource in set(SET) - {lost}:
            held_by = subject.peek(resource)
            assert held_by is not None
            assert held_by.time_left <= LONG
        subject.release(*SET, holder=taken.holder)


def test_remint_is_refused_and_changes_none_when_one_was_lost(subject: Subject) -> None:
    for lost in SET:
        taken = subject.take(*SET)
        subject.release(lost, holder=taken.holder)

        assert subject.remint(*SET, holder=taken.holder, floor=taken.token) == NotHeld(lost, None)
        for resource in set(SET) - {lost}:
            held_by = subject.peek(resource)
            assert held_by is not None
            assert held_by.token == taken.token
        subject.release(*SET, holder=taken.holder)


def test_renewal_is_refused_in_favour_of_who_took_one(subject: Subject) -> None:
    taken = subject.take(*SET)
    subject.release("invoice:2", holder=taken.holder)
    thief = subject.take("invoice:2")
    reply = subject.renew(*SET, holder=taken.holder)

    assert isinstance(reply, NotHeld)
    assert reply.held_by is not None
    assert (reply.resource, reply.held_by.holder) == ("invoice:2", thief.holder)


def test_release_frees_the_rest_when_one_was_lost_and_says_which(subject: Subject) -> None:
    taken = subject.take(*SET)
    subject.release("invoice:2", holder=taken.holder)
    thief = subject.take("invoice:2")
    reply = subject.release(*SET, holder=taken.holder)

    assert isinstance(reply, NotHeld)
    assert reply.held_by is not None
    assert (reply.resource, reply.held_by.holder) == ("invoice:2", thief.holder)
    assert subject.is_free("invoice:1")
    assert subject.is_free("invoice:3")
    assert not subject.is_free("invoice:2")


def test_a_hundred_resources_are_taken_and_freed_as_one(subject: Subject) -> None:
    many = [f"invoice:{number}" for number in range(100)]
    taken = subject.take(*many)

    last = subject.peek("invoice:99")
    assert last is not None
    assert last.token == taken.token
    assert subject.release(*many, holder=taken.holder) == Done()
    assert subject.is_free("invoice:0")
    assert subject.is_free("invoice:99")


def test_a_batch_is_answered_in_order_whatever_the_outcomes(subject: Subject) -> None:
    mine = subject.take("mine")
    others = subject.take("others")
    holder = mine.holder

    replies = subject.ask_many(
        [
            Acquire(subject.target("free"), holder, "", 60_000),
            Acquire(subject.target("others"), holder, "", 60_000),
            Renew(subject.target("mine"), holder, 60_000),
            Renew(subject.target("others"), holder, 60_000),
            Release(subject.target("nobody's"), holder),
            Release(subject.target("mine"), holder),
            Peek(subject.target("mine")),
            Peek(subject.target("others")),
        ]
    )

    assert [type(reply) for reply in replies] == [Granted, Busy, Done, NotHeld, NotHeld, Done, Seen, Seen]
    assert replies[1].held_by.holder == others.holder
    assert replies[3].held_by.holder == others.holder
    assert replies[4] == NotHeld("nobody's", None)
    assert replies[6] == Seen(None)
    assert replies[7].held_by.holder == others.holder


def test_a_batch_of_hundreds_is_answered_one_by_one(subject: Subject) -> None:
    taken = subject.take("invoice:0")
    targets = [subject.target(f"invoice:{number}") for number in range(300)]
    replies = subject.ask_many([Renew(target, taken.holder, 60_000) for target in targets])

    assert replies[0] == Done()
    assert list(replies[1:]) == [NotHeld(f"invoice:{number}", None) for number in range(1, 300)]


def test_an_empty_batch_has_no_answers(subject: Subject) -> None:
    assert list(subject.ask_many([], timeout=0.1)) == []
