"""The decorator's part: which resource a call names, and where the lease goes among its arguments."""

from __future__ import annotations

import inspect
import re
import string
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from fencing.errors import ConfigurationError


class HeldCall(NamedTuple):
    """One call of a decorated function: the resource it names, and its arguments."""

    resource: str
    signature: inspect.Signature
    bound: inspect.BoundArguments

    def arguments(self, lease: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call the function with, the lease among it where the function has a parameter for it."""
        if "lease" not in self.signature.parameters:
            return self.bound.args, self.bound.kwargs
        given = self.bound.arguments | {"lease": lease}
        ordered = {name: given[name] for name in self.signature.parameters if name in given}
        whole = inspect.BoundArguments(self.signature, OrderedDict(ordered))
        return whole.args, whole.kwargs


def held_call(
    template: str, function: Callable[..., object]
) -> Callable[[tuple[Any, ...], dict[str, Any]], HeldCall]:
    """How a call of the function names its resource: `template` formatted with the call's arguments."""
    if not isinstance(template, str):
        raise ConfigurationError(
            f'holding takes the resource first, as in @leases.holding("invoice:{{id}}"), not {template!r}'
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"{function.__qualname__} is a generator: it would run when its lease is released; use `with` inside it"
        )
    signature = inspect.signature(function)
    plain = signature.replace(
        parameters=[each for each in signature.parameters.values() if each.name != "lease"]
    )
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ConfigurationError(f"{template!r} is no format string: {error}") from error
    for field in fields:
        name = re.split(r"[.\[]", field, maxsplit=1)[0]
        if name not in plain.parameters:
            raise ConfigurationError(
                f"{template!r} names {name!r}, which is no parameter of {function.__qualname__}{signature}: "
                "name one of its parameters"
            )

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> HeldCall:
        bound = plain.bind(*args, **kwargs)
        bound.apply_defaults()
        return HeldCall(template.format(**bound.arguments), signature, bound)

    return call
