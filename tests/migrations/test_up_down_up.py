"""The Alembic environment in migrations/: up, down, up, on SQLite and on PostgreSQL."""

import io
import sqlite3
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError

ALEMBIC_INI = Path(__file__).parents[2] / "migrations" / "alembic.ini"

invoice = sa.table(
    "invoice",
    sa.column("id", sa.BigInteger),
    sa.column("state", sa.String),
    sa.column("amount_cents", sa.BigInteger),
    sa.column("paid_by", sa.String),
    sa.column("fence_token", sa.BigInteger),
    sa.column("fence_holder", sa.Uuid),
)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'demo.db'}"
    return str(request.getfixturevalue("database_url"))


def config(url: str | None, output: io.StringIO | None = None) -> Config:
    """What `alembic -c migrations/alembic.ini -x url=...` builds."""
    return Config(
        str(ALEMBIC_INI), cmd_opts=Namespace(x=[f"url={url}"] if url else None), output_buffer=output
    )


@contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        yield connection


def columns(url: str) -> dict[str, tuple[str, bool, str | None]]:
    """Each column of invoice: type, nullable, default, in the words of the database itself."""
    with connected(url) as connection:
        inspector = sa.inspect(connection)
        if not inspector.has_table("invoice"):
            return {}
        return {
            column["name"]: (
                column["type"].compile(connection.dialect),
                column["nullable"],
                column["default"],
            )
            for column in inspector.get_columns("invoice")
        }


def fence_columns(url: str) -> dict[str, tuple[str, bool, str | None]]:
    if url.startswith("sqlite"):
        zero_holder = ("CHAR(32)", False, "'00000000000000000000000000000000'")
    else:
        zero_holder = ("UUID", False, "'00000000-0000-0000-0000-000000000000'::uuid")
    return {"fence_token": ("BIGINT", False, "0"), "fence_holder": zero_holder}


def test_the_schema_goes_up_down_and_up_again(url: str) -> None:
    command.upgrade(config(url), "head")
    first = columns(url)
    command.downgrade(config(url), "base")
    assert columns(url) == {}
    command.upgrade(config(url), "head")
    assert columns(url) == first

    assert list(first) == ["id", "state", "amount_cents", "paid_by", "fence_token", "fence_holder"]
    assert first["state"] == ("VARCHAR(16)", False, None)
    assert first["amount_cents"] == ("BIGINT", False, None)
    assert first["paid_by"] == ("VARCHAR(255)", True, None)


def test_the_fence_comes_and_goes_alone(url: str) -> None:
    command.upgrade(config(url), "0001")
    without_fence = columns(url)
    command.upgrade(config(url), "0002")
    assert columns(url) == without_fence | fence_columns(url)
    command.downgrade(config(url), "0001")
    assert columns(url) == without_fence
    command.upgrade(config(url), "0002")
    assert columns(url) == without_fence | fence_columns(url)


def test_the_fence_columns_are_not_indexed(url: str) -> None:
    command.upgrade(config(url), "head")
    with connected(url) as connection:
        assert sa.inspect(connection).get_indexes("invoice") == []
        assert sa.inspect(connection).get_pk_constraint("invoice")["constrained_columns"] == ["id"]


def test_a_row_from_before_the_fence_gets_token_zero_and_the_zero_holder(url: str) -> None:
    command.upgrade(config(url), "0001")
    with connected(url) as connection:
        connection.execute(sa.insert(invoice).values(state="open", amount_cents=4200))
    command.upgrade(config(url), "head")

    unclaimed = sa.select(invoice).where(invoice.c.fence_token == 0, invoice.c.fence_holder == UUID(int=0))
    with connected(url) as connection:
        assert connection.execute(unclaimed).all() == [(1, "open", 4200, None, 0, UUID(int=0))]


def test_code_that_knows_no_fence_keeps_inserting(url: str) -> None:
    command.upgrade(config(url), "head")
    with connected(url) as connection:
        connection.execute(sa.insert(invoice).values(state="open", amount_cents=4200))
        fence = connection.execute(sa.select(invoice.c.fence_token, invoice.c.fence_holder)).one()
    assert fence == (0, UUID(int=0))


def test_a_row_keeps_its_work_when_the_fence_is_dropped(url: str) -> None:
    command.upgrade(config(url), "head")
    with connected(url) as connection:
        connection.execute(
            sa.insert(invoice).values(
                state="paid", amount_cents=4200, paid_by="worker-1", fence_token=34, fence_holder=UUID(int=7)
            )
        )
    command.downgrade(config(url), "0001")
    command.upgrade(config(url), "head")
    with connected(url) as connection:
        assert connection.execute(sa.select(invoice)).all() == [
            (1, "paid", 4200, "worker-1", 0, UUID(int=0)),
        ]


