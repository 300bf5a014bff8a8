"""Tokens, holders and grants: the value in which the two halves of the package meet."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from fencing.errors import ConfigurationError

MAX_TOKEN = 2**53 - 1  # beyond it Lua's doubles are no longer exact
MAX_RESOURCE_BYTES = 1024
MAX_LABEL_BYTES = 200

_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z", re.ASCII)
_HOLDER = re.compile(r"[0-9a-f]{32}\Z", re.ASCII)


class HeldBy(NamedTuple):
    """Who holds a resource, as the backend sees it."""

    resource: str
    holder: str
    token: int
    label: str
    held_since: float
    """Wall time of the acquisition by the backend's clock, in seconds. For people."""
    time_left: float
    """Seconds until the lease ends unless it is renewed."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Frozen proof of an acquisition: what the database compares.

    Carries no connection and no clock, so it pickles and may travel. `deadline` is in seconds of the
    issuing process's monotonic clock and means nothing in another process.
    """

    namespace: str
    resources: tuple[str, ...]
    holder: str
    token: int
    deadline: float
    label: str = ""

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if not isinstance(self.resources, tuple) or not self.resources:
            raise ConfigurationError(f"a grant is about a tuple of resources, not {self.resources!r}")
        for resource in self.resources:
            check_resource(resource)
        check_holder(self.holder)
        check_token(self.token)

    @property
    def resource(self) -> str:
        """The resource, or the first of several."""
        return self.resources[0]


def admits(token: int, holder: str, stored_token: int, stored_holder: str | None) -> bool:
    """Whether a write or claim of (token, holder) is admitted over what is stored.

    The one rule of the package. Strict ``>`` alone would refuse a holder's own second write; ``>=``
    alone would admit two holders that were given the same token.
    """
    return token > stored_token or (token == stored_token and holder == stored_holder)


def new_holder() -> str:
    """A fresh id for one acquisition: 128 random bits as 32 hex digits.

    Never reused: a replayed acquire returns the token of the holder it names, so a holder shared by
    two threads would hand one token to both.
    """
    return os.urandom(16).hex()


def check_token(token: object) -> int:
    if type(token) is not int or not 0 < token <= MAX_TOKEN:
        raise ConfigurationError(f"a token is a whole number from 1 to 2^53-1, not {token!r}")
    return token


def check_holder(holder: object) -> str:
    if not isinstance(holder, str) or not _HOLDER.match(holder):
        raise ConfigurationError(f"a holder is 32 lower-case hex digits, not {holder!r}")
    return holder


def check_namespace(namespace: object) -> str:
    if not isinstance(namespace, str) or not _NAMESPACE.match(namespace):
        raise ConfigurationError(
            f"a namespace is 1 to 64 ASCII letters, digits, '_', '.' or '-', not {namespace!r}: "
            "it names a class of work and becomes a metrics label"
        )
    return namespace


def check_resource(resource: object) -> str:
    """Any text from 1 to `MAX_RESOURCE_BYTES` bytes of UTF-8 names a resource."""
    if type(resource) is str and 0 < len(resource) <= MAX_RESOURCE_BYTES and resource.isascii():
        return resource
    if not isinstance(resource, str) or not resource:
        raise ConfigurationError(f"a resource is a non-empty string, not {resource!r}")
    if not _fits(resource, MAX_RESOURCE_BYTES):
        raise ConfigurationError(
            f"a resource is text of at most {MAX_RESOURCE_BYTES} bytes in UTF-8; this one begins {resource[:40]!r}"
        )
    return resource


def check_label(label: object) -> str:
    if not isinstance(label, str) or not _fits(label, MAX_LABEL_BYTES):
        raise ConfigurationError(f"a label is a string of at most {MAX_LABEL_BYTES} bytes, not {label!r}")
    return label


def _fits(text: str, limit: int) -> bool:
    if text.isascii():
        return len(text) <= limit
    try:
        return len(text.encode()) <= limit
    except UnicodeEncodeError:  # a lone surrogate: no byte string says this
        return False
