"""Expiry: a lease that is not renewed ends by itself, and whoever comes next learns that it was an orphan."""

from __future__ import annotations

from contract.subjects import LONG, MEDIUM, SHORT, Subject, Taken

from fencing.backends.base import Busy, Done, Granted, NotHeld, Orphan, Renew


def only_orphan(taken: Taken) -> Orphan:
    [orphan] = taken.reply.orphans or [None]
    assert orphan is not None, "no orphan was reported"
    return orphan


def test_a_resource_is_free_again_when_its_ttl_is_over(subject: Subject) -> None:
    subject.abandoned("invoice:42")

    assert subject.is_free("invoice:42")
    subject.take("invoice:42")


def test_a_resource_is_not_free_before_its_ttl_is_over(subject: Subject) -> None:
    subject.take("invoice:42", ttl=LONG)
    subject.elapse_past(SHORT)

    assert isinstance(subject.acquire("invoice:42"), Busy)


def test_who_held_a_lease_does_not_hold_it_when_its_ttl_is_over(subject: Subject) -> None:
    holder = subject.abandoned("invoice:42").holder

    assert subject.renew("invoice:42", holder=holder) == NotHeld("invoice:42", None)
    assert subject.remint("invoice:42", holder=holder, floor=0) == NotHeld("invoice:42", None)
    assert subject.release("invoice:42", holder=holder) == NotHeld("invoice:42", None)
    assert subject.is_free("invoice:42")


def test_renewal_counts_the_ttl_anew(subject: Subject) -> None:
    holder = subject.take("invoice:42", ttl=LONG).holder
    subject.elapse_past(SHORT)
    before = subject.now()

    assert subject.renew("invoice:42", holder=holder, ttl=LONG) == Done()
    held_by = subject.peek("invoice:42")
    assert held_by is not None
    assert LONG - (subject.now() - before) - 0.002 <= held_by.time_left <= LONG


def test_a_renewed_lease_outlasts_its_first_ttl(subject: Subject) -> None:
    holder = subject.take("invoice:42", ttl=0.2).holder
    subject.renew("invoice:42", holder=holder, ttl=LONG)
    subject.elapse_past(0.2)

    assert not subject.is_free("invoice:42")


def test_renewal_can_lengthen_the_ttl(subject: Subject) -> None:
    holder = subject.take("invoice:42", ttl=LONG).holder
    subject.renew("invoice:42", holder=holder, ttl=3 * LONG)
    held_by = subject.peek("invoice:42")

    assert held_by is not None
    assert 2 * LONG < held_by.time_left <= 3 * LONG


def test_renewal_never_shortens(subject: Subject) -> None:
    """So that one which was given up, and arrives late, does no harm."""
    holder = subject.take("invoice:42", ttl=LONG).holder
    assert subject.renew("invoice:42", holder=holder, ttl=SHORT) == Done()
    subject.elapse_past(SHORT)

    assert not subject.is_free("invoice:42")


def test_renewal_leaves_holder_token_and_label_as_they_are(subject: Subject) -> None:
    taken = subject.take("invoice:42", label="worker 7")
    before = subject.peek("invoice:42")
    subject.renew("invoice:42", holder=taken.holder)
    after = subject.peek("invoice:42")

    assert before is not None
    assert after is not None
    assert after._replace(time_left=0) == before._replace(time_left=0)


def test_a_takeover_after_expiry_reports_whose_lease_it_was(subject: Subject) -> None:
    lost = subject.abandoned("invoice:42", label="worker 7")
    previous = only_orphan(subject.take("invoice:42")).previous

    assert previous.resource == "invoice:42"
    assert (previous.holder, previous.token, previous.label) == (lost.holder, lost.token, "worker 7")
    assert previous.time_left == 0


def test_a_takeover_after_expiry_reports_since_when_it_was_held(subject: Subject) -> None:
    before = subject.wall_us()
    subject.take("invoice:42", ttl=SHORT)
    after = subject.wall_us()
    subject.elapse_past(SHORT)

    held_since = only_orphan(subject.take("invoice:42")).previous.held_since
    assert before / 1e6 - 1e-5 <= held_since <= after / 1e6 + 1e-5


