"""Each comparison in the Lua scripts carries weight: take it out, and the contract convicts the backend."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from contract import test_exclusive, test_monotonic, test_ownership, test_replay
from contract.subjects import one_redis
from contract.test_the_suite_convicts import Check

from fencing.backends import wire
from fencing.errors import FencingError


class Mutation(NamedTuple):
    script: str
    original: str
    broken: str
    convicted_by: Check


MUTATIONS = {
    "release deletes whoever's lease it finds": Mutation(
        "release",
        "sub(value, 3, 34) == ARGV[1]",
        "true",
        test_ownership.test_release_by_another_holder_is_refused_and_changes_nothing,
    ),
    "renew prolongs whoever's lease it finds": Mutation(
        "renew",
        "not value or sub(value, 3, 34) ~= ARGV[1]",
        "not value",
        test_ownership.test_renewal_by_another_holder_is_refused_and_changes_nothing,
    ),
    "an unconditional heal": Mutation(
        "remint",
        "not value or sub(value, 3, 34) ~= ARGV[1]",
        "not value",
        test_ownership.test_who_was_taken_over_cannot_remint_its_way_over_the_live_holder,
    ),
    "acquire takes over the living": Mutation(
        "acquire",
        "sub(value, 3, 34) ~= holder",
        "false",
        test_exclusive.test_busy_names_holder_token_and_label,
    ),
    "a replay mints anew": Mutation(
        "acquire",
        "if mine == last - 2 then",
        "if false then",
        test_replay.test_an_acquire_sent_again_returns_the_same_token,
    ),
    "the counter is not lifted to the clock": Mutation(
        "acquire",
        "if token < least then",
        "if false then",
        test_monotonic.test_tokens_grow_after_all_data_were_lost,
    ),
    "the floor is ignored": Mutation(
        "acquire",
        "if floor >= least then least = floor + 1 end",
        "",
        test_monotonic.test_a_token_exceeds_a_floor_above_the_clock_by_exactly_one,
    ),
    "poison is minted": Mutation(
        "acquire",
        "floor > now + 31536000000000",
        "false",
        test_monotonic.test_a_floor_of_more_than_a_year_above_the_clock_is_poisoned,
    ),
    "numbers leave as Lua prints them": Mutation(
        "acquire",
        "token = token == now and at or string.format('%016.0f', token)",
        "token = tostring(token)",
        test_monotonic.test_tokens_grow_over_acquisitions_of_one_resource,
    ),
    "the counter is written as Lua prints it": Mutation(
        "acquire",
        "call('SET', counter, string.format('%.0f', token))",
        "call('SET', counter, tostring(token))",
        test_monotonic.test_tokens_grow_over_acquisitions_of_one_resource,
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_contract_convicts_a_script_without_its_comparison(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation = MUTATIONS[name]
    text = wire.script_text(mutation.script)
    assert mutation.original in text, "the mutation is of a line that is there"
    with one_redis(request) as subject:
        mutation.convicted_by(subject)
    broken = wire.script(text.replace(mutation.original, mutation.broken))
    monkeypatch.setitem(wire.SCRIPTS, mutation.script, broken)
    with one_redis(request) as subject, pytest.raises((AssertionError, FencingError)):
        mutation.convicted_by(subject)
