"""The dataclass fields are the one table that says what a message may contain.

`to_plain` and `from_plain` walk the type annotations, so a field added to a message is encoded,
checked and refused everywhere without another line of code. Plain values are bool, int, float,
str, list, dict, and None where a field is optional; nothing is coerced: a bool is not an int and
an int is not a float. What else a field may hold is a leaf, for which the caller brings a codec; so
is a message for which he brings one.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from operator import attrgetter
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
    try:
        return cast(dict[str, object], _codec(kind).lower(value, rules))
    except _MisfitError as misfit:
        raise misfit.named() from None


def from_plain(
    kind: type[Value], plain: Mapping[str, object], rules: PlainRules = MESSAGE_RULES
) -> Value:
    """Build a `kind` from plain values; the inverse of `to_plain`.

    Raises `FieldError` for a missing, unknown or wrongly typed field.
    """
    annotation: Any = kind
    try:
        return cast(Value, _codec(annotation).lift(dict(plain), rules))
    except _MisfitError as misfit:
        raise misfit.named() from None


def field_to_plain(
    kind: Any, name: str, value: object, rules: PlainRules = MESSAGE_RULES
) -> object:
    """What `to_plain` makes of the field `name` of a `kind`; raises `FieldError` as that does."""
    try:
        return _codec(field_types(kind)[name]).lower(value, rules)
    except _MisfitError as misfit:
        misfit.lies_in(name)
        raise misfit.named() from None


@cache
def field_types(kind: type[Any]) -> Mapping[str, Any]:
    """The annotation of every field of a message dataclass, names sorted."""
    hints = get_type_hints(kind)
    return {name: hints[name] for name in sorted(f.name for f in dataclasses.fields(kind))}


class _MisfitError(Exception):
    """A value that its annotation does not allow; who holds it adds where, and nobody else pays
    for that."""

    def __init__(self, got: object, want: object) -> None:
        self._path, self._got, self._want = "", got, want

    def lies_in(self, part: str) -> None:
        """Put the name or the index of the part that holds it before where it lies there."""
        dot = "." if self._path and not self._path.startswith("[") else ""
        self._path = f"{part}{dot}{self._path}"

    def named(self) -> FieldError:
        return FieldError(mismatch(self._path or "message", got=self._got, want=self._want))


_Change = Callable[[Any, PlainRules], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Codec:
    """How values of one annotation become plain, and plain ones such values: made once, for it
    runs for every chunk."""

    lower: _Change
    lift: _Change


@cache
def _codec(annotation: Any) -> _Codec:
    if (inner := _optional(annotation)) is not None:
        return _optional_codec(_codec(inner))
    if get_origin(annotation) is tuple:
        return _tuple_codec(*get_args(annotation))
    if dataclasses.is_dataclass(annotation):
        return _message_codec(annotation)
    if issubclass(annotation, StrEnum):
        return _enum_codec(annotation)
    if annotation in _CHECKS:
        return _Codec(_CHECKS[annotation], _CHECKS[annotation])
    return _leaf_codec(annotation)


def _optional(annotation: Any) -> Any | None:
    """`T` of `T | None`; None for every other annotation."""
    if not isinstance(annotation, UnionType) and get_origin(annotation) is not Union:
        return None
    (inner,) = (each for each in get_args(annotation) if each is not NoneType)
    return inner


def _optional_codec(inner: _Codec) -> _Codec:
    return _Codec(
        lambda value, rules: None if value is None else inner.lower(value, rules),
        lambda plain, rules: None if plain is None else inner.lift(plain, rules),
    )


def _tuple_codec(*kinds: Any) -> _Codec:
    """Of a tuple of any length if `kinds` end in an ellipsis, else of exactly these items."""
    is_open = kinds[-1] is Ellipsis
    codecs = [_codec(kind) for kind in kinds if kind is not Ellipsis]

    def changed(items: Sequence[Any], changes: list[_Change], rules: PlainRules) -> list[Any]:
        if not is_open and len(items) != len(changes):
            raise _MisfitError(len(items), f"{len(changes)} items")
        if is_open and len(items) > (most := rules.max_list_length):
            raise _MisfitError(len(items), f"at most {most} items")
        made: list[Any] = []
        try:
            wanted = changes * len(items) if is_open else changes
            for change, item in zip(wanted, items, strict=True):
                made.append(change(item, rules))
        except _MisfitError as misfit:
            misfit.lies_in(f"[{len(made)}]")
            raise
        return made

    lowers, lifts = [codec.lower for codec in codecs], [codec.lift for codec in codecs]
    return _Codec(
        lambda value, rules: changed(_required(tuple, value), lowers, rules),
        lambda plain, rules: tuple(changed(_required(list, plain), lifts, rules)),
    )


def _message_codec(kind: Any) -> _Codec:
    types = field_types(kind)
    names, codecs = tuple(types), [_codec(annotation) for annotation in types.values()]
    lowers = [(name, codec.lower) for name, codec in zip(names, codecs, strict=True)]
    lifts = [(name, codec.lift) for name, codec in zip(names, codecs, strict=True)]

    def changed(
        values: Iterable[Any], changes: Iterable[tuple[str, _Change]], rules: PlainRules
    ) -> dict[str, Any]:
        made, name = {}, ""
        try:
            for value, (name, change) in zip(values, changes, strict=True):
                made[name] = change(value, rules)
        except _MisfitError as misfit:
            misfit.lies_in(name)
            raise
        return made

    fields_of = values_of(names)

    def lower(value: Any, rules: PlainRules) -> Any:
        if kind in rules.leaves:
            return rules.leaves[kind].lower(_required(kind, value))
        return changed(fields_of(_required(kind, value)), lowers, rules)

    def lift(plain: Any, rules: PlainRules) -> Any:
        if kind in rules.leaves:
            return rules.leaves[kind].lift(plain)
        fields = _required(dict, plain)
        if fields.keys() != types.keys():
            _refuse_names(fields, types)
        return kind(**changed([fields[name] for name in names], lifts, rules))

    return _Codec(lower, lift)


def values_of(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gives the fields of a message, in the order of `names`."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _refuse_names(fields: Mapping[Any, object], types: Mapping[str, Any]) -> None:
    if unknown := [name for name in fields if name not in types]:
        raise _MisfitError(unknown, "only fields of this version")
    missing = [name for name in types if name not in fields]
    raise _MisfitError(sorted(fields), f"also {', '.join(missing)}")


def _enum_codec(kind: type[StrEnum]) -> _Codec:
    members = {member.value: member for member in kind}

    def lift(plain: Any, rules: PlainRules) -> StrEnum:
        member = members.get(_checked_text(plain, rules))
        if member is None:
            raise _MisfitError(plain, f"one of {', '.join(kind)}")
        return member

    return _Codec(lambda value, rules: _required(kind, value).value, lift)


def _leaf_codec(kind: Any) -> _Codec:
    def leaf(rules: PlainRules) -> Leaf:
        if kind not in rules.leaves:
            raise _MisfitError(kind, "a kind of value that can be plain")
        return rules.leaves[kind]

    return _Codec(
        lambda value, rules: leaf(rules).lower(_required(kind, value)),
        lambda plain, rules: leaf(rules).lift(plain),
    )


def _required(kind: type[Value], value: object) -> Value:
    if type(value) is not kind:
        raise _MisfitError(value, f"{kind.__name__}, not {type(value).__name__}")
    return value


def _checked_bool(value: Any, rules: PlainRules) -> bool:
    return value if value is True or value is False else _required(bool, value)


def _checked_int(value: Any, rules: PlainRules) -> int:
    number = _required(int, value)
    if not -_INT_LIMIT <= number < _INT_LIMIT:
        raise _MisfitError(number, "an integer of 64 bits")
    return number


def _checked_float(value: Any, rules: PlainRules) -> float:
    number = _required(float, value)
    if not math.isfinite(number):
        raise _MisfitError(number, "a finite number")
    return number + 0.0  # -0.0 equals 0.0, so both must have the same bytes


def _checked_text(value: Any, rules: PlainRules) -> str:
    text = _required(str, value)
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise _MisfitError(text, "text that UTF-8 can hold") from None
    if num_bytes > (most := rules.max_string_bytes):
        raise _MisfitError(text, f"at most {most} bytes")
    return text


_CHECKS: Mapping[type[Any], _Change] = {
    bool: _checked_bool,
    int: _checked_int,
    float: _checked_float,
    str: _checked_text,
}
