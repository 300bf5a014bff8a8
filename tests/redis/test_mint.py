"""Minting in Lua, where numbers are floats: exact up to the last token there can be, at any clock."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

import pytest
import redis
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fencing.token import MAX_TOKEN

NOW = 1_795_008_453_170_711
YEAR = 365 * 86_400 * 1_000_000


class Mint:
    """The function of `_mint.lua` on a real server, with a clock of the test's own."""

    def __init__(self, client: redis.Redis) -> None:
        folder = resources.files("fencing.backends").joinpath("lua")
        parts = [folder.joinpath(f"{name}.lua").read_text() for name in ("_layout", "_mint")]
        parts.append(
            "local token = mint(KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]))\n"
            "return {token and string.format('%.0f', token) or false, call('GET', KEYS[1])}"
        )
        self._client = client
        self._script = client.register_script("".join(parts))

    def __call__(self, counter: int | None, floor: int, now: int) -> tuple[int | None, int | None]:
        """The token, if there is one, and the counter afterwards."""
        if counter is None:
            self._client.delete("counter")
        else:
            self._client.set("counter", counter)
        token, after = self._script(keys=["counter"], args=[floor, now])
        return token and int(token), after and int(after)


@pytest.fixture
def mint(admin: redis.Redis) -> Iterator[Mint]:
    yield Mint(admin)
    admin.delete("counter")


def test_an_empty_counter_is_lifted_to_the_clock(mint: Mint) -> None:
    assert mint(None, 0, NOW) == (NOW, NOW)


def test_a_counter_behind_the_clock_is_lifted_to_it(mint: Mint) -> None:
    assert mint(NOW - YEAR, 0, NOW) == (NOW, NOW)
    assert mint(NOW - 2, 0, NOW) == (NOW, NOW)


def test_a_counter_at_the_clock_or_above_it_counts_on(mint: Mint) -> None:
    assert mint(NOW - 1, 0, NOW) == (NOW, NOW)
    assert mint(NOW, 0, NOW) == (NOW + 1, NOW + 1)
    assert mint(NOW + YEAR, 0, NOW) == (NOW + YEAR + 1, NOW + YEAR + 1)


@pytest.mark.parametrize("floor", [NOW - 1, NOW, NOW + 1, NOW + YEAR])
def test_a_token_is_above_the_floor(mint: Mint, floor: int) -> None:
    token = max(NOW, floor + 1)

    assert mint(None, floor, NOW) == (token, token)
    assert mint(floor, floor, NOW) == (token, token)
    assert mint(floor - 1, floor, NOW) == (token, token)


def test_a_floor_above_a_year_mints_nothing_and_counts_nothing(mint: Mint) -> None:
    assert mint(NOW, NOW + YEAR + 1, NOW) == (None, NOW)
    assert mint(None, NOW + YEAR + 1, NOW) == (None, None)


def test_the_last_token_is_minted_and_none_after_it(mint: Mint) -> None:
    token, _ = mint(MAX_TOKEN - 1, 0, NOW)
    assert token == MAX_TOKEN

    token, _ = mint(MAX_TOKEN, 0, NOW)
    assert token is None


def test_a_clock_at_the_end_of_the_range_mints_nothing(mint: Mint) -> None:
    assert mint(NOW, 0, MAX_TOKEN) == (None, NOW)


near = st.integers(-3, 3)
points = st.sampled_from([0, NOW, NOW + YEAR, MAX_TOKEN, 10**15, 2**52])
numbers = st.builds(lambda point, offset: max(point + offset, 0), points, near) | st.integers(
    0, MAX_TOKEN + 9
)


@settings(deadline=None, derandomize=True, database=None, max_examples=300)
@given(counter=st.none() | numbers, floor=numbers, now=st.just(NOW) | st.integers(1, MAX_TOKEN - 1))
@example(counter=None, floor=MAX_TOKEN, now=MAX_TOKEN - 1)
@example(counter=2**62, floor=0, now=NOW)
def test_whatever_the_numbers_the_token_is_the_least_that_is_allowed(
    running_server, counter: int | None, floor: int, now: int
) -> None:
    with redis.Redis.from_url(running_server.url) as client:
        token, after = Mint(client)(counter, floor, now)

    least = max((counter or 0) + 1, now, floor + 1)
    if floor > now + YEAR:
        assert (token, after) == (None, counter)
    elif least > MAX_TOKEN:
        assert token is None
    else:
        assert token == after == least
