"""Tokens, holders and grants: the one rule, and what may be in them."""

import copy
import dataclasses
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencing.errors import ConfigurationError
from fencing.token import (
    MAX_LABEL_BYTES,
    MAX_RESOURCE_BYTES,
    MAX_TOKEN,
    Grant,
    admits,
    check_holder,
    check_label,
    check_namespace,
    check_resource,
    check_token,
    new_holder,
)

ME, OTHER = "a" * 32, "b" * 32

Rule = Callable[[int, str, int, str | None], bool]

# token, holder, stored token, stored holder: admitted?
TABLE = [
    (5, ME, 4, OTHER, True),
    (5, ME, 4, ME, True),
    (5, ME, 4, None, True),
    (5, ME, 5, ME, True),
    (5, ME, 5, OTHER, False),
    (5, ME, 5, None, False),
    (5, ME, 6, OTHER, False),
    (5, ME, 6, ME, False),
    (5, ME, 6, None, False),
    (1, ME, 0, "", True),
    (MAX_TOKEN, ME, MAX_TOKEN - 1, OTHER, True),
    (MAX_TOKEN - 1, ME, MAX_TOKEN, OTHER, False),
    (MAX_TOKEN, ME, MAX_TOKEN, OTHER, False),
]

MUTANTS: dict[str, Rule] = {
    "only >": lambda token, holder, stored, stored_holder: token > stored,
    "only >=": lambda token, holder, stored, stored_holder: token >= stored,
    "only =": lambda token, holder, stored, stored_holder: token == stored and holder == stored_holder,
    "the holder alone": lambda token, holder, stored, stored_holder: holder == stored_holder,
    "or the same holder": lambda token, holder, stored, stored_holder: (
        token > stored or holder == stored_holder
    ),
    "nobody stored": lambda token, holder, stored, stored_holder: (
        token > stored or (token == stored and stored_holder in (None, holder))
    ),
    "never": lambda *_: False,
    "always": lambda *_: True,
    "as floats of 24 bits": lambda token, holder, stored, stored_holder: (
        token >> 29 > stored >> 29 or (token == stored and holder == stored_holder)
    ),
}


def convicts(rule: Rule) -> bool:
    return any(rule(*row) is not admitted for *row, admitted in TABLE)


@pytest.mark.parametrize(("token", "holder", "stored_token", "stored_holder", "admitted"), TABLE)
def test_a_write_is_admitted_as_the_table_says(
    token: int, holder: str, stored_token: int, stored_holder: str | None, admitted: bool
) -> None:
    assert admits(token, holder, stored_token, stored_holder) is admitted


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_table_convicts_a_wrong_rule(mutant: Rule) -> None:
    assert convicts(mutant)
    assert not convicts(admits)


@given(st.integers(1, MAX_TOKEN), st.integers(1, MAX_TOKEN), st.sampled_from([ME, OTHER]))
@settings(deadline=None, derandomize=True, database=None)
def test_of_two_holders_at_most_one_is_admitted_over_the_other(mine: int, theirs: int, holder: str) -> None:
    stranger = OTHER if holder == ME else ME
    assert not (admits(mine, holder, theirs, stranger) and admits(theirs, stranger, mine, holder))
    assert admits(mine, holder, mine, holder)


def utf8_length(text: str) -> int | None:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


# Long ones on purpose: small alphabets of one to four bytes around the limits, and lone surrogates.
texts = st.one_of(
    st.text(max_size=300),
    st.builds(
        lambda char, count, tail: char * count + tail,
        st.sampled_from(["a", "é", "€", "😀"]),
        st.integers(0, 1100),
        st.text(max_size=4),
    ),
    st.text(st.characters(), max_size=20).map(lambda text: text + "\ud800"),
)


@given(texts)
@settings(deadline=None, derandomize=True, database=None, max_examples=300)
def test_a_resource_is_any_text_of_1_to_1024_bytes(text: str) -> None:
    length = utf8_length(text)
    if length is not None and 1 <= length <= MAX_RESOURCE_BYTES:
        assert check_resource(text) is text
    else:
        with pytest.raises(ConfigurationError):
            check_resource(text)


@given(texts)
@settings(deadline=None, derandomize=True, database=None, max_examples=300)
def test_a_label_is_any_text_of_up_to_200_bytes(text: str) -> None:
    length = utf8_length(text)
    if length is not None and length <= MAX_LABEL_BYTES:
        assert check_label(text) is text
    else:
        with pytest.raises(ConfigurationError):
            check_label(text)