def test_a_takeover_after_expiry_reports_how_long_the_resource_stood_unowned(subject: Subject) -> None:
    subject.take("invoice:42", ttl=SHORT)
    began = subject.now()
    subject.elapse_past(SHORT)
    subject.elapse_past(SHORT)
    unowned = only_orphan(subject.take("invoice:42")).unowned

    assert SHORT <= unowned <= subject.now() - began - SHORT + 0.005


def test_a_renewed_lease_stands_unowned_only_since_its_last_renewal_ran_out(subject: Subject) -> None:
    holder = subject.take("invoice:42", ttl=MEDIUM).holder
    began = subject.now()
    subject.renew("invoice:42", holder=holder, ttl=2 * MEDIUM)
    subject.elapse_past(2 * MEDIUM)
    subject.elapse_past(SHORT)
    orphan = only_orphan(subject.take("invoice:42"))

    assert orphan.previous.holder == holder
    assert SHORT <= orphan.unowned <= subject.now() - began - 2 * MEDIUM + 0.005


def test_an_orphan_carries_the_token_it_was_reminted_to(subject: Subject) -> None:
    taken = subject.take("invoice:42", ttl=MEDIUM)
    reminted = subject.remint("invoice:42", holder=taken.holder, floor=taken.token)
    subject.elapse_past(MEDIUM)

    assert isinstance(reminted, Granted)
    assert only_orphan(subject.take("invoice:42")).previous.token == reminted.token


def test_there_is_no_orphan_where_nobody_was(subject: Subject) -> None:
    assert subject.take("invoice:42").reply.orphans == ()


def test_there_is_no_orphan_after_a_release(subject: Subject) -> None:
    taken = subject.take("invoice:42")
    subject.release("invoice:42", holder=taken.holder)

    assert subject.take("invoice:42").reply.orphans == ()


def test_an_orphan_is_reported_once(subject: Subject) -> None:
    subject.abandoned("invoice:42")
    successor = subject.take("invoice:42")
    subject.release("invoice:42", holder=successor.holder)

    assert only_orphan(successor)
    assert subject.take("invoice:42").reply.orphans == ()


def test_each_takeover_reports_only_the_lease_before_it(subject: Subject) -> None:
    subject.abandoned("invoice:42")
    second = subject.abandoned("invoice:42")

    assert only_orphan(subject.take("invoice:42")).previous.holder == second.holder


def test_a_busy_acquire_does_not_use_up_the_note_of_an_orphan(subject: Subject) -> None:
    lost = subject.take("invoice:42", ttl=MEDIUM)
    subject.acquire("invoice:42")
    subject.elapse_past(MEDIUM)

    assert only_orphan(subject.take("invoice:42")).previous.holder == lost.holder


def test_a_lease_without_a_note_leaves_no_orphan(subject: Subject) -> None:
    subject.abandoned("invoice:42", note=False)

    assert subject.take("invoice:42").reply.orphans == ()


def test_renewal_does_not_give_a_note_to_a_lease_without_one(subject: Subject) -> None:
    taken = subject.take("invoice:42", ttl=MEDIUM, note=False)
    subject.ask(Renew(taken.target, taken.holder, round(2 * MEDIUM * 1000), note=False))
    subject.elapse_past(2 * MEDIUM)

    assert subject.take("invoice:42").reply.orphans == ()


def test_a_lease_without_a_note_reports_the_orphan_before_it_and_hides_it_from_the_next(
    subject: Subject,
) -> None:
    lost = subject.abandoned("invoice:42")
    without_note = subject.abandoned("invoice:42", note=False)

    assert only_orphan(without_note).previous.holder == lost.holder
    assert subject.take("invoice:42").reply.orphans == ()


def test_a_holder_that_acquires_again_after_its_expiry_gets_a_new_token(subject: Subject) -> None:
    lost = subject.abandoned("invoice:42")

    assert subject.take("invoice:42", holder=lost.holder).token > lost.token
