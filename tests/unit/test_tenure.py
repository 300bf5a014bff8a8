"""The states of a lease: one table, and what comes too late changes nothing."""

import re
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencing import tenure as module
from fencing.errors import LeaseLost, LossReason
from fencing.policies import Renewal
from fencing.tenure import LOSS, TRANSITIONS, Signal, State, Tenure

PAIRS = [(state, signal) for state in State for signal in Signal]
REASONS: tuple[LossReason, ...] = get_args(LossReason)
ENDS = [State.RELEASED, State.LEFT, State.LOST]


def drawn() -> set[tuple[State, Signal, State]]:
    """The arrows in the module's docstring."""
    arrows = re.findall(r"([A-Z]+) ──([a-z, ]+)──▶ ([A-Z]+)", module.__doc__ or "")
    return {
        (State(before.lower()), Signal(signal.strip()), State(after.lower()))
        for before, signals, after in arrows
        for signal in signals.split(",")
    }


def tabled() -> set[tuple[State, Signal, State]]:
    return {(before, signal, after) for before, row in TRANSITIONS.items() for signal, after in row.items()}


def in_state(state: State) -> Tenure:
    tenure = Tenure(ttl=9.0, since=100.0)
    tenure.state = state
    return tenure


def test_every_arrow_that_is_drawn_is_in_the_table() -> None:
    assert len(drawn()) >= 12
    assert drawn() <= tabled()


def test_every_transition_is_drawn() -> None:
    assert tabled() <= drawn()


def test_the_table_has_a_row_for_every_state_and_the_ends_have_no_way_out() -> None:
    assert set(TRANSITIONS) == set(State)
    assert [state for state in State if not TRANSITIONS[state]] == ENDS


@pytest.mark.parametrize(("state", "signal"), PAIRS, ids=lambda value: value.value.replace(" ", "_"))
def test_a_signal_moves_as_the_table_says_or_comes_too_late(state: State, signal: Signal) -> None:
    tenure = in_state(state)
    after = TRANSITIONS[state].get(signal)
    assert tenure.signal(signal) is (after is not None)
    assert tenure.state is (state if after is None else after)


@pytest.mark.parametrize("state", ENDS)
@given(st.lists(st.sampled_from(Signal), max_size=10))
@settings(deadline=None, derandomize=True, database=None, max_examples=40)
def test_an_end_is_an_end_whatever_comes_later(state: State, signals: list[Signal]) -> None:
    tenure = in_state(state)
    assert not any(tenure.signal(signal) for signal in signals)
    assert tenure.state is state


@pytest.mark.parametrize(("state", "signal"), PAIRS, ids=lambda value: value.value.replace(" ", "_"))
def test_nothing_but_a_renewal_or_a_failed_release_leads_back_to_held(state: State, signal: Signal) -> None:
    if TRANSITIONS[state].get(signal) is State.HELD:
        assert signal in (Signal.RENEWED, Signal.KEPT)


def test_every_reason_for_a_loss_is_a_signal_that_loses_a_held_lease() -> None:
    assert set(LOSS) == set(REASONS)
    assert {TRANSITIONS[State.HELD][signal] for signal in LOSS.values()} == {State.LOST}


def test_a_lease_that_goes_on_is_not_lost_by_time_but_by_another_holder() -> None:
    tenure = in_state(State.CONTINUED)
    assert not tenure.lose("invoice:42", "expired")
    assert not tenure.lose("invoice:42", "abandoned")
    assert tenure.lost is None
    assert tenure.lose("invoice:42", "superseded")


@pytest.mark.parametrize("reason", REASONS)
def test_a_loss_says_what_and_why_and_is_sticky(reason: LossReason) -> None:
    tenure = Tenure(ttl=9.0, since=100.0)
    assert tenure.lost is None
    assert tenure.lose("invoice:42", reason)
    lost = tenure.lost
    assert isinstance(lost, LeaseLost)
    assert (lost.resource, lost.reason) == ("invoice:42", reason)
    assert "invoice:42" in str(lost)
    for later in REASONS:
        assert not tenure.lose("invoice:42", later)
    assert not tenure.renewed(105.0)
    assert not tenure.signal(Signal.RELEASING)
    assert tenure.lost is lost
    assert tenure.state is State.LOST


