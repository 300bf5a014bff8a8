"""Runs the revisions against the database named by `-x url=...` or FENCING_DATABASE_URL."""

import logging
import os
from logging.config import fileConfig

from alembic import context
from alembic.util import CommandError
from sqlalchemy import URL, Engine, create_engine, event, make_url, pool
from sqlalchemy.exc import ArgumentError

URL_VARIABLE = "FENCING_DATABASE_URL"

# Alembic is synchronous; the application's address may name an asyncio driver and is welcome all the same.
DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg", "sqlite": "sqlite+pysqlite"}


def database_url() -> URL:
    """The address to migrate, with the driver this environment uses. CommandError if there is none."""
    given = context.get_x_argument(as_dictionary=True).get("url") or os.environ.get(URL_VARIABLE)
    if not given:
        raise CommandError(
            f"No database given. Set {URL_VARIABLE}, or pass the address before the command: "
            "alembic -x url=postgresql://user:password@host/database upgrade head"
        )
    try:
        url = make_url(given)
    except (ArgumentError, ValueError):
        # The address may carry a password: say where it came from, do not repeat it.
        raise CommandError(
            f"What -x url=... or {URL_VARIABLE} says is not a database URL such as "
            "postgresql://user:password@host/database or sqlite:///file.db"
        ) from None
    return url.set(drivername=DRIVERS.get(url.get_backend_name(), url.drivername))


def engine_for(url: URL) -> Engine:
    """An engine whose transactions cover DDL, also on SQLite, where the driver begins none for it."""
    engine = create_engine(url, poolclass=pool.NullPool)
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "begin")
        def begin(connection) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def run(backend: str, **where: object) -> None:
    """Run the revisions, one transaction each.

    A revision that fails or gives up waiting for a lock leaves no trace, and the ones before it stay; none
    holds its locks while the next one works. MySQL and MariaDB commit at each statement whatever we ask for.
    """
    context.configure(
        **where,
        transaction_per_migration=True,
        transactional_ddl=backend in {"postgresql", "sqlite"},
        render_as_batch=backend == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


# A program that calls Alembic from its own code has set up its own logging: leave that alone.
if context.config.config_file_name is not None and not logging.getLogger().handlers:
    fileConfig(context.config.config_file_name, disable_existing_loggers=False)

target = database_url()
if context.is_offline_mode():
    run(target.get_backend_name(), url=target, literal_binds=True)
else:
    with engine_for(target).connect() as connection:
        run(target.get_backend_name(), connection=connection)
