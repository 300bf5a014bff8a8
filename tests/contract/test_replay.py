"""Replay: what was sent and not answered can be sent again, without harm to anybody."""

from __future__ import annotations

from contract.subjects import LONG, MEDIUM, SHORT, Subject, race

from fencing.backends.base import Acquire, Done, Granted, NotHeld


def test_an_acquire_sent_again_returns_the_same_token(subject: Subject) -> None:
    taken = subject.take("invoice:42")

    assert subject.acquire("invoice:42", holder=taken.holder) == Granted(taken.token)


def test_an_acquire_sent_again_returns_the_same_token_after_others_have_tried(subject: Subject) -> None:
    taken = subject.take("invoice:42")
    for _ in range(3):
        subject.acquire("invoice:42")
        subject.take(f"invoice:{subject.fresh_holder()}")

    assert subject.acquire("invoice:42", holder=taken.holder) == Granted(taken.token)


def test_an_acquire_sent_again_counts_the_ttl_anew(subject: Subject) -> None:
    taken = subject.take("invoice:42", ttl=LONG)
    subject.elapse_past(SHORT)
    before = subject.now()
    subject.acquire("invoice:42", holder=taken.holder, ttl=LONG)
    held_by = subject.peek("invoice:42")

    assert held_by is not None
    assert LONG - (subject.now() - before) - 0.002 <= held_by.time_left <= LONG


def test_an_acquire_sent_again_uses_up_no_token(subject: Subject) -> None:
    floor = subject.wall_us() + 10**9  # above the clock, where tokens have no gaps
    taken = subject.take("invoice:42", floor=floor)
    subject.acquire("invoice:42", holder=taken.holder, floor=floor)

    assert subject.take("invoice:43").token == taken.token + 1


def test_an_acquire_sent_again_by_two_threads_at_once_is_granted_one_token(subject: Subject) -> None:
    holders = [subject.fresh_holder() for _ in range(20)]

    def sender():
        return lambda number: subject.acquire(f"invoice:{number}", holder=holders[number])

    for replies in race(sender(), sender(), rounds=20):
        assert isinstance(replies[0], Granted)
        assert replies[0] == replies[1]


def test_an_acquire_sent_again_moves_the_orphan_that_it_would_leave(subject: Subject) -> None:
    taken = subject.take("invoice:42", ttl=MEDIUM)
    began = subject.now()
    subject.acquire("invoice:42", holder=taken.holder, ttl=2 * MEDIUM)
    subject.elapse_past(2 * MEDIUM)
    subject.elapse_past(SHORT)
    [orphan] = subject.take("invoice:42").reply.orphans or [None]

    assert orphan is not None
    assert orphan.previous.holder == taken.holder
    assert SHORT <= orphan.unowned <= subject.now() - began - 2 * MEDIUM + 0.005


def test_an_acquire_that_arrives_after_its_release_is_an_ordinary_acquire(subject: Subject) -> None:
    taken = subject.take("invoice:42")
    subject.release("invoice:42", holder=taken.holder)

    assert subject.take("invoice:42", holder=taken.holder).token > taken.token


def test_a_renewal_sent_again_is_done_again(subject: Subject) -> None:
    taken = subject.take("invoice:42")

    assert subject.renew("invoice:42", holder=taken.holder) == Done()
    assert subject.renew("invoice:42", holder=taken.holder) == Done()


def test_a_release_sent_again_finds_nothing_to_release(subject: Subject) -> None:
    taken = subject.take("invoice:42")

    assert subject.release("invoice:42", holder=taken.holder) == Done()
    assert subject.release("invoice:42", holder=taken.holder) == NotHeld("invoice:42", None)


def test_a_release_sent_again_after_a_takeover_leaves_the_new_holder_alone(subject: Subject) -> None:
    taken = subject.take("invoice:42")
    subject.release("invoice:42", holder=taken.holder)
    successor = subject.take("invoice:42")
    reply = subject.release("invoice:42", holder=taken.holder)
    held_by = subject.peek("invoice:42")

    assert isinstance(reply, NotHeld)
    assert held_by is not None
    assert (held_by.holder, held_by.token) == (successor.holder, successor.token)


def test_a_remint_sent_again_returns_the_token_it_has_minted(subject: Subject) -> None:
    taken = subject.take("invoice:42")
    first = subject.remint("invoice:42", holder=taken.holder, floor=taken.token)
    subject.take("invoice:43")

    assert isinstance(first, Granted)
    assert first.token > taken.token
    assert subject.remint("invoice:42", holder=taken.holder, floor=taken.token) == first


def test_an_acquire_sent_again_after_a_remint_returns_the_reminted_token(subject: Subject) -> None:
    taken = subject.take("invoice:42")
    reminted = subject.remint("invoice:42", holder=taken.holder, floor=taken.token)

    assert isinstance(reminted, Granted)
    assert reminted.token > taken.token
    assert subject.acquire("invoice:42", holder=taken.holder) == reminted


def test_an_acquire_sent_twice_in_one_batch_is_granted_one_token(subject: Subject) -> None:
    acquire = Acquire(subject.target("invoice:42"), subject.fresh_holder(), "", 60_000)
    first, second = subject.ask_many([acquire, acquire])

    assert isinstance(first, Granted)
    assert first == second