@pytest.mark.parametrize("check", [check_resource, check_label])
@pytest.mark.parametrize("char", ["a", "é", "€", "😀"])
def test_the_limit_counts_bytes_and_is_exact(check: Callable[[object], str], char: str) -> None:
    limit = MAX_RESOURCE_BYTES if check is check_resource else MAX_LABEL_BYTES
    longest = char * (limit // len(char.encode()))
    assert check(longest) == longest
    with pytest.raises(ConfigurationError):
        check(longest + char)


@pytest.mark.parametrize("resource", ["", None, 42, b"bytes", ["a"], "\ud800", "a" * 1025, "\udfff:1"])
def test_what_is_no_resource_is_refused(resource: object) -> None:
    with pytest.raises(ConfigurationError):
        check_resource(resource)


@pytest.mark.parametrize("label", [None, 42, b"bytes", "\udc80", "a" * 201])
def test_what_is_no_label_is_refused(label: object) -> None:
    with pytest.raises(ConfigurationError):
        check_label(label)


@given(st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True))
@settings(deadline=None, derandomize=True, database=None)
def test_a_namespace_is_a_word(namespace: str) -> None:
    assert check_namespace(namespace) == namespace


@pytest.mark.parametrize(
    "namespace", ["", "a" * 65, "a b", "a/b", "a{b}", "a:b", "é", "a\n", "\n", "\u0663", None, 7, b"a"]
)
def test_what_is_no_namespace_is_refused(namespace: object) -> None:
    """A brace or a slash would break out of the hash tag of the keys in Redis."""
    with pytest.raises(ConfigurationError):
        check_namespace(namespace)


@pytest.mark.parametrize("holder", ["", "a" * 31, "a" * 33, "A" * 32, "g" * 32, "a" * 32 + "\n", None, 7])
def test_what_is_no_holder_is_refused(holder: object) -> None:
    with pytest.raises(ConfigurationError):
        check_holder(holder)


def test_a_fresh_holder_is_valid_and_never_the_same() -> None:
    holders = {check_holder(new_holder()) for _ in range(1000)}
    assert len(holders) == 1000


@pytest.mark.parametrize("token", [1, 2, MAX_TOKEN - 1, MAX_TOKEN])
def test_a_token_is_a_whole_number_that_a_double_holds(token: int) -> None:
    assert check_token(token) == token
    assert int(float(token)) == token


@pytest.mark.parametrize("token", [0, -1, MAX_TOKEN + 1, 2**63, True, 1.0, "1", None])
def test_what_is_no_token_is_refused(token: object) -> None:
    with pytest.raises(ConfigurationError):
        check_token(token)


GRANT = Grant("billing", ("invoice:42", "invoice:43"), ME, 7, 1030.5, "host:1")


def test_a_grant_travels() -> None:
    for arrived in (pickle.loads(pickle.dumps(GRANT)), copy.copy(GRANT), copy.deepcopy(GRANT)):
        assert arrived == GRANT
        assert hash(arrived) == hash(GRANT)
        assert type(arrived) is Grant


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Grant)])
def test_a_grant_cannot_be_changed(field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(GRANT, field, getattr(GRANT, field))


def test_a_grant_has_no_room_for_more() -> None:
    with pytest.raises((AttributeError, TypeError)):
        GRANT.connection = object()  # type: ignore[attr-defined]


def test_a_grant_is_about_its_first_resource() -> None:
    assert GRANT.resource == "invoice:42"


@pytest.mark.parametrize(
    "wrong",
    [
        {"namespace": "a b"},
        {"namespace": ""},
        {"resources": ()},
        {"resources": ("",)},
        {"resources": ("a", "\ud800")},
        {"resources": ("a", "b" * 1025)},
        {"holder": "me"},
        {"token": 0},
        {"token": 2**53},
        {"token": True},
    ],
    ids=str,
)
def test_a_grant_checks_what_it_is_made_of(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        dataclasses.replace(GRANT, **wrong)


@pytest.mark.parametrize("resources", ["abc", ["a"]])
def test_a_grant_takes_a_tuple_of_resources_only(resources: object) -> None:
    with pytest.raises(ConfigurationError):
        dataclasses.replace(GRANT, resources=resources)
