"""The guard's tests can fail: with any of its checks switched off, what it was there for goes wrong."""

from __future__ import annotations

import inspect
import pkgutil
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sql import test_mappings as mappings
from sql import test_sessions as sessions
from sql.scene import Db, FakeLeases, own_database
from sqlalchemy.orm import Session

import fencing.sql
from fencing.sql import binding, commit, engine, guard, net, plan

Mutation = Callable[[pytest.MonkeyPatch], None]
Check = Callable[..., None]

MODULES = [import_module(f"fencing.sql.{each.name}") for each in pkgutil.iter_modules(fencing.sql.__path__)]


# The holes


def nothing(*_: Any, **__: Any) -> None:
    """Instead of a check."""


def replace(patch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """Put something else in the place of a function, wherever it was imported."""
    used = [module for module in MODULES if hasattr(module, name)]
    assert used, f"there is no {name} any more"
    for module in used:
        patch.setattr(module, name, value)


def compares(rule: Callable[[Any, Any, Any, Any], Any]) -> Mutation:
    """Compare tokens and holders by another rule."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        def admitted(fence: Any, target: Any = None, new: Any = None) -> Any:
            stored = (fence.table if target is None else target).c
            token, holder = guard.stamps(fence).values()
            return rule(stored[fence.token.key], stored[fence.holder.key], token, holder)

        patch.setattr(plan, "_PLANS", weakref.WeakKeyDictionary())
        replace(patch, "admitted", admitted)

    return mutate


admits_everything = compares(lambda own, whose, token, holder: sa.or_(own < token, own >= token))
admits_equal_tokens = compares(lambda own, whose, token, holder: own <= token)
admits_only_newer_tokens = compares(lambda own, whose, token, holder: own < token)


def believes_the_driver(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "proven", lambda *_: True)


def does_not_judge(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "judge", nothing)


def forgets_refusals(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "mark", nothing)


def never_vetoes(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "may_commit", nothing)


def vetoes_without_rolling_back(patch: pytest.MonkeyPatch) -> None:
    really = commit.may_commit

    def may_commit(connection: Any, bound: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(connection.dialect, "do_rollback", nothing)
            really(connection, bound)

    replace(patch, "may_commit", may_commit)


def vetoes_one_database_at_a_time(patch: pytest.MonkeyPatch) -> None:
    """A session's commit is not looked at before its first database has committed."""
    patch.setattr(Session, "in_nested_transaction", lambda _: True)


def trusts_the_lease(patch: pytest.MonkeyPatch) -> None:
    made = binding.Guard.__init__

    def init(self: Any, lease: Any) -> None:
        made(self, lease)
        self.check = nothing

    patch.setattr(binding.Guard, "__init__", init)


def trusts_the_lease_of_statements(patch: pytest.MonkeyPatch) -> None:
    before = engine.Hooks.before_execute

    def before_execute(self: Any, connection: Any, *rest: Any) -> Any:
        mode = engine.mode_of(connection)
        if not isinstance(mode, binding.Guard):
            return before(self, connection, *rest)
        kept, mode.check = mode.check, nothing
        try:
            return before(self, connection, *rest)
        finally:
            mode.check = kept

    patch.setattr(engine.Hooks, "before_execute", before_execute)


def takes_what_was_read_before(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "refuse_stale_reads", nothing)


def keeps_what_was_loaded_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "expire_all", nothing)


def ends_with_the_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(binding.Binding, "linger", nothing)


def takes_any_lease_for_its_own(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(binding.Guard, "same_as", lambda *_: True)


def accepts_autocommit(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "_autocommits", lambda _: False)


def accepts_two_phases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.Hooks, "begin_twophase", lambda *_: None)


