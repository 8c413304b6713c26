"""Options are checked against their type annotations, with pydantic.

    @checked("loss")
    @dataclass(frozen=True)
    class LossOptions:
        kl_coef: NonNegative = 0.01                     # LossOptions(kl_coef=-1) raises
        zero_signal: Literal["keep", "drop"] = "keep"   # ConfigError: loss.kl_coef is -1; expected a number ≥ 0

Checks are strict: 2.5, "3" and true are not integers, and the text "no" is not a boolean. This module imports fast.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AllowInfNan, TypeAdapter, ValidationError

from draco.core.errors import ConfigError

__all__ = ["Count", "Index", "NonNegative", "Positive", "PositiveOrInf", "Share", "check_option", "checked"]

Count = Annotated[int, Ge(1)]  #: an integer from 1
Index = Annotated[int, Ge(0)]  #: an integer from 0
NonNegative = Annotated[float, Ge(0), AllowInfNan(False)]  #: a finite number from 0
Positive = Annotated[float, Gt(0), AllowInfNan(False)]  #: a finite number above 0
PositiveOrInf = Annotated[float, Gt(0)]  #: a number above 0; infinity is allowed
Share = Annotated[float, Ge(0), Le(1)]  #: from 0 to 1

C = TypeVar("C", bound=type)
_MISSING = object()


def check_option(name: str, value: Any, annotation: Any) -> None:
    """Check one value against a type.

    Raises:
        ConfigError: it does not fit; the message names the option and what was expected.
    """
    if (isinstance(value, bool) and not _takes_bool(annotation)) or not _fits(value, annotation):
        raise ConfigError(f"{name} is {_shown(value)}; expected {_expected(name, annotation)}")


def checked(section: str, **names: str) -> Callable[[C], C]:
    """Class decorator: the arguments of `__init__` are checked against their annotations before it runs.

    Args:
        section: of the configuration; messages name an argument `x` ``SECTION.x``.
        names: argument → full option name, if it is another one.
    """

    def decorate(cls: C) -> C:
        original: Callable[..., None] = cls.__init__  # type: ignore[misc]
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            given: Mapping[str, Any] = {}
            with contextlib.suppress(TypeError):  # `original` raises for missing and unknown arguments
                given = signature.bind(self, *args, **kwargs).arguments
            for argument, annotation in _annotations(cls).items():
                if (value := given.get(argument, _MISSING)) is not _MISSING:
                    check_option(
                        names.get(argument, f"{section}.{argument}" if section else argument), value, annotation
                    )
            original(self, *args, **kwargs)

        cls.__init__ = init  # type: ignore[misc]
        return cls

    return decorate


@functools.cache
def _annotations(cls: type) -> Mapping[str, Any]:
    """Arguments of a class with annotations that can be checked."""
    init = inspect.unwrap(cls.__init__)  # type: ignore[misc]
    space = vars(sys.modules[cls.__module__])
    found: dict[str, Any] = {}
    for name, annotation in init.__annotations__.items():
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, dict(space))
            except NameError:  # imported only for type checkers: an object, not an option
                continue
        if name != "return" and _checkable(annotation):
            found[name] = annotation
    return found


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


def _fits(value: Any, annotation: Any) -> bool:
    if _is_list(annotation):
        if value is None or isinstance(value, str):
            return type(value) in _parts(annotation)
        return isinstance(value, Sequence)
    try:
        _adapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _parts(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union; any other type alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _plain(annotation: Any) -> Any:
    """The type without its bounds."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _optional(annotation: Any) -> bool:
    return type(None) in _parts(annotation)


def _is_list(annotation: Any) -> bool:
    return any(get_origin(_plain(part)) in (Sequence, list, tuple) for part in _parts(annotation))


def _takes_bool(annotation: Any) -> bool:
    return any(_plain(part) is bool for part in _parts(annotation))


def _checkable(annotation: Any) -> bool:
    scalars = (int, float, bool, str, type(None))
    return all(
        _plain(part) in scalars or get_origin(_plain(part)) in (Literal, Sequence, list, tuple)
        for part in _parts(annotation)
    )


def _expected(name: str, annotation: Any) -> str:
    kinds = [_kind(name, part) for part in _parts(annotation) if part is not type(None)]
    return " or ".join(dict.fromkeys(kinds)) + (", or null" if _optional(annotation) else "")


def _kind(name: str, annotation: Any) -> str:
    plain = _plain(annotation)
    if get_origin(plain) is Literal:
        choices = [str(c) for c in get_args(plain)]
        return f"{', '.join(choices[:-1])} or {choices[-1]}" if len(choices) > 1 else choices[0]
    if _is_list(plain):
        return f"a list, as in '{name}=[A, B]'; [] is none"
    if plain is bool:
        return "true or false"
    if plain is str:
        return "a text"
    bounds = {type(m): m for m in get_args(annotation)[1:]} if get_origin(annotation) is Annotated else {}
    low = bounds.get(Ge) or bounds.get(Gt)
    high = bounds.get(Le) or bounds.get(Lt)
    if plain is int and isinstance(low, Ge) and isinstance(high, Le):
        return f"an integer from {low.ge} to {high.le}"
    said = "an integer" if plain is int else "a number"
    if low is not None:
        said += f" ≥ {low.ge:g}" if isinstance(low, Ge) else f" > {low.gt:g}"
    if high is not None:
        said += f"{' and' if low is not None else ''} {f'≤ {high.le:g}' if isinstance(high, Le) else f'< {high.lt:g}'}"
    return said


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value) if isinstance(value, str) else str(value)
