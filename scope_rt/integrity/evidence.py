"""What a generator rank tells the others of a chunk that it has verified."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scope_contracts.arithmetic import ReducedSum
from scope_contracts.errors import WireError, mismatch
from scope_contracts.wire import CanonicalMessage

_LENGTH_BYTES = 4
_SUMS_A_PAGE = 128
"""A message holds no more than 256 entries and 64 KiB; a large model in strict has 750 sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence(CanonicalMessage):
    """What ranks compare after a chunk."""

    result: str
    """Digest of the noise that was drawn and of the latents, in hexadecimal: equal on all ranks."""
    canary: str = ""
    """Digest of the fixed chunk; empty where it was not run."""
    expected_canary: str = ""
    """Of its first run."""
    canary_from: int = 0
    """The first chunk since its last run."""
    sums: tuple[ReducedSum, ...] = ()
    """Of the all-reduces that were watched."""
    sums_from: int = 0
    """The first chunk since they were watched last."""


def encode_evidence(evidence: RankEvidence) -> bytes:
    """Messages one after another, each behind its length in 4 bytes; the sums go by pages."""
    sums = evidence.sums
    pages = [sums[at : at + _SUMS_A_PAGE] for at in range(0, len(sums), _SUMS_A_PAGE)] or [()]
    messages = [replace(evidence, sums=page).encode() for page in pages]
    return b"".join(len(data).to_bytes(_LENGTH_BYTES, "little") + data for data in messages)


def decode_evidence(data: bytes) -> RankEvidence:
    """What another rank encoded. Raises `FieldError` or `WireError`."""
    pages = [RankEvidence.decode(page) for page in _pages(data)]
    sums = tuple(each for page in pages for each in page.sums)
    if not pages or any(replace(page, sums=()) != replace(pages[0], sums=()) for page in pages):
        raise WireError(mismatch("a rank's evidence", got=pages[:2], want="pages of one chunk"))
    return replace(pages[0], sums=sums)


def _pages(data: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        end = start + _LENGTH_BYTES
        end += int.from_bytes(data[start:end], "little")
        if not start + _LENGTH_BYTES < end <= len(data):
            raise WireError(mismatch("a rank's evidence", got=f"{len(data)} bytes", want="whole"))
        yield data[start + _LENGTH_BYTES : end]
        start = end
