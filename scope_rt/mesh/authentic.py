"""What a rank says is sealed: it can be neither forged, altered, moved nor said again elsewhere.

Keys follow from the stream's secret, one for each use and each start of the ranks, so that nothing
that was recorded holds later. A seal covers the data and its context: which value, of whom, for
whom, and its number. Without a secret the keys follow from a constant that everybody knows: all is
checked in the same way, which finds damage and mistakes, and keeps nobody out.
"""

import hashlib
import hmac
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from scope_contracts.errors import AuthenticationError
from scope_rt.stream_secret import StreamSecret

SEAL_BYTES = 32
DIGEST_BYTES = 16
"""Of a frame on a link."""
_ABSENT = b"?"
_ATTEMPTS = 8
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Key:
    """A key of HMAC-SHA256, for one use."""

    raw: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: StreamSecret | None) -> Self:
        """The first one, from which all others follow."""
        raw = b"no secret" if secret is None else secret.raw
        return cls(_mac(raw, "scope-rt", b"" if secret is None else b"secret"))

    def derive(self, use: str, data: bytes = b"") -> "Key":
        """Another one, from which this one cannot be found."""
        return Key(_mac(self.raw, f"key: {use}", data))

    def proof(self, context: str, data: bytes = b"") -> bytes:
        """`SEAL_BYTES` that nobody without this key finds."""
        return _mac(self.raw, f"proof: {context}", data)

    def seal(self, context: str, data: bytes) -> bytes:
        """`data` behind its proof."""
        return self.proof(context, data) + data

    def opened(self, context: str, sealed: bytes) -> bytes | None:
        """The data of `seal` with the same key and context; None for anything else."""
        proof, data = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        return data if hmac.compare_digest(proof, self.proof(context, data)) else None


def _mac(key: bytes, context: str, data: bytes) -> bytes:
    name = context.encode()
    return hmac.digest(key, len(name).to_bytes(4, "little") + name + data, "sha256")


class Values(Protocol):
    """The part of a `Store` that sealed values need; neither call waits for a key."""

    def set(self, key: str, value: Any) -> None: ...

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes: ...


class SealedStore:
    """Values of ranks in a store that strangers may write to.

    One that is not sealed for its key counts as absent, and is said once. Whoever writes a value
    later takes its place. No call waits until a value is there.
    """

    def __init__(self, store: Values, key: Key) -> None:
        self._store, self._key = store, key
        self.refused = set[str]()
        """The names under which something stood that no rank of this stream wrote."""

    def write(self, name: str, data: bytes) -> None:
        self._store.set(name, self._key.seal(name, data))

    def read(self, name: str) -> bytes | None:
        """What a rank wrote there; None where none did, or something else stands there now."""
        found = self._store.compare_set(name, _ABSENT, _ABSENT)  # unlike `get`, waits for nothing
        return None if found == _ABSENT else self._opened(name, found)

    def write_first(self, name: str, data: bytes) -> bytes:
        """What a rank wrote there first: `data`, unless another was before this one."""
        sealed, before = self._key.seal(name, data), b""
        for _ in range(_ATTEMPTS):
            found = self._store.compare_set(name, before, sealed)
            opened = self._opened(name, found)
            if opened is not None:
                return opened
            # Where nothing stands by now, what was expected is the answer.
            before = b"" if found == before else found
        return data

    def _opened(self, name: str, found: bytes) -> bytes | None:
        data = self._key.opened(name, found)
        if data is None and name not in self.refused:
            self.refused.add(name)
            _LOG.warning(
                "the store's %s was not written by a rank that knows this stream's secret; it is "
                "ignored; see runbooks/%s.md",
                name,
                AuthenticationError.runbook,
            )
        return data


class GatherSeals:
    """Seals of what each rank of a group tells all others, gather by gather."""

    def __init__(self, key: Key, ranks: Sequence[int], rank: int) -> None:
        """`ranks` are those of the group in its order."""
        self._key, self._ranks, self._rank = key, ranks, rank
        self._num_gathers = 0

    def seal(self, data: bytes) -> bytes:
        """What this rank sends in the next gather."""
        self._num_gathers += 1
        return self._key.seal(self._context(self._rank), data)

    def opened(self, parts: Sequence[bytes]) -> list[bytes]:
        """What the ranks said, from what arrived in this gather, in the order of the group.

        Raises:
            AuthenticationError: naming the rank of which it is not what it said.
        """
        said = []
        for rank, part in zip(self._ranks, parts, strict=True):
            data = self._key.opened(self._context(rank), part)
            if data is None:
                raise AuthenticationError(
                    f"what arrived from rank {rank} is not what a rank of this stream said"
                )
            said.append(data)
        return said

    def _context(self, rank: int) -> str:
        return f"gather {self._num_gathers} of rank {rank}"


class FrameSeals:
    """Keyed digests of the frames between this rank and one other, whose messages are numbered."""

    def __init__(self, key: Key, *, rank: int, peer: int) -> None:
        self._key = key.raw
        self._out, self._in = _way(rank, peer), _way(peer, rank)
        self._num_sent = self._num_arrived = 0

    def sent(self, frames: Sequence[memoryview]) -> list[bytes]:
        """The digests of the next message to the other rank, `DIGEST_BYTES` each."""
        self._num_sent += 1
        return self._digests(self._out, self._num_sent, frames)

    def arrived(self, frames: Sequence[memoryview]) -> list[bytes]:
        """What the digests of the next message from there must be."""
        self._num_arrived += 1
        return self._digests(self._in, self._num_arrived, frames)

    def _digests(self, way: bytes, number: int, frames: Sequence[memoryview]) -> list[bytes]:
        return [
            hashlib.blake2b(
                frame,
                digest_size=DIGEST_BYTES,
                key=self._key,
                salt=number.to_bytes(8, "little") + index.to_bytes(8, "little"),
                person=way,
            ).digest()
            for index, frame in enumerate(frames)
        ]


def _way(sender: int, receiver: int) -> bytes:
    return sender.to_bytes(8, "little") + receiver.to_bytes(8, "little")
