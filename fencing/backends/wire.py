"""Commands to bytes and Redis replies to values: key names, scripts, packing, decoding. No I/O.

The layout of keys and values is drawn at the top of `lua/_layout.lua`.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources as package_resources
from math import inf
from typing import NamedTuple

from fencing.backends.base import (
    NOTE_KEEP_MS,
    Acquire,
    Busy,
    Command,
    Done,
    Granted,
    NotHeld,
    Orphan,
    Poisoned,
    Release,
    Remint,
    Renew,
    Reply,
    Seen,
    Target,
    new,
)
from fencing.errors import BackendUnavailable, ConfigurationError
from fencing.token import MAX_TOKEN, HeldBy

PREFIX = "fencing:1:"
MAX_SHARDS = 1024
DONE = Done()


class Script(NamedTuple):
    """A Lua file, and the heads of the commands that run it."""

    evalsha: bytes
    eval: bytes


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def script_text(name: str) -> str:
    """A Lua file with what it includes in front: what the server is sent."""

    def text(file: str) -> str:
        return package_resources.files("fencing.backends").joinpath("lua", f"{file}.lua").read_text()

    body = text(name)
    included = re.findall(r"^-- include: (\w+)$", body, re.MULTILINE)
    return "".join([text("_layout"), *map(text, included), body])


def script(text: str) -> Script:
    whole = text.encode()
    sha = hashlib.sha1(whole, usedforsecurity=False).hexdigest().encode()
    return Script(_bulk(b"EVALSHA") + _bulk(sha), _bulk(b"EVAL") + _bulk(whole))


SCRIPTS = {
    name: script(script_text(name)) for name in ("acquire", "remint", "renew", "release", "peek", "join")
}


def shard_of(resource: str, shards: int) -> int:
    """The same for every process, release and platform: a resource must never move between counters."""
    return zlib.crc32(resource.encode()) % shards


def shards_key(namespace: str) -> str:
    return f"{PREFIX}{{{namespace}}}:shards"


@lru_cache(maxsize=1024)
def _base(namespace: str, shard: int) -> tuple[bytes, bytes]:
    """How the keys of a shard begin, and the packed keys that all its commands have."""
    base = f"{PREFIX}{{{namespace}/{shard}}}:".encode()
    return base, _bulk(base + b"counter") + _bulk(base + b"holds")


def pack_target(namespace: str, resources: tuple[str, ...], shards: int) -> Target:
    """The target with the number of keys and all keys packed: the same for every script."""
    shard = shard_of(resources[0], shards) if shards > 1 else 0
    base, common = _base(namespace, shard)
    if len(resources) == 1:
        size = len(base)
        name = resources[0].encode()
        packed = b"$1\r\n4\r\n%b$%d\r\n%blease:%b\r\n$%d\r\n%bnote:%b\r\n" % (
            common,
            size + 6 + len(name),
            base,
            name,
            size + 5 + len(name),
            base,
            name,
        )
        return new(Target, (namespace, resources, packed))
    if any(shard_of(resource, shards) != shard for resource in resources):
        raise ConfigurationError(
            f"{', '.join(resources)} are in different shards of {namespace!r} ({shards} shards): one lease "
            "lives in one shard, so that it is taken in one step"
        )
    keys = [base + kind + resource.encode() for resource in resources for kind in (b"lease:", b"note:")]
    packed = b"".join([_bulk(b"%d" % (2 + len(keys))), common, *map(_bulk, keys)])
    return Target(namespace, resources, packed)


@lru_cache(maxsize=1024)
def _args(*args: int | str) -> bytes:
    """Packed once: there are few TTLs and labels, and many commands with them."""
    return b"".join([_bulk(arg.encode() if isinstance(arg, str) else b"%d" % arg) for arg in args])


def pack(command: Command, *, whole: bool = False) -> bytes:
    """The command as one RESP request; `whole` sends the script's text instead of its hash."""
    target = command.target
    if isinstance(command, Acquire):
        note_ms = command.ttl_ms + NOTE_KEEP_MS if command.note else 0
        name, count = "acquire", 10
        args = _args(command.ttl_ms, note_ms, command.floor, command.label)
    elif isinstance(command, Release):
        name, count, args = "release", 6, b""
    elif isinstance(command, Renew):
        note_ms = command.ttl_ms + NOTE_KEEP_MS if command.note else 0
        name, count, args = "renew", 8, _args(command.ttl_ms, note_ms)
    elif isinstance(command, Remint):
        name, count, args = "remint", 7, _args(command.floor)
    else:
        head = SCRIPTS["peek"].eval if whole else SCRIPTS["peek"].evalsha
        return b"*%d\r\n%b%b" % (5 + 2 * len(target.resources), head, target.packed)
    head = SCRIPTS[name].eval if whole else SCRIPTS[name].evalsha
    return b"*%d\r\n%b%b$32\r\n%b\r\n%b" % (
        count + 2 * len(target.resources),
        head,
        target.packed,
        command.holder.encode(),
        args,
    )