def has_no_net(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(net.Net, "unstamped", nothing)


def lets_unguarded_writes_through(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(net.Net, "unguarded", nothing)


def tells_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(net.Net, "tell_unguarded", nothing)


def does_not_read_text(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "written", nothing)


def does_not_read_common_table_expressions(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "written_by_cte", nothing)


def does_not_hear_of_failures(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "failed", nothing)


def takes_every_failure_for_unknown(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "_undecided", lambda *_: True)


def takes_every_failure_for_known(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "_undecided", lambda *_: False)


def does_not_ask_what_rows_belong_to(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "within", lambda made, *_: (made.statement, {}))
    replace(patch, "strayed", nothing)


def does_not_restrict(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "_restricted", lambda made, *_: (made.statement, {}))


def does_not_look_where_rows_were_skipped(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "strayed", nothing)


def lets_rows_move(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "_stays_within", nothing)


def inserts_anything(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "_insert_within", nothing)


def claims_no_parents(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "claim_parents", lambda connection, found, statement, *_: statement)


def follows_nobody(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "follower", nothing)
    replace(patch, "FENCED_NAMES", {})  # nor is their name known


# Each hole with the tests that were written against it. Others may fail it as well.
CONVICTED_BY: dict[Mutation, tuple[Check, ...]] = {
    admits_everything: (
        sessions.test_a_stale_write_is_refused_and_leaves_the_row_alone,
        sessions.test_the_same_token_of_another_holder_is_refused,
        sessions.test_a_stale_delete_by_the_unit_of_work_is_refused,
        sessions.test_changes_that_are_flushed_after_the_block_are_compared,
    ),
    admits_equal_tokens: (sessions.test_the_same_token_of_another_holder_is_refused,),
    admits_only_newer_tokens: (),
    believes_the_driver: (
        sessions.test_the_same_token_of_another_holder_is_refused,
        sessions.test_a_swallowed_refusal_is_not_committed,
    ),
    does_not_judge: (
        sessions.test_the_same_token_of_another_holder_is_refused,
        sessions.test_a_connection,
    ),
    forgets_refusals: (
        sessions.test_a_swallowed_refusal_is_not_committed,
        sessions.test_a_refusal_swallowed_with_its_savepoint_is_not_committed,
        sessions.test_a_transaction_ends_under_the_guard_it_began_with,
        sessions.test_after_a_veto_in_engine_begin_nothing_is_committed,
        sessions.test_stale_in_one_database_and_swallowed_commits_in_neither,
    ),
    never_vetoes: (
        sessions.test_after_a_veto_in_engine_begin_nothing_is_committed,
        sessions.test_after_a_veto_nothing_of_the_old_transaction_is_committed_by_the_next,
        sessions.test_a_connection_s_commit_is_not_sent_when_the_lease_is_lost,
    ),
    vetoes_without_rolling_back: (
        sessions.test_after_a_veto_nothing_of_the_old_transaction_is_committed_by_the_next,
        sessions.test_a_lost_lease_at_the_commit_of_a_connection_leaves_nothing_behind,
    ),
    vetoes_one_database_at_a_time: (sessions.test_stale_in_one_database_and_swallowed_commits_in_neither,),
    trusts_the_lease: (
        sessions.test_a_lease_that_is_over_is_refused_at_once,
        sessions.test_no_statement_is_sent_when_the_lease_is_lost,
        sessions.test_a_session_s_commit_is_not_sent_when_the_lease_is_lost,
        sessions.test_a_connection_s_commit_is_not_sent_when_the_lease_is_lost,
        sessions.test_a_released_lease_is_refused,
        sessions.test_the_lease_is_checked_at_a_commit_after_the_block,
    ),
    trusts_the_lease_of_statements: (
        sessions.test_no_statement_is_sent_when_the_lease_is_lost,
        sessions.test_no_flush_is_sent_when_the_lease_is_lost,
        sessions.test_a_released_lease_is_refused,
    ),
    takes_what_was_read_before: (
        sessions.test_a_session_that_has_read_is_refused,
        sessions.test_a_session_that_has_read_inside_a_savepoint_is_refused,
        sessions.test_a_connection_that_has_read_is_refused,
        sessions.test_what_was_loaded_before_the_lease_is_read_again,
    ),
    keeps_what_was_loaded_before: (
        sessions.test_what_was_loaded_before_the_lease_is_read_again,
        sessions.test_a_fenced_session_reads_again_what_it_loaded_before_the_lease,
    ),
    ends_with_the_block: (sessions.test_the_lease_is_checked_at_a_connection_s_commit_after_the_block,),
    takes_any_lease_for_its_own: (
        sessions.test_another_lease_is_refused_and_the_first_one_stays,
        sessions.test_another_lease_is_refused_while_the_transaction_of_the_first_is_open,
        sessions.test_a_session_on_a_guarded_connection_takes_no_other_lease,
        sessions.test_a_connection_of_a_guarded_session_takes_no_other_lease,
    ),
    accepts_autocommit: (
        sessions.test_autocommit_of_a_connection_is_refused,
        sessions.test_autocommit_of_a_session_s_connection_is_refused,
        sessions.test_autocommit_that_began_before_the_guard_is_refused,
        sessions.test_autocommit_of_an_async_engine_is_refused,
    ),
    accepts_two_phases: (sessions.test_a_two_phase_transaction_of_a_guarded_connection_is_refused,),
    has_no_net: (
        sessions.test_a_listener_that_drops_the_guard_is_caught,
        sessions.test_a_write_without_a_guard_is_refused_and_says_what_to_do,
    ),
    lets_unguarded_writes_through: (
        sessions.test_a_write_without_a_guard_is_refused_and_says_what_to_do,
        sessions.test_a_connection_goes_back_to_the_pool_without_its_guard,
        sessions.test_a_plain_session_does_not_look_at_the_context,
        mappings.test_rows_are_not_joined_without_a_guard,
    ),
    tells_nobody: (
        sessions.test_an_unguarded_block_lets_writes_through_and_tells_why,
        sessions.test_a_staged_roll_out_lets_unguarded_writes_through_and_tells,
        sessions.test_text_that_writes_is_let_through_in_an_unguarded_block,
    ),
    does_not_read_text: (
        sessions.test_text_that_writes_is_let_through_in_an_unguarded_block,
        sessions.test_errors_cross_process_borders,
    ),
    does_not_read_common_table_expressions: (
        sessions.test_dml_in_a_common_table_expression_is_refused_under_a_guard,
        sessions.test_dml_in_a_common_table_expression_is_reported_without_a_guard,
    ),
    does_not_hear_of_failures: (),
    takes_every_failure_for_unknown: (),
    takes_every_failure_for_known: (),
    does_not_ask_what_rows_belong_to: (
        mappings.test_a_lease_on_another_resource_cannot_flush_a_change,
        mappings.test_a_lease_on_another_resource_cannot_flush_a_delete,
        mappings.test_a_lease_on_another_resource_cannot_flush_a_new_row,
        mappings.test_a_row_of_another_customer_is_not_flushed,
        mappings.test_a_statement_by_key_is_held_to_the_customer,
    ),
    does_not_restrict: (
        mappings.test_a_row_of_another_customer_is_not_flushed,
        mappings.test_a_batch_with_a_row_of_another_customer_is_not_flushed,
        mappings.test_a_statement_by_key_is_held_to_the_customer,
    ),
    does_not_look_where_rows_were_skipped: (mappings.test_a_statement_by_key_is_held_to_the_customer,),
    lets_rows_move: (
        mappings.test_a_row_is_not_moved_to_another_customer,
        mappings.test_the_key_of_a_row_is_not_changed_to_another_resource,
    ),
    inserts_anything: (
        mappings.test_a_lease_on_another_resource_cannot_flush_a_new_row,
        mappings.test_an_upsert_of_another_resource_is_refused,
        mappings.test_a_server_generated_key_is_refused_with_what_to_do,
    ),
    claims_no_parents: (
        mappings.test_a_stale_side_joins_nothing,
        mappings.test_a_lease_on_neither_side_joins_nothing,
        mappings.test_a_subclass_s_row_belongs_to_what_its_base_row_does,
    ),
    follows_nobody: (
        mappings.test_rows_are_not_joined_without_a_guard,
        mappings.test_a_stale_side_joins_nothing,
    ),
}

# The holes that do harm by another error than that a check was not met.
BROKEN_BY: dict[Mutation, tuple[Check, ...]] = {
    admits_only_newer_tokens: (sessions.test_the_same_lease_again_does_nothing,),
    ends_with_the_block: (
        sessions.test_statements_after_the_block_are_guarded_until_the_commit,
        sessions.test_a_transaction_ends_under_the_lease_of_the_context_it_began_in,
    ),
    does_not_hear_of_failures: (sessions.test_a_lost_answer_to_a_commit_is_an_unknown_outcome,),
    takes_every_failure_for_known: (sessions.test_a_lost_answer_to_a_commit_is_an_unknown_outcome,),
    takes_every_failure_for_unknown: (sessions.test_a_commit_that_the_server_refused_is_known,),
}

HOLES = [*CONVICTED_BY]
TRIALS = [
    (hole, check) for table in (CONVICTED_BY, BROKEN_BY) for hole, checks in table.items() for check in checks
]
NAMES = {value: name for name, value in vars().items() if inspect.isfunction(value)}


# What the tests are given


@pytest.fixture(scope="module")
def own_url(postgres_url: str) -> Iterator[str]:
    with own_database(postgres_url) as url:
        yield url


@pytest.fixture
def db(request: pytest.FixtureRequest) -> Iterator[Db]:
    yield from sessions.opened(request, "sqlite")


@pytest.fixture
def lite(db: Db) -> Db:
    return db


@pytest.fixture
def pg(request: pytest.FixtureRequest) -> Iterator[Db]:
    yield from sessions.opened(request, "postgresql")


@pytest.fixture
def leases() -> FakeLeases:
    return FakeLeases()


@pytest.fixture
def silent(leases: FakeLeases) -> Any:
    return leases.leases.acquire("invoice:1", ttl=30)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Db, Db]]:
    pair = Db(f"sqlite:///{tmp_path}/invoices.db"), Db(f"sqlite:///{tmp_path}/parcels.db")
    yield pair
    for each in pair:
        each.close()


