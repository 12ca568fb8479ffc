"""What ended a start of the group, as one rank writes it to the store and all others read it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Self

from scope_contracts.errors import (
    ContractError,
    DamageError,
    IntegrityError,
    LinkError,
    LinkTimeoutError,
    PeerLostError,
    PeerRefusedError,
    ScopeError,
    UserInputError,
)
from scope_contracts.plain import MAX_STRING_BYTES
from scope_contracts.wire import CanonicalMessage

NO_CHUNK = -1


class FailureKind(StrEnum):
    """How a rank was lost, why it left, or what it found wrong."""

    SILENT = "silent"
    CLOSED = "closed"
    LEFT = "left"
    """It said what had gone wrong on it before it left."""
    REFUSED = "refused"
    """It could not use what it was given, which is no failure of a rank."""
    INTEGRITY = "integrity"


GroupError = LinkError | IntegrityError
"""What may end a start of the group on all of its ranks."""
_ERRORS: Mapping[FailureKind, type[GroupError]] = MappingProxyType(
    {
        FailureKind.SILENT: LinkTimeoutError,
        FailureKind.REFUSED: PeerRefusedError,
        FailureKind.CLOSED: PeerLostError,
        FailureKind.LEFT: PeerLostError,
        FailureKind.INTEGRITY: IntegrityError,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(CanonicalMessage):
    """One failure; the first that is written is what all ranks report."""

    kind: FailureKind
    text: str
    suspect_from: int | None = None
    """Of an `IntegrityError`."""

    @classmethod
    def of(cls, error: GroupError) -> Self:
        """What a rank has detected of another one, or found wrong."""
        kinds = (kind for kind, each in _ERRORS.items() if isinstance(error, each))
        return cls(
            kind=next(kinds, FailureKind.SILENT),
            text=_cut(str(error.args[0])),
            suspect_from=error.suspect_from if isinstance(error, IntegrityError) else None,
        )

    @classmethod
    def of_own(cls, error: BaseException, *, rank: int, chunk: int) -> Self:
        """Why `rank` leaves; `chunk` is the last one it entered.

        A store can be read by others, so it has the words of none but our own errors, and not
        those of `UserInputError`, which may quote a prompt.
        """
        if isinstance(error, IntegrityError) and not isinstance(error, DamageError):
            return cls.of(error)
        name = type(error).__name__
        where = "" if chunk == NO_CHUNK else f" in chunk {chunk}"
        if isinstance(error, ScopeError) and not isinstance(error, UserInputError):
            said = str(error.args[0]) if error.args else ""
            name = f"{name}: {said}"
            where = "" if re.search(r"\bchunk \d", said) else where
        is_refused = isinstance(error, UserInputError)
        kind = FailureKind.REFUSED if is_refused else FailureKind.LEFT
        return cls(kind=kind, text=_cut(f"rank {rank} failed{where} with {name}"))

    def error(self) -> GroupError:
        """What the other ranks raise."""
        error = _ERRORS[self.kind](self.text)
        if isinstance(error, IntegrityError):
            error.suspect_from = self.suspect_from
        return error


def reported_error(data: bytes) -> GroupError:
    """The error that another rank reported; a `LinkError` too where its report is garbage."""
    try:
        return Failure.decode(data).error()
    except ContractError as error:
        return LinkError(f"a rank was lost, and the report of it cannot be read: {error}")


def _cut(text: str) -> str:
    return text.encode()[:MAX_STRING_BYTES].decode(errors="ignore")