def pack_join(namespace: str, shards: int, *, whole: bool = False) -> bytes:
    head = SCRIPTS["join"].eval if whole else SCRIPTS["join"].evalsha
    key = _bulk(shards_key(namespace).encode())
    return b"*5\r\n" + head + _bulk(b"1") + key + _bulk(b"%d" % shards)


def decode(command: Command, raw: object) -> Reply:
    """What the server's reply to the command means; refuses what none of our scripts would say."""
    try:
        if not isinstance(raw, list):
            raise ValueError("not an array")
        status = raw[0]
        if status == b"granted":
            token = int(raw[1])
            if 0 < token <= MAX_TOKEN and type(raw[1]) is bytes:
                return new(Granted, (token, _orphans(command.target, raw) if len(raw) > 2 else ()))
            raise ValueError(f"token {raw[1]!r}")
        if status == b"done":
            return DONE
        if status == b"busy":
            return Busy(_held_by(command.target.resources[raw[1]], raw[2], raw[3]))
        if status == b"not held":
            resource = command.target.resources[raw[1]]
            return NotHeld(resource, None if raw[2] is None else _held_by(resource, raw[2], raw[3]))
        if status == b"seen":
            resource = command.target.resources[0]
            return Seen(None if raw[1] is None else _held_by(resource, raw[1], raw[2]))
        if status == b"poisoned":
            return Poisoned(getattr(command, "floor", 0))
        raise ValueError(f"status {status!r}")
    except (ValueError, IndexError, TypeError, OverflowError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise BackendUnavailable(f"the backend answered {raw!r}, which means nothing: {error}") from error


def _token(value: object) -> int:
    token = int(value) if isinstance(value, bytes) else 0
    if not 0 < token <= MAX_TOKEN:
        raise ValueError(f"token {value!r}")
    return token


def _held_by(resource: str, value: object, left_ms: object) -> HeldBy:
    if not isinstance(value, bytes) or not isinstance(left_ms, int):
        raise ValueError("a lease is a string with a TTL")
    columns = value[:2] == b"1 " and len(value) >= 71 and value[2:34].isalnum()
    if not columns or not value[35:51].isdigit() or not value[52:68].isdigit():
        raise ConfigurationError(
            f"the key of {resource!r} holds {value[:80]!r}, which is no lease of this package: "
            "another program writes under its keys, or another version of it"
        )
    return HeldBy(
        resource=resource,
        holder=value[2:34].decode("ascii", "replace"),
        token=_token(value[35:51]),
        label=value[71:].decode("utf-8", "replace"),
        held_since=int(value[52:68]) / 1e6,
        time_left=inf if left_ms == -1 else max(left_ms, 0) / 1000,  # -1: somebody took its TTL away
    )


def _orphans(target: Target, raw: Sequence[object]) -> tuple[Orphan, ...]:
    found = []
    for at in range(2, len(raw), 3):
        index, note, left_ms = raw[at : at + 3]
        if not isinstance(index, int) or not isinstance(left_ms, int):
            raise ValueError("a note is an index, a lease and a TTL")
        try:
            previous = _held_by(target.resources[index], note, 0)
        except ConfigurationError:
            continue  # a note of another version, or nobody's: the lease itself is granted
        found.append(Orphan(previous, max(NOTE_KEEP_MS - left_ms, 0) / 1000))
    return tuple(found)
