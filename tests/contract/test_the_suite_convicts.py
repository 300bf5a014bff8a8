"""The contract can fail: each broken backend is convicted, and each test of the contract convicts one."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from contract import (
    mutants,
    test_exclusive,
    test_expiry,
    test_monotonic,
    test_multi,
    test_ownership,
    test_replay,
)
from contract.subjects import Subject, memory_subject

from fencing.testing import MemoryBackend

Check = Callable[[Subject], None]

# Each backend with the tests that were written against what it does wrong. Others may fail it as well.
CONVICTED_BY: dict[type[mutants.Mutant], tuple[Check, ...]] = {
    mutants.RepeatsTokens: (
        test_monotonic.test_tokens_grow_over_acquisitions_of_one_resource,
        test_monotonic.test_tokens_grow_over_acquisitions_of_different_resources,
        test_monotonic.test_fifty_interleaved_acquires_of_two_threads_have_fifty_tokens,
    ),
    mutants.CountsDown: (test_monotonic.test_tokens_grow_after_an_expiry,),
    mutants.NeverLifts: (
        test_monotonic.test_a_token_is_lifted_to_the_clock_in_microseconds,
        test_monotonic.test_tokens_grow_after_all_data_were_lost,
    ),
    mutants.LiftsOnce: (test_monotonic.test_a_token_is_lifted_to_the_clock_again_after_time_has_passed,),
    mutants.IgnoresTheFloor: (
        test_monotonic.test_a_token_exceeds_a_floor_above_the_clock_by_exactly_one,
        test_monotonic.test_a_token_exceeds_a_floor_that_the_clock_has_just_reached,
    ),
    mutants.JumpsAboveTheFloor: (
        test_monotonic.test_a_token_exceeds_a_floor_above_the_clock_by_exactly_one,
        test_monotonic.test_a_floor_below_the_clock_makes_no_difference,
    ),
    mutants.MintsPoison: (
        test_monotonic.test_a_floor_of_more_than_a_year_above_the_clock_is_poisoned,
        test_monotonic.test_a_floor_at_the_end_of_the_range_is_poisoned,
    ),
    mutants.RemembersPoison: (
        test_monotonic.test_a_poisoned_acquire_changes_nothing,
        test_monotonic.test_a_poisoned_remint_changes_nothing,
    ),
    mutants.FearsTheFuture: (test_monotonic.test_a_floor_of_almost_a_year_above_the_clock_is_minted,),
    mutants.TakesOverTheLiving: (
        test_exclusive.test_busy_names_holder_token_and_label,
        test_exclusive.test_exactly_one_of_two_threads_wins_each_of_a_hundred_races,
        test_exclusive.test_the_loser_of_a_race_is_told_of_the_winner,
        test_multi.test_exactly_one_of_two_threads_takes_a_set_that_both_name_in_another_order,
    ),
    mutants.ProlongsWhenBusy: (test_exclusive.test_busy_changes_nothing,),
    mutants.MisreportsTheHolder: (
        test_exclusive.test_busy_names_holder_token_and_label,
        test_exclusive.test_busy_says_how_long_the_lease_still_lasts,
        test_exclusive.test_busy_says_since_when_the_lease_is_held,
        test_exclusive.test_a_label_comes_back_as_it_was_given,
    ),
    mutants.SeesGhosts: (test_exclusive.test_peek_sees_nobody_where_nobody_was,),
    mutants.ProlongsOnPeek: (test_exclusive.test_peek_sees_the_holder_and_changes_nothing,),
    mutants.ConfusesNames: (test_exclusive.test_different_resources_do_not_exclude_each_other,),
    mutants.ConfusesNamespaces: (test_exclusive.test_different_namespaces_do_not_exclude_each_other,),
    mutants.ComparesTheEndOfHolders: (test_exclusive.test_a_holder_is_compared_whole,),
    mutants.CapsTheTtl: (test_exclusive.test_the_longest_lease_there_can_be_is_taken,),
    mutants.LocksTheNamespace: (
        test_exclusive.test_different_resources_do_not_exclude_each_other,
        test_multi.test_sets_without_a_common_resource_do_not_exclude_each_other,
    ),
    mutants.NeverExpires: (
        test_expiry.test_a_resource_is_free_again_when_its_ttl_is_over,
        test_expiry.test_who_held_a_lease_does_not_hold_it_when_its_ttl_is_over,
        test_expiry.test_a_holder_that_acquires_again_after_its_expiry_gets_a_new_token,
    ),
    mutants.ExpiresAtOnce: (test_expiry.test_a_resource_is_not_free_before_its_ttl_is_over,),
    mutants.DoesNotRenew: (
        test_expiry.test_renewal_counts_the_ttl_anew,
        test_expiry.test_a_renewed_lease_outlasts_its_first_ttl,
        test_expiry.test_renewal_can_lengthen_the_ttl,
    ),
    mutants.ShortensOnRenewal: (test_expiry.test_renewal_never_shortens,),
    mutants.RenewsOnce: (test_replay.test_a_renewal_sent_again_is_done_again,),
    mutants.RenewsIntoANewLease: (test_expiry.test_renewal_leaves_holder_token_and_label_as_they_are,),
    mutants.LeavesNoNotes: (test_expiry.test_a_takeover_after_expiry_reports_whose_lease_it_was,),
    mutants.AlwaysLeavesNotes: (
        test_expiry.test_a_lease_without_a_note_leaves_no_orphan,
        test_expiry.test_renewal_does_not_give_a_note_to_a_lease_without_one,
    ),
    mutants.KeepsNotesAfterRelease: (
        test_expiry.test_there_is_no_orphan_after_a_release,
        test_expiry.test_an_orphan_is_reported_once,
    ),
    mutants.KeepsTheFirstNote: (
        test_expiry.test_each_takeover_reports_only_the_lease_before_it,
        test_expiry.test_a_lease_without_a_note_reports_the_orphan_before_it_and_hides_it_from_the_next,
    ),
    mutants.DropsTheNoteWhenBusy: (test_expiry.test_a_busy_acquire_does_not_use_up_the_note_of_an_orphan,),
    mutants.NeverUpdatesNotes: (
        test_expiry.test_a_renewed_lease_stands_unowned_only_since_its_last_renewal_ran_out,
        test_expiry.test_an_orphan_carries_the_token_it_was_reminted_to,
        test_replay.test_an_acquire_sent_again_moves_the_orphan_that_it_would_leave,
    ),
    mutants.InventsOrphans: (
        test_expiry.test_there_is_no_orphan_where_nobody_was,
        test_multi.test_an_acquire_sent_again_after_one_was_lost_reports_no_orphan_of_its_own,
    ),
    mutants.MisreportsOrphans: (
        test_expiry.test_a_takeover_after_expiry_reports_whose_lease_it_was,
        test_expiry.test_a_takeover_after_expiry_reports_since_when_it_was_held,
        test_expiry.test_a_takeover_after_expiry_reports_how_long_the_resource_stood_unowned,
    ),
    mutants.ReleasesForAnybody: (
        test_ownership.test_release_by_another_holder_is_refused_and_changes_nothing,
        test_ownership.test_release_of_a_free_resource_is_refused,
        test_replay.test_a_release_sent_again_after_a_takeover_leaves_the_new_holder_alone,
    ),
    mutants.ReleasesWhileRefusing: (
        test_ownership.test_release_by_another_holder_is_refused_and_changes_nothing,
        test_ownership.test_who_was_taken_over_can_neither_renew_nor_release,
    ),
    mutants.ReleasesAllOfTheHolder: (test_ownership.test_release_frees_nothing_else,),
    mutants.DoesNotRelease: (
        test_ownership.test_release_frees_the_resource,
        test_exclusive.test_a_released_resource_goes_to_whoever_asks_next,
    ),
    mutants.RenewsForAnybody: (
        test_ownership.test_renewal_by_another_holder_is_refused_and_changes_nothing,
        test_ownership.test_a_holder_of_one_resource_has_no_say_over_another,
    ),
    mutants.RenewsWhileRefusing: (
        test_ownership.test_renewal_by_another_holder_is_refused_and_changes_nothing,
        test_multi.test_renewal_is_refused_and_prolongs_none_when_one_was_lost,
    ),
    mutants.RemintsForAnybody: (
        test_ownership.test_remint_by_another_holder_is_refused_and_changes_nothing,
        test_ownership.test_who_was_taken_over_cannot_remint_its_way_over_the_live_holder,
    ),
    mutants.RemintsWhileRefusing: (
        test_ownership.test_remint_by_another_holder_is_refused_and_changes_nothing,
        test_ownership.test_who_was_taken_over_cannot_remint_its_way_over_the_live_holder,
        test_multi.test_remint_is_refused_and_changes_none_when_one_was_lost,
    ),
    mutants.TakesWhatIsFree: (
        test_ownership.test_renewal_of_a_free_resource_is_refused_and_takes_nothing,
        test_ownership.test_remint_of_a_free_resource_is_refused_and_takes_nothing,
        test_ownership.test_release_of_a_free_resource_is_refused,
    ),
    mutants.NeverRemints: (test_ownership.test_remint_goes_one_above_a_floor_that_has_reached_the_token,),
    mutants.AlwaysRemints: (
        test_ownership.test_remint_returns_a_token_that_is_above_the_floor_as_it_is,
        test_replay.test_a_remint_sent_again_returns_the_token_it_has_minted,
    ),
    mutants.RemintsOnlyBelowTheFloor: (test_ownership.test_remint_goes_above_a_floor_that_equals_the_token,),
    mutants.RemintsAndRenews: (test_ownership.test_remint_leaves_the_ttl_running,),
    mutants.LosesWhatItRemints: (test_ownership.test_a_reminted_lease_is_still_its_holders,),
    mutants.MintsAtEachReplay: (
        test_replay.test_an_acquire_sent_again_returns_the_same_token,
        test_replay.test_an_acquire_sent_again_returns_the_same_token_after_others_have_tried,
        test_replay.test_an_acquire_sent_again_by_two_threads_at_once_is_granted_one_token,
        test_replay.test_an_acquire_sent_twice_in_one_batch_is_granted_one_token,
        test_multi.test_an_acquire_sent_again_returns_the_same_token_for_all,
    ),
    mutants.BurnsATokenAtEachReplay: (test_replay.test_an_acquire_sent_again_uses_up_no_token,),
    mutants.LetsTheTtlRunOnAtReplay: (test_replay.test_an_acquire_sent_again_counts_the_ttl_anew,),
    mutants.IsBusyForItself: (test_replay.test_an_acquire_sent_again_returns_the_same_token,),
    mutants.RemembersTokensForEver: (
        test_replay.test_an_acquire_that_arrives_after_its_release_is_an_ordinary_acquire,
        test_replay.test_an_acquire_sent_again_after_a_remint_returns_the_reminted_token,
    ),
    mutants.TakesWhatItCanGet: (
        test_multi.test_one_that_is_busy_keeps_all_from_being_taken,
        test_multi.test_all_are_taken_with_one_token,
    ),
    mutants.SeesOnlyTheFirst: (
        test_multi.test_all_are_taken_with_one_token,
        test_multi.test_a_hundred_resources_are_taken_and_freed_as_one,
    ),
    mutants.LooksOnlyAtTheFirst: (
        test_multi.test_one_that_is_busy_keeps_all_from_being_taken,
        test_multi.test_overlapping_sets_exclude_each_other,
    ),
    mutants.RenewsOnlyTheFirst: (test_multi.test_renewal_prolongs_all,),
    mutants.ReplaysOnlyTheFirst: (test_multi.test_an_acquire_sent_again_prolongs_all,),
    mutants.RemintsOnlyTheFirst: (test_multi.test_remint_gives_all_the_new_token,),
    mutants.ReleasesOnlyTheFirst: (test_multi.test_release_frees_all,),
    mutants.RenewsWhatIsLeft: (
        test_multi.test_renewal_is_refused_and_prolongs_none_when_one_was_lost,
        test_multi.test_renewal_is_refused_in_favour_of_who_took_one,
    ),
    mutants.ReplaysWhatIsLeft: (
        test_multi.test_an_acquire_sent_again_after_one_was_lost_takes_all_with_a_new_token,
    ),
    mutants.ReleasesAllOrNothing: (test_multi.test_release_frees_the_rest_when_one_was_lost_and_says_which,),
    mutants.ReleasesInSilence: (test_replay.test_a_release_sent_again_finds_nothing_to_release,),
    mutants.AnswersInAnyOrder: (test_multi.test_a_batch_is_answered_in_order_whatever_the_outcomes,),
    mutants.AnswersTheFirstHundred: (test_multi.test_a_batch_of_hundreds_is_answered_one_by_one,),
    mutants.AnswersUnasked: (test_multi.test_an_empty_batch_has_no_answers,),
}

MODULES = (test_monotonic, test_exclusive, test_expiry, test_ownership, test_replay, test_multi)
CHECKS = [check for module in MODULES for name, check in vars(module).items() if name.startswith("test_")]


def fails(check: Check, kind: type[MemoryBackend]) -> bool:
    try:
        check(memory_subject(kind))
    except AssertionError:
        return True
    return False


def marks(check: Check) -> list[pytest.Mark]:
    return getattr(check, "pytestmark", [])


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        pytest.param(mutant, check, id=f"{mutant.__name__}-{check.__name__.removeprefix('test_')}")
        for mutant, checks in CONVICTED_BY.items()
        for check in checks
    ],
)
def test_a_broken_backend_is_convicted(mutant: type[mutants.Mutant], check: Check) -> None:
    with pytest.raises(AssertionError):
        check(memory_subject(mutant))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("test_"))
def test_each_test_of_the_contract_convicts_some_backend(check: Check) -> None:
    assert any(fails(check, mutant) for mutant in CONVICTED_BY)


def test_every_broken_backend_is_put_on_trial() -> None:
    broken = {
        kind
        for kind in vars(mutants).values()
        if inspect.isclass(kind) and issubclass(kind, mutants.Mutant) and kind is not mutants.Mutant
    }

    assert broken == set(CONVICTED_BY)


def test_a_mutant_that_changes_nothing_is_acquitted() -> None:
    xfails = [check for check in CHECKS if any(mark.name == "xfail" for mark in marks(check))]

    assert [check for check in CHECKS if fails(check, mutants.Mutant)] == xfails