@pytest.fixture
def line(proxy: Any, pg: Db) -> Any:
    return sessions.line_to(proxy, pg)


@pytest.fixture
def deferred(pg: Db) -> sa.Table:
    return sessions.deferred_table(pg)


@pytest.fixture
def filled(request: pytest.FixtureRequest) -> Iterator[mappings.Place]:
    for place in mappings.opened(request, "sqlite"):
        yield mappings.fill(place)


def given(check: Check, request: pytest.FixtureRequest) -> dict[str, Any]:
    return {name: request.getfixturevalue(name) for name in inspect.signature(check).parameters}


def named(value: Any) -> str:
    return NAMES.get(value, getattr(value, "__name__", "")).removeprefix("test_")


@pytest.mark.parametrize(("hole", "check"), TRIALS, ids=named)
def test_a_guard_with_a_hole_is_convicted(
    hole: Mutation, check: Check, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = given(check, request)
    only = Exception if check in BROKEN_BY.get(hole, ()) else ()
    hole(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, *([only] if only else []))):
        check(**arguments)


@pytest.mark.parametrize("check", dict.fromkeys(check for _, check in TRIALS), ids=named)
def test_the_guard_as_it_is_is_acquitted(check: Check, request: pytest.FixtureRequest) -> None:
    check(**given(check, request))


def test_every_hole_is_put_on_trial() -> None:
    assert {hole for hole, _ in TRIALS} == set(HOLES)
