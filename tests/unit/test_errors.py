"""The error tree: as drawn, and able to cross process borders."""

import copy
import inspect
import pickle
import re

import pytest

import fencing
from fencing import errors
from fencing.errors import ConfigurationError, FencingError, LeaseUnavailable
from fencing.token import HeldBy

EXPORTED = [
    thing
    for name in fencing.__all__
    if isinstance(thing := getattr(fencing, name), type) and issubclass(thing, Exception)
]
DEFINED = [
    thing
    for thing in vars(errors).values()
    if isinstance(thing, type) and issubclass(thing, FencingError) and thing.__module__ == errors.__name__
]
HELD_BY = HeldBy("invoice:42", "f" * 32, 7, "host:1", 1_800_000_000.0, 12.5)


def example(kind: type[FencingError]) -> FencingError:
    """An error of this kind with something to lose in every attribute."""
    names = [
        parameter.name
        for parameter in inspect.signature(kind.__init__).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    values = {name: HELD_BY if name == "held_by" else f"a value for {name}" for name in names}
    return kind("what happened", **values)


def drawn() -> dict[str, tuple[str | None, list[str]]]:
    """The tree in the docstring: each error's parent, and the attributes named beside it."""
    tree: dict[str, tuple[str | None, list[str]]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r"( {4}[ │├└─]*)([A-Z]\w+)(?=\s|$)(.*)", line)
        if match:
            indent, name, rest = match.groups()
            depth = len(indent) // 4 - 1
            del path[depth:]
            tree[name] = (path[-1] if path else None, re.findall(r"(?<=\s)\.(\w+)", rest))
            path.append(name)
    return tree


def test_there_are_errors_to_look_at() -> None:
    assert len(EXPORTED) >= 11
    assert set(EXPORTED) <= set(DEFINED)


@pytest.mark.parametrize(
    "travel", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"]
)
@pytest.mark.parametrize("kind", DEFINED, ids=lambda kind: kind.__name__)
def test_every_error_travels_with_type_message_and_attributes(kind: type[FencingError], travel) -> None:
    error = example(kind)
    error.add_note("seen in the night shift")
    arrived = travel(error)
    if isinstance(arrived, bytes):
        arrived = pickle.loads(arrived)
    assert arrived is not error
    assert type(arrived) is kind
    assert str(arrived) == "what happened"
    assert arrived.args == error.args
    assert vars(arrived) == vars(error)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_carries_an_error(protocol: int) -> None:
    error = LeaseUnavailable("busy", resource="invoice:42", held_by=HELD_BY, retry_after=12.5)
    arrived = pickle.loads(pickle.dumps(error, protocol))
    assert (arrived.resource, arrived.held_by, arrived.retry_after) == ("invoice:42", HELD_BY, 12.5)
    assert isinstance(arrived.held_by, HeldBy)


def test_the_way_an_error_travels_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without our `__reduce__` an error with keyword-only attributes does not arrive at all."""
    monkeypatch.delattr(FencingError, "__reduce__")
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(example(LeaseUnavailable)))


def test_the_tree_is_the_one_in_the_docstring() -> None:
    real = {kind.__name__: kind.__bases__[0].__name__ for kind in DEFINED if kind is not FencingError}
    assert {name: parent for name, (parent, _) in drawn().items() if parent} == real
    assert drawn()["FencingError"] == (None, [])


@pytest.mark.parametrize("kind", DEFINED, ids=lambda kind: kind.__name__)
def test_every_error_has_the_attributes_drawn_beside_it_and_its_parents(kind: type[FencingError]) -> None:
    tree = drawn()
    name: str | None = kind.__name__
    while name is not None:
        name, attributes = tree[name]
        assert [missing for missing in attributes if not hasattr(example(kind), missing)] == []


def test_every_error_is_a_fencing_error_and_only_the_configuration_error_is_a_value_error() -> None:
    assert all(issubclass(kind, FencingError) for kind in EXPORTED)
    assert [kind for kind in DEFINED if issubclass(kind, ValueError)] == [ConfigurationError]


def test_contention_and_failure_are_not_mistaken_for_each_other() -> None:
    """`except LeaseError` must not swallow a backend that is down, and the other way round."""
    assert not issubclass(errors.BackendUnavailable, errors.LeaseError)
    assert not issubclass(errors.LeaseUnavailable, errors.BackendUnavailable)
    assert not issubclass(errors.WriteRejected, errors.LeaseError)


def test_a_backend_error_says_that_it_may_have_been_sent_unless_it_knows_better() -> None:
    assert errors.BackendUnavailable("no answer").sent is True
    assert errors.BackendUnavailable("no route", sent=False).sent is False
