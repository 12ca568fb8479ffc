"""Canonical bytes of a message that is mostly like the one before: only what changed is encoded.

A field's bytes follow from its value, and values cannot change. So a field that holds the very
object that it held in the message before has the bytes that it had there: two of three fields of a
chunk's envelope. Each value was checked when it was encoded.
"""

from typing import Any

import msgpack

from scope_contracts.plain import MESSAGE_RULES, PlainRules, field_to_plain, field_types, values_of


def pack_value(plain: object) -> bytes:
    """A plain value in canonical msgpack."""
    data: bytes = msgpack.packb(plain, use_bin_type=True, strict_types=True)
    return data


class FieldEncoder:
    """Of the messages of one kind; any thread may use it.

    `constants` are fields beside those of the dataclass, the same in each message.
    """

    def __init__(self, kind: Any, rules: PlainRules = MESSAGE_RULES, /, **constants: str) -> None:
        self._kind, self._rules = kind, rules
        self._names = tuple(field_types(kind))
        self._values_of = values_of(self._names)
        prefix = msgpack.Packer().pack_map_header(len(self._names) + len(constants))
        self._prefixes: list[bytes] = []
        """What stands before the value of each field: its name, and constants that come first."""
        for name in sorted((*self._names, *constants)):
            prefix += pack_value(name)
            if name in constants:
                prefix += pack_value(constants[name])
            else:
                self._prefixes.append(prefix)
                prefix = b""
        self._suffix = prefix
        nothing = object()
        self._last: tuple[tuple[Any, ...], list[bytes]] = (
            (nothing,) * len(self._names),
            [b""] * len(self._names),
        )
        """The values of the message before, which keeps them alive, and their bytes: one object,
        so that no thread sees half of another's."""

    def encode(self, message: Any) -> bytes:
        """The canonical map of `message`; raises `FieldError` for a value its field does not
        allow."""
        values = self._values_of(message)
        known, parts = self._last
        parts = parts.copy()
        for index, value in enumerate(values):
            if value is not known[index]:
                plain = field_to_plain(self._kind, self._names[index], value, self._rules)
                parts[index] = self._prefixes[index] + pack_value(plain)
        self._last = values, parts
        return b"".join((*parts, self._suffix))