def test_a_revision_that_fails_half_way_leaves_no_trace(url: str) -> None:
    command.upgrade(config(url), "0001")
    with connected(url) as connection:
        # The second of the two columns of 0002 is in the way.
        connection.execute(sa.text("ALTER TABLE invoice ADD COLUMN fence_holder INTEGER"))
    before = columns(url)
    with pytest.raises(sa.exc.DBAPIError, match="fence_holder"):
        command.upgrade(config(url), "head")
    assert columns(url) == before

    with connected(url) as connection:
        connection.execute(sa.text("ALTER TABLE invoice DROP COLUMN fence_holder"))
    command.upgrade(config(url), "head")
    assert fence_columns(url).items() <= columns(url).items()


def test_adding_the_fence_does_not_rewrite_the_table(database_url: str) -> None:
    command.upgrade(config(database_url), "0001")
    with connected(database_url) as connection:
        connection.execute(sa.insert(invoice).values(state="open", amount_cents=4200))
        file_before = connection.scalar(sa.select(sa.func.pg_relation_filenode("invoice")))
    command.upgrade(config(database_url), "head")
    with connected(database_url) as connection:
        assert connection.scalar(sa.select(sa.func.pg_relation_filenode("invoice"))) == file_before


@pytest.mark.parametrize(
    ("start", "move", "target"), [("0001", command.upgrade, "0002"), ("0002", command.downgrade, "0001")]
)
def test_a_long_reader_makes_the_migration_give_up_instead_of_queueing(
    database_url: str, start: str, move: Callable[[Config, str], None], target: str
) -> None:
    command.upgrade(config(database_url), start)
    before = columns(database_url)
    # Without the bound in the revision this limit would end the wait, with another error.
    limited = sa.make_url(database_url).update_query_dict({"options": "-c statement_timeout=10s"})
    moving = config(limited.render_as_string(hide_password=False))
    with connected(database_url) as reader:
        reader.execute(sa.select(invoice.c.id))
        with pytest.raises(sa.exc.OperationalError) as refused:
            move(moving, target)
        assert isinstance(refused.value.orig, psycopg.errors.LockNotAvailable)
        assert columns(database_url) == before
    move(moving, target)
    assert columns(database_url) != before


def test_offline_mode_prints_sql_that_builds_the_same_schema(url: str) -> None:
    command.upgrade(config(url), "head")
    online = columns(url)
    printed = {"up": io.StringIO(), "down": io.StringIO()}
    command.downgrade(config(url, printed["down"]), "head:base", sql=True)
    command.upgrade(config(url, printed["up"]), "head", sql=True)
    assert columns(url) == online, "printing changed the database"

    run_script(url, printed["down"].getvalue())
    assert columns(url) == {}
    with connected(url) as connection:
        connection.execute(sa.text("DROP TABLE IF EXISTS alembic_version"))
    run_script(url, printed["up"].getvalue())
    assert columns(url) == online
    command.downgrade(config(url), "base")
    assert columns(url) == {}


def run_script(url: str, script: str) -> None:
    """As `psql -f` or `sqlite3 <` would: the statements as printed, inside the script's own transactions."""
    address = sa.make_url(url)
    if address.get_backend_name() == "sqlite":
        with closing(sqlite3.connect(address.database, isolation_level=None)) as connection:
            connection.executescript(script)
    else:
        plain = address.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute(script)


def test_without_an_address_the_message_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCING_DATABASE_URL", raising=False)
    with pytest.raises(CommandError, match=r"FENCING_DATABASE_URL.* -x url="):
        command.upgrade(config(None), "head")


@pytest.mark.parametrize("address", ["host=db password=hunter2", "postgresql://user@db:hunter2/demo"])
def test_an_address_that_is_none_is_refused_without_repeating_it(address: str) -> None:
    with pytest.raises(CommandError, match="not a database URL") as refused:
        command.upgrade(config(address), "head")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "drivername", ["postgresql", "postgres", "postgresql+asyncpg", "postgresql+psycopg2"]
)
def test_every_postgresql_address_gets_psycopg(database_url: str, drivername: str) -> None:
    address = sa.make_url(database_url).set(drivername=drivername)
    command.upgrade(config(address.render_as_string(hide_password=False)), "head")
    assert fence_columns(database_url).items() <= columns(database_url).items()


def test_the_command_works_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCING_DATABASE_URL", "sqlite:///from_the_environment.db")

    def alembic(*arguments: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "alembic", "-c", str(ALEMBIC_INI), *arguments],
            cwd=tmp_path,
            check=True,
            timeout=30,
            capture_output=True,
        )

    alembic("upgrade", "head")
    alembic("-x", "url=sqlite:///given.db", "upgrade", "0001")

    from_the_environment = columns(f"sqlite:///{tmp_path / 'from_the_environment.db'}")
    assert fence_columns("sqlite").items() <= from_the_environment.items()
    assert list(columns(f"sqlite:///{tmp_path / 'given.db'}")) == ["id", "state", "amount_cents", "paid_by"]
