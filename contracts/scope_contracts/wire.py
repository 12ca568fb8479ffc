"""One value has one byte string, and no other bytes are accepted for it.

Canonical msgpack: maps with all keys in sorted order, floats as float64, the shortest form of
everything else. Whatever arrives, decoding ends in a message or in a named `ContractError`.
"""

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any, Self, TypeVar

import msgpack

from scope_contracts.envelope import ENVELOPE_VERSION, PPEnvelope, PPResult
from scope_contracts.errors import FieldError, VersionError, WireError, mismatch
from scope_contracts.field_encoder import FieldEncoder, pack_value
from scope_contracts.plain import MAX_LIST_LENGTH, from_plain, to_plain

MAX_MESSAGE_BYTES = 64 * 1024
_MAX_CLAIMED_ITEMS = 2 * MAX_LIST_LENGTH
"""msgpack allocates what a length claims, at every depth, before the items are there."""
_VERSION_FIELD = "pp_envelope_version"

Message = TypeVar("Message")


def encode(message: PPEnvelope | PPResult) -> bytes:
    """Encode a message; equal messages give equal bytes.

    It is checked, logged and sent to every rank of a group, and encoded once. Raises
    `VersionError`, `FieldError` for a value its field does not allow, and `WireError` for a message
    over `MAX_MESSAGE_BYTES`.
    """
    with suppress(AttributeError):
        return message.canonical
    kind: Any = type(message)
    data = _encoder(kind).encode(message)
    _known_version({_VERSION_FIELD: message.pp_envelope_version})
    require_size(data)
    return _kept(message, data)


def decode_envelope(data: bytes) -> PPEnvelope:
    """Decode the bytes of an envelope; raises `VersionError`, `FieldError` or `WireError`."""
    envelope = from_canonical(PPEnvelope, data, _known_version(decode_plain(data)))
    _kept(envelope, data)
    return envelope


def decode_result(data: bytes) -> PPResult:
    """Decode the bytes of a result; raises `VersionError`, `FieldError` or `WireError`."""
    return from_canonical(PPResult, data, _known_version(decode_plain(data)))


@cache
def _encoder(kind: Any) -> FieldEncoder:
    return FieldEncoder(kind)


def _kept(message: PPEnvelope | PPResult, canonical: bytes) -> bytes:
    object.__setattr__(message, "canonical", canonical)  # no field: the message stays what it is
    return canonical


def encode_plain(plain: dict[str, object]) -> bytes:
    """Pack plain values (see `plain.to_plain`), already sorted, under the size cap."""
    data = pack_value(plain)
    require_size(data)
    return data


def decode_plain(data: bytes) -> dict[str, object]:
    """Unpack one map and nothing after it; canonical form is not checked yet.

    Raises `WireError` for anything else, `FieldError` for a repeated field.
    """
    require_size(data)
    try:
        plain = msgpack.unpackb(
            data,
            raw=False,
            object_pairs_hook=_without_repeats,
            max_array_len=_MAX_CLAIMED_ITEMS,
            max_map_len=_MAX_CLAIMED_ITEMS,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"message of {len(data)} bytes is not msgpack: {error}") from error
    if type(plain) is not dict:
        raise WireError(mismatch("message", got=type(plain).__name__, want="a map of fields"))
    return plain


def from_canonical(kind: type[Message], data: bytes, plain: dict[str, object]) -> Message:
    """Build a `kind` from the values unpacked from `data`, and refuse any longer spelling."""
    message = from_plain(kind, plain)
    if encode_plain(to_plain(message)) != data:
        want = "canonical msgpack: sorted keys, shortest forms, float64"
        raise WireError(mismatch("message", got=f"{len(data)} other bytes", want=want))
    return message


class CanonicalMessage:
    """What ranks tell each other beside envelopes: a frozen dataclass without a version of its own.

    Equal messages, and only those, have equal bytes.
    """

    __slots__ = ()

    def encode(self) -> bytes:
        """Canonical bytes. Raises `FieldError`."""
        return encode_plain(to_plain(self))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """What another rank encoded; raises `FieldError` or `WireError`."""
        return from_canonical(cls, data, decode_plain(data))


def _known_version(plain: dict[str, object]) -> dict[str, object]:
    """Refuse a foreign version first: its other fields mean nothing to us."""
    if _VERSION_FIELD not in plain:
        raise FieldError(mismatch("message", got=list(plain), want=f"also {_VERSION_FIELD}"))
    version = plain[_VERSION_FIELD]
    if type(version) is not int:
        raise FieldError(mismatch(_VERSION_FIELD, got=version, want="an int"))
    if version != ENVELOPE_VERSION:
        fix = "install the same package on every rank"
        raise VersionError(mismatch(_VERSION_FIELD, got=version, want=ENVELOPE_VERSION, fix=fix))
    return plain


def require_size(data: bytes) -> None:
    """Raise `WireError` for more than `MAX_MESSAGE_BYTES`."""
    if len(data) > MAX_MESSAGE_BYTES:
        want = f"at most {MAX_MESSAGE_BYTES} bytes"
        raise WireError(mismatch("message", got=len(data), want=want))


def _without_repeats(pairs: Iterable[tuple[object, object]]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for name, value in pairs:
        if type(name) is not str:
            raise WireError(mismatch("message", got=name, want="field names that are text"))
        if name in fields:
            raise FieldError(mismatch("message", got=f"{name[:64]} twice", want="it once"))
        fields[name] = value
    return fields
