"""What is handed out is what was decoded: each chunk once, in order, with its own numbers.

The last thing that happens to a chunk before the consumer has it.
"""

from collections import deque

from scope_contracts.integrity import Emitted, suspect_from
from scope_rt.checks import Checks
from scope_rt.control.chunk import Chunk
from scope_rt.control.proved_latents import ProvedLatents
from scope_rt.tensors import bytes_of, crc32_of


class Emission:
    """Chunks between their decode and their consumer."""

    def __init__(self, checks: Checks, proved: ProvedLatents) -> None:
        self._checks, self._proved = checks, proved
        self._decoded: deque[Chunk] = deque()
        self._last: Emitted | None = None

    def begin(self) -> None:
        """Another stream begins: what was decoded and not handed out is forgotten."""
        self._decoded.clear()
        self._last = None

    def decoded(self, chunk: Chunk) -> None:
        """`chunk` is to be handed out after those before it."""
        self._decoded.append(chunk)

    def verify(self, chunk: Chunk) -> None:
        """Verify that `chunk`, about to be handed out, is the one whose turn it is.

        Reads its latents, and its frames in `strict` or where they are another array.

        Raises:
            IntegrityError: naming the chunk and what differs.
        """
        due = self._decoded.popleft() if self._decoded else None
        is_read = due is None or chunk.frames is not due.frames or due.frames_crc32 is not None
        sha256 = self._proved.sha256_of(bytes_of(chunk.latents), noted=chunk.latents_sha256)
        got = _emitted(chunk, sha256, crc32_of(chunk.frames) if is_read else 0)
        want = got if chunk is due and not is_read and sha256 == due.latents_sha256 else None
        if due is not None and want is None:
            crc32 = due.frames_crc32
            if crc32 is None:
                crc32 = crc32_of(due.frames) if is_read else 0
            want = _emitted(due, due.latents_sha256, crc32)
        # Nobody has the one that is due, and it can be decoded again.
        with suspect_from((due or chunk).chunk_index + 1):
            self._checks.emitted(got, decoded=want, before=self._last)
        self._last = got


def _emitted(chunk: Chunk, latents_sha256: str, frames_crc32: int) -> Emitted:
    return Emitted(
        chunk_index=chunk.chunk_index,
        cache_epoch=chunk.cache_epoch,
        latents_sha256=latents_sha256,
        frames_crc32=frames_crc32,
    )