def test_the_check_of_stickiness_convicts_a_table_with_a_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSITIONS, State.LOST, {Signal.EXPIRED: State.LOST, Signal.RENEWED: State.HELD})
    with pytest.raises(AssertionError):
        test_a_loss_says_what_and_why_and_is_sticky("superseded")


def test_the_deadline_counts_from_when_the_request_was_sent() -> None:
    tenure = Tenure(ttl=9.0, since=100.0)
    assert tenure.deadline == 109.0
    assert tenure.renewed(103.0)
    assert (tenure.since, tenure.deadline, tenure.acquired_at) == (103.0, 112.0, 100.0)


def test_answers_that_overtake_each_other_do_not_move_the_deadline_back() -> None:
    tenure = Tenure(ttl=9.0, since=100.0)
    tenure.renewed(106.0)
    tenure.renewed(103.0)
    assert tenure.deadline == 115.0


def test_a_renewal_may_change_the_ttl() -> None:
    tenure = Tenure(ttl=9.0, since=100.0)
    tenure.extended(103.0, 60.0)
    assert (tenure.ttl, tenure.deadline) == (60.0, 163.0)
    tenure.extended(104.0, 5.0)
    assert (tenure.ttl, tenure.deadline) == (5.0, 109.0)


def test_a_renewal_never_shortens() -> None:
    tenure = Tenure(ttl=9.0, since=100.0)
    tenure.extended(103.0, 60.0)
    tenure.renewed(104.0, 9.0)
    assert (tenure.ttl, tenure.deadline) == (60.0, 163.0)


@pytest.mark.parametrize("state", [State.RELEASING, *ENDS])
def test_a_renewal_that_comes_too_late_moves_no_deadline(state: State) -> None:
    tenure = in_state(state)
    assert not tenure.renewed(105.0, 60.0)
    assert (tenure.ttl, tenure.deadline) == (9.0, 109.0)


def test_failures_are_counted_in_a_row() -> None:
    tenure, renewal = Tenure(ttl=9.0, since=100.0), Renewal(failures=3)
    assert [tenure.failed(renewal), tenure.failed(renewal)] == [False, False]
    tenure.renewed(103.0)
    assert tenure.failures == 0
    assert [tenure.failed(renewal) for _ in range(3)] == [False, False, True]


def test_a_lease_next_wants_to_be_renewed_and_later_after_failures() -> None:
    tenure, renewal = Tenure(ttl=9.0, since=100.0), Renewal(failures=3)
    seen = []
    for _ in range(3):
        seen.append(tenure.next_at(renewal))
        tenure.failed(renewal)
    assert seen == [(pytest.approx(at), True) for at in (103.0, 105.0, 107.0)]


def test_a_lease_that_is_not_renewed_next_wants_attention_when_it_runs_out() -> None:
    assert Tenure(ttl=9.0, since=100.0).next_at(None) == (109.0, False)


@pytest.mark.parametrize(("max_hold", "renews"), [(3.0, False), (3.1, True), (6.0, True), (6.1, True)])
def test_renewal_ends_with_max_hold(max_hold: float, renews: bool) -> None:
    tenure = Tenure(ttl=9.0, since=100.0)
    at, again = tenure.next_at(Renewal(max_hold=max_hold))
    assert again is renews
    assert at == pytest.approx(103.0 if renews else 109.0)


def test_max_hold_counts_from_the_acquisition_not_from_the_last_renewal() -> None:
    tenure, renewal = Tenure(ttl=9.0, since=100.0), Renewal(max_hold=7.0)
    sent = []
    while (due := tenure.next_at(renewal))[1]:
        sent.append(due[0])
        tenure.renewed(due[0])
    assert sent == pytest.approx([103.0, 106.0])
    assert due == (pytest.approx(115.0), False)
