"""The dataclass fields are the one table that says what a message may contain.

`to_plain` and `from_plain` walk the type annotations, so a field added to a message is encoded,
checked and refused everywhere without another line of code. Plain values are bool, int, float,
str, list, dict, and None where a field is optional; nothing is coerced: a bool is not an int and
an int is not a float. What else a field may hold is a leaf, for which the caller brings a codec.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from scope_contracts.errors import FieldError, mismatch

MAX_LIST_LENGTH = 256
MAX_STRING_BYTES = 256
_INT_LIMIT = 2**63

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """How a value that is no message becomes plain, and a plain one that value again."""

    lower: Callable[[Any], object]
    lift: Callable[[object], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlainRules:
    """What is plain beside messages, and how much of it; the defaults are those of messages."""

    leaves: Mapping[type[Any], Leaf] = dataclasses.field(default_factory=dict)
    max_list_length: int = MAX_LIST_LENGTH
    max_string_bytes: int = MAX_STRING_BYTES


MESSAGE_RULES = PlainRules()


def to_plain(value: object, rules: PlainRules = MESSAGE_RULES) -> dict[str, object]:
    """Turn a message dataclass into nested plain values, keys sorted.

    Raises `FieldError` for a value that its annotation does not allow.
    """
    kind: Any = type(value)
    return cast(dict[str, object], _lowering(kind)(value, "", rules))


def from_plain(
    kind: type[Value], plain: Mapping[str, object], rules: PlainRules = MESSAGE_RULES
) -> Value:
    """Build a `kind` from plain values; the inverse of `to_plain`.

    Raises `FieldError` for a missing, unknown or wrongly typed field.
    """
    return cast(Value, _lift(kind, dict(plain), "", rules))


@cache
def field_types(kind: type[Any]) -> Mapping[str, Any]:
    """The annotation of every field of a message dataclass, names sorted."""
    hints = get_type_hints(kind)
    return {name: hints[name] for name in sorted(f.name for f in dataclasses.fields(kind))}


_Lowering = Callable[[Any, str, PlainRules], object]


@cache
def _lowering(annotation: Any) -> _Lowering:
    """What makes values of `annotation` plain: looked up once, for it runs for every chunk."""
    if (inner := _optional(annotation)) is not None:
        return partial(_lower_optional, inner)
    if get_origin(annotation) is tuple:
        return partial(_lower_items, annotation)
    if _is_message(annotation):
        return partial(_lower_message, annotation)
    if issubclass(annotation, StrEnum):
        return lambda value, path, rules: str(_require_type(annotation, value, path))
    if annotation in _SCALARS:
        return partial(_checked_scalar, annotation)
    return partial(_lower_leaf, annotation)


@cache
def _field_lowerings(kind: Any) -> Mapping[str, _Lowering]:
    return {name: _lowering(annotation) for name, annotation in field_types(kind).items()}


def _lower_optional(inner: Any, value: object, path: str, rules: PlainRules) -> object:
    return None if value is None else _lowering(inner)(value, path, rules)


def _lower_items(annotation: Any, value: object, path: str, rules: PlainRules) -> list[object]:
    items = _require_type(tuple, value, path)
    kinds = _item_types(annotation, len(items), path, rules)
    return [
        _lowering(k)(v, f"{path}[{i}]", rules)
        for i, (k, v) in enumerate(zip(kinds, items, strict=True))
    ]


def _lower_message(kind: Any, value: object, path: str, rules: PlainRules) -> dict[str, object]:
    message, lowerings = _require_type(kind, value, path), _field_lowerings(kind)
    return {n: lower(getattr(message, n), _join(path, n), rules) for n, lower in lowerings.items()}


def _lower_leaf(kind: Any, value: object, path: str, rules: PlainRules) -> object:
    return _leaf(kind, path, rules).lower(_require_type(kind, value, path))


def _lift(annotation: Any, plain: object, path: str, rules: PlainRules) -> object:
    if (inner := _optional(annotation)) is not None:
        return None if plain is None else _lift(inner, plain, path, rules)
    if get_origin(annotation) is tuple:
        items = _require_type(list, plain, path)
        kinds = _item_types(annotation, len(items), path, rules)
        return tuple(
            _lift(k, v, f"{path}[{i}]", rules)
            for i, (k, v) in enumerate(zip(kinds, items, strict=True))
        )
    if _is_message(annotation):
        fields = _require_type(dict, plain, path)
        types = field_types(annotation)
        _require_names(fields, types, path)
        values = {n: _lift(t, fields[n], _join(path, n), rules) for n, t in types.items()}
        return annotation(**values)
    if issubclass(annotation, StrEnum):
        return _enum_member(annotation, _checked_scalar(str, plain, path, rules), path)
    if annotation in _SCALARS:
        return _checked_scalar(annotation, plain, path, rules)
    return _leaf(annotation, path, rules).lift(plain)


_SCALARS = (bool, int, float, str)


@cache
def _optional(annotation: Any) -> Any | None:
    """`T` of `T | None`; None for every other annotation."""
    if not isinstance(annotation, UnionType) and get_origin(annotation) is not Union:
        return None
    (inner,) = (each for each in get_args(annotation) if each is not NoneType)
    return inner


def _leaf(kind: Any, path: str, rules: PlainRules) -> Leaf:
    if kind not in rules.leaves:
        raise FieldError(mismatch(path, got=kind, want="a kind of value that can be plain"))
    return rules.leaves[kind]


def _is_message(annotation: Any) -> bool:
    return dataclasses.is_dataclass(annotation)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _require_type(kind: type[Value], value: object, path: str) -> Value:
    if type(value) is not kind:
        want = f"{kind.__name__}, not {type(value).__name__}"
        raise FieldError(mismatch(path or "message", got=value, want=want))
    return value


def _item_types(annotation: Any, length: int, path: str, rules: PlainRules) -> tuple[Any, ...]:
    kinds = get_args(annotation)
    if kinds[-1] is Ellipsis:
        if length > (most := rules.max_list_length):
            raise FieldError(mismatch(path, got=length, want=f"at most {most} items"))
        return (kinds[0],) * length
    if length != len(kinds):
        raise FieldError(mismatch(path, got=length, want=f"{len(kinds)} items"))
    return kinds


def _require_names(fields: dict[Any, object], types: Mapping[str, Any], path: str) -> None:
    where = path or "message"
    if unknown := [name for name in fields if name not in types]:
        raise FieldError(mismatch(where, got=unknown, want="only fields of this version"))
    if missing := [name for name in types if name not in fields]:
        raise FieldError(mismatch(where, got=sorted(fields), want=f"also {', '.join(missing)}"))


def _enum_member(kind: type[StrEnum], text: str, path: str) -> StrEnum:
    try:
        return kind(text)
    except ValueError as error:
        want = f"one of {', '.join(kind)}"
        raise FieldError(mismatch(path, got=text, want=want)) from error


def _checked_scalar(kind: type[Value], value: object, path: str, rules: PlainRules) -> Value:
    scalar = _require_type(kind, value, path)
    if isinstance(scalar, float):
        if not math.isfinite(scalar):
            raise FieldError(mismatch(path, got=scalar, want="a finite number"))
        return cast(Value, scalar + 0.0)  # -0.0 equals 0.0, so both must have the same bytes
    if isinstance(scalar, int) and not -_INT_LIMIT <= scalar < _INT_LIMIT:
        raise FieldError(mismatch(path, got=scalar, want="an integer of 64 bits"))
    if isinstance(scalar, str):
        _require_text(scalar, path, rules)
    return scalar


def _require_text(text: str, path: str, rules: PlainRules) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise FieldError(mismatch(path, got=text, want="text that UTF-8 can hold")) from error
    if num_bytes > (most := rules.max_string_bytes):
        raise FieldError(mismatch(path, got=text, want=f"at most {most} bytes"))
