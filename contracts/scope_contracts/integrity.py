"""What must hold of numbers and state, and how much a stream spends on verifying it."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum

from scope_contracts.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class _Suspects:
    first_chunk: int

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, IntegrityError):
            error.suspect_from = self.first_chunk


def suspect_from(first_chunk: int) -> AbstractContextManager[None]:
    """An `IntegrityError` in here speaks against no chunk before `first_chunk`."""
    return _Suspects(first_chunk)


class IntegrityLevel(StrEnum):
    """What is verified, and before or after a chunk is shown."""

    OFF = "off"
    """The contract alone: plans and settings, not numbers."""
    DEFAULT = "default"
    """Values and replicated results before a chunk is shown; state and arithmetic in rotation."""
    STRICT = "strict"
    """All state, and every token of every layer and call, before a chunk is shown."""


def check_derived(rank: int, chunk: int, changed: Sequence[str]) -> None:
    """Refuse what `rank` computed once, uses for many chunks, and holds otherwise now.

    Raises:
        IntegrityError: naming the first of those that `changed`.
    """
    if changed:
        raise IntegrityError(f"chunk {chunk}: rank {rank}: {changed[0]} is not what was computed")


def check_rows(rank: int, chunk: int, damaged: Sequence[tuple[int, int]]) -> None:
    """Refuse a cache of `rank` with `damaged` rows, given as layer and latent frame.

    Raises:
        IntegrityError: naming the first of them.
    """
    if damaged:
        layer, frame = damaged[0]
        others = f" ({len(damaged)} such frames in all)" if len(damaged) > 1 else ""
        raise IntegrityError(
            f"chunk {chunk}: rank {rank}: cached rows of layer {layer}, latent frame {frame}, are "
            f"not what was written{others}"
        )


def check_kept(where: str, what: str, *, now: str, noted: str) -> None:
    """Compare the digest of `what` rank0 keeps with the one that was noted when it was made.

    `where` begins the sentence: the chunk, as a rule.

    Raises:
        IntegrityError: naming it.
    """
    if now != noted:
        raise IntegrityError(f"{where}: rank 0: {what} changed")


def check_planned(chunk: int, what: str, *, got: object, asked: object) -> None:
    """Refuse a plan of rank0 that is not what was `asked` for.

    Raises:
        IntegrityError: naming `what` differs.
    """
    if got != asked:
        raise IntegrityError(f"chunk {chunk}: rank 0: plans {what} {got}, asked for was {asked}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """What tells a chunk that is handed out from all others."""

    chunk_index: int
    cache_epoch: int
    latents_sha256: str
    frames_crc32: int
    """0 where frames are the very array that was decoded, and nobody asked for more."""


def check_emitted(chunk: Emitted, *, decoded: Emitted | None, before: Emitted | None) -> None:
    """Refuse to hand out anything but the oldest chunk that was `decoded` and not handed out.

    `before` is what was handed out last. After it comes the next index, or a later epoch.

    Raises:
        IntegrityError: naming what differs.
    """
    if decoded is None:
        raise IntegrityError(f"chunk {chunk.chunk_index}: rank 0: is handed out again")
    for name in ("chunk_index", "cache_epoch", "latents_sha256", "frames_crc32"):
        got, want = getattr(chunk, name), getattr(decoded, name)
        if got != want:
            raise IntegrityError(
                f"chunk {decoded.chunk_index}: rank 0: hands out {name} {got}, decoded was {want}"
            )
    if before is None or chunk.cache_epoch > before.cache_epoch:
        return
    got, want = (chunk.cache_epoch, chunk.chunk_index), (before.cache_epoch, before.chunk_index + 1)
    if got != want:
        raise IntegrityError(
            f"chunk {chunk.chunk_index}: rank 0: hands out epoch, chunk {got}, want {want}"
        )


def check_replicated(chunk: int, digests: Sequence[str], ranks: Sequence[int]) -> None:
    """Compare what all `ranks` must have computed alike: the noise they drew and their result.

    Raises:
        IntegrityError: naming the ranks that are alone with theirs, where most agree.
    """
    if len(set(digests)) == 1:
        return
    common, count = Counter(digests).most_common(1)[0]
    if 2 * count > len(digests):
        odd = [str(rank) for rank, each in zip(ranks, digests, strict=True) if each != common]
        who = f"rank{'s' if len(odd) > 1 else ''} {', '.join(odd)} computed another result"
    else:
        who = f"ranks {', '.join(map(str, ranks))} computed different results"
    raise IntegrityError(f"chunk {chunk}: {who}, though all must compute the same")


def check_numerics(rank: int, chunk: int, *, now: Sequence[str], at_start: Sequence[str]) -> None:
    """Refuse a `rank` whose process-wide numeric settings have changed since it started.

    Raises:
        IntegrityError: naming the settings that changed.
    """
    if now != at_start:
        pairs = zip(at_start, now, strict=False)
        changed = [f"{new} (was {old})" for old, new in pairs if old != new]
        raise IntegrityError(
            f"chunk {chunk}: rank {rank}: numeric settings changed: {', '.join(changed)}; only "
            "the start may set them"
        )
