"""The package as a whole: what it exports, what it loads, and that the twins are twins."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fencing
from fencing import AsyncLease, AsyncLeases, Lease, Leases, events, sql, testing
from fencing.backends.base import AsyncBackend, AsyncLedgerProtocol, Backend, LedgerProtocol
from fencing.events import EVENTS, Event
from fencing.sql import AsyncGuardedRepository, GuardedRepository
from fencing.testing import AsyncMemoryBackend, AsyncMemoryLedger, MemoryBackend, MemoryLedger

PACKAGE = Path(fencing.__file__).parent
HEAVY = ["alembic", "hiredis", "prometheus_client", "psycopg", "redis", "rich", "sqlalchemy", "typer"]


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    return answer.stdout.strip()


# What it loads


def loaded_by(statement: str) -> list[str]:
    return ast.literal_eval(
        fresh(f"{statement}\nimport sys\nprint([n for n in {HEAVY} if n in sys.modules])")
    )


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import fencing") == []


def test_importing_what_users_need_in_their_tests_loads_nothing_heavy() -> None:
    assert loaded_by("import fencing.testing") == []


def test_the_check_of_what_is_loaded_can_fail() -> None:
    assert "redis" in loaded_by("import fencing.backends.redis")


def test_importing_the_package_only_defines_things() -> None:
    code = (
        "import logging, threading, fencing, fencing.testing\n"
        "print(logging.root.handlers, logging.getLogger('fencing').handlers, threading.active_count())"
    )
    assert fresh(code) == "[] [] 1"


# What it exports


def test_what_is_exported_is_this() -> None:
    assert fencing.__all__ == [
        "AsyncLease",
        "AsyncLeases",
        "BackendUnavailable",
        "ClaimLost",
        "ConfigurationError",
        "FencingError",
        "Grant",
        "HeldBy",
        "Lease",
        "LeaseError",
        "LeaseLost",
        "LeaseNotHeld",
        "LeaseUnavailable",
        "Leases",
        "LoggingObserver",
        "OutcomeUnknown",
        "Policy",
        "Renewal",
        "RowMissing",
        "StaleToken",
        "TokenRegression",
        "UnguardedWrite",
        "UnverifiableWrite",
        "Wait",
        "WriteRejected",
        "WrongResource",
    ]
    assert [name for name in fencing.__all__ if not hasattr(fencing, name)] == []


def test_what_the_sql_half_exports_is_this() -> None:
    assert sql.__all__ == [
        "AsyncGuardedRepository",
        "Fenced",
        "FencedSession",
        "GuardedRepository",
        "Holding",
        "Written",
        "fence",
        "fence_columns",
        "guarded",
        "install",
        "unguarded",
        "using",
    ]
    assert [name for name in sql.__all__ if not hasattr(sql, name)] == []


def test_what_users_import_in_their_tests_is_this() -> None:
    assert testing.__all__ == [
        "AsyncMemoryBackend",
        "AsyncMemoryLedger",
        "FakeClock",
        "MemoryBackend",
        "MemoryLedger",
        "supersede",
        "supersede_async",
    ]
    assert [name for name in testing.__all__ if not hasattr(testing, name)] == []


def test_the_types_and_the_scripts_are_shipped() -> None:
    settings = (PACKAGE.parent / "pyproject.toml").read_text()
    assert 'fencing = ["py.typed", "backends/lua/*.lua"]' in settings
    assert (PACKAGE / "py.typed").is_file()
    assert len(list((PACKAGE / "backends" / "lua").glob("*.lua"))) >= 6


# Events


def test_the_names_of_events_are_stable() -> None:
    """They stand in dashboards and log queries: add to this list, change nothing in it."""
    assert [event.name for event in EVENTS] == [
        "lease.acquired",
        "lease.orphan_found",
        "lease.unavailable",
        "lease.renewed",
        "lease.renewal_failed",
        "lease.renewal_stopped",
        "lease.abandoned",
        "lease.lost",
        "lease.released",
        "lease.release_failed",
        "lease.left_to_expire",
        "lease.not_held",
        "lease.given_back",
        "token.regressed",
        "backend.failed",
        "policy.switched",
        "callback.failed",
        "write.admitted",
        "write.rejected",
        "commit.unknown",
        "write.unguarded",
    ]
    assert len({event.name for event in EVENTS}) == len(EVENTS)


def test_every_event_is_listed() -> None:
    named = [
        thing
        for thing in vars(events).values()
        if isinstance(thing, type)
        and issubclass(thing, Event)
        and "name" in vars(thing)
        and thing is not Event
    ]
    assert set(EVENTS) == set(named)


# Quiet: nothing prints, nothing configures logging


def noise(source: str) -> list[str]:
    """Calls that have no place in a library."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {
                "print",
                "breakpoint",
                "logging.basicConfig",
                "sys.stdout.write",
                "sys.stderr.write",
            }:
                found.append(called)
    return found


MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
SPEAKING = {"cli", "demo", "__main__"}  # what people start from a terminal


def speaks(path: Path) -> bool:
    return bool(SPEAKING & {path.stem, *(part.name for part in path.relative_to(PACKAGE).parents)})


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if not speaks(path)],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_a_module_prints_nothing(path: Path) -> None:
    assert noise(path.read_text()) == []


def test_the_check_of_printing_can_fail() -> None:
    assert noise("def f():\n    print('hello')\n    logging.basicConfig()") == [
        "print",
        "logging.basicConfig",
    ]
    assert noise('"""print(this)"""') == []
    assert not speaks(PACKAGE / "lease.py")


# Twins

RENAMED = {"close": "aclose"}
TWINS: list[tuple[type[Any], type[Any], dict[str, str]]] = [
    (Leases, AsyncLeases, RENAMED),
    (Lease, AsyncLease, {}),
    (Backend, AsyncBackend, {}),
    (LedgerProtocol, AsyncLedgerProtocol, {}),
    (MemoryLedger, AsyncMemoryLedger, {}),
    (GuardedRepository, AsyncGuardedRepository, {}),
]


def public(kind: type[Any]) -> dict[str, object]:
    return {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}


def first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def parameters(thing: Callable[..., object]) -> list[tuple[str, object, object]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(thing).parameters.values()]


def differences(sync: type[Any], asynchronous: type[Any], renamed: dict[str, str]) -> list[str]:
    """In what the twins are not alike."""
    found = []
    ours, theirs = public(sync), public(asynchronous)
    if {renamed.get(name, name) for name in ours} != set(theirs):
        found.append("the names")
    for name, member in ours.items():
        twin = theirs.get(renamed.get(name, name))
        if twin is None:
            continue
        if first_line(member) != first_line(twin):
            found.append(f"{name}: the first line of the docstring")
        if callable(member) != callable(twin):
            found.append(f"{name}: one is called, the other is not")
        elif callable(member) and parameters(member) != parameters(twin):  # type: ignore[arg-type]
            found.append(f"{name}: the parameters")
    if parameters(sync.__init__)[2:] != parameters(asynchronous.__init__)[2:]:
        found.append("the parameters of the class")
    return found


@pytest.mark.parametrize(("sync", "asynchronous", "renamed"), TWINS, ids=str)
def test_twins_are_alike(sync: type[Any], asynchronous: type[Any], renamed: dict[str, str]) -> None:
    assert differences(sync, asynchronous, renamed) == []


def test_twins_have_the_same_ways_in_and_out() -> None:
    for sync, asynchronous in ((Leases, AsyncLeases), (Lease, AsyncLease)):
        for ours, theirs in (("__enter__", "__aenter__"), ("__exit__", "__aexit__")):
            assert hasattr(sync, ours)
            assert parameters(getattr(sync, ours)) == parameters(getattr(asynchronous, theirs))
            assert inspect.iscoroutinefunction(getattr(asynchronous, theirs))


def test_what_waits_is_a_coroutine_under_asyncio_and_not_elsewhere() -> None:
    for name in ("release", "renew", "extend"):
        assert inspect.iscoroutinefunction(getattr(AsyncLease, name))
        assert not inspect.iscoroutinefunction(getattr(Lease, name))
    for name in ("check", "_as_held_by"):
        assert not inspect.iscoroutinefunction(getattr(AsyncLease, name))


def test_what_plays_trouble_is_on_the_memory_backend_underneath() -> None:
    """`AsyncMemoryBackend.sync` is the documented way to it, so it has no verbs of its own."""
    assert set(public(AsyncMemoryBackend)) <= set(public(MemoryBackend))


def test_the_check_of_the_twins_can_fail() -> None:
    class One:
        def go(self, *, far: float = 1.0) -> None:
            """Go."""

        def stay(self) -> None:
            """Stay."""

        def rest(self) -> None: ...

    class Other:
        def go(self, *, far: float = 2.0) -> None:
            """Go."""

        def stay(self) -> None:
            """Remain."""

    assert differences(One, Other, {}) == [
        "the names",
        "go: the parameters",
        "stay: the first line of the docstring",
    ]
    assert differences(One, One, {}) == []


def test_every_name_a_user_calls_says_what_it_gives() -> None:
    """Docstrings are promises: each method of the four classes has one, if only by inheritance."""
    told = {
        f"{kind.__name__}.{name}"
        for kind in (Leases, AsyncLeases, Lease, AsyncLease)
        for name in ("acquire", "try_acquire", "acquire_all", "peek", "holding", "release", "renew", "extend")
        if hasattr(kind, name) and not first_line(getattr(kind, name))
    }
    assert told == set()
