"""All that one generator rank verifies around a chunk, and what it tells the other ranks of it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from hashlib import blake2b

from torch import Tensor

from scope_contracts.envelope import PPEnvelope
from scope_contracts.integrity import IntegrityLevel, suspect_from
from scope_contracts.parity import HASH_BYTES
from scope_rt.checks import Checks
from scope_rt.integrity.arithmetic import ArithmeticCheck
from scope_rt.integrity.audit_plan import CallPlanner
from scope_rt.integrity.canary import ROTATIONS, Canary
from scope_rt.integrity.edges import EdgeCheck
from scope_rt.integrity.evidence import RankEvidence
from scope_rt.integrity.kept_frames import KeptFrames
from scope_rt.integrity.made_state import MadeState
from scope_rt.integrity.pooled_rows import PooledRows
from scope_rt.integrity.state_audit import StateAudit
from scope_rt.models.generator import ChunkGenerator
from scope_rt.tensor_digests import TensorDigests
from scope_rt.tensors import bytes_of

AUDITED_CHUNKS = 32
"""In `default`, one call in one chunk of so many has a token recomputed in all layers, and what
enters and leaves the blocks."""


class Verifier:
    """`begin` before a chunk is generated, `end` after it; both on the thread that generates."""

    def __init__(
        self,
        generator: ChunkGenerator,
        *,
        weights: TensorDigests,
        rank: int,
        level: IntegrityLevel,
        within: int,
        checks: Checks,
    ) -> None:
        """Build it when the weights are loaded and verified. `within` is M, in chunks."""
        is_strict = level is IntegrityLevel.STRICT
        self._generator = generator
        self._within = 1 if is_strict else within
        self._first_chunk: int | None = None
        """Of this process: what it holds was compared with the checkpoint before, or made since."""
        self._state = StateAudit(
            rank=rank,
            weights=weights,
            generator=generator,
            within=self._within,
            checks=checks,
        )
        self._every, self._is_watched = 1 if is_strict else AUDITED_CHUNKS, False
        """Chunks to one whose calls are watched, and whether this one is."""
        self._arithmetic = ArithmeticCheck(
            generator, level=level, rank=rank, checks=checks, every=self._every
        )
        self._made = MadeState(generator, rank=rank, checks=checks)
        self._edges = EdgeCheck(generator, rank=rank, checks=checks, every=self._every)
        self._kept_frames = KeptFrames(generator, rank=rank, checks=checks)
        self._pooled_rows = PooledRows(generator, rank=rank, checks=checks, is_strict=is_strict)
        self._planner = CallPlanner(recaches=generator.recaches)
        self._canary = Canary(generator, every=ROTATIONS * within)
        self._ran_canary = False
        self._canary_from = self._canary_chunk = 0
        """Before which chunks it ran: the run before the last one, and that one."""

    def begin(self, envelope: PPEnvelope, tensors: Mapping[str, Tensor]) -> None:
        """Verify what a prompt change replaces; run the fixed chunk where that is due, which takes
        its own all-reduces; watch the chunk.

        Raises:
            IntegrityError: naming the rank and what is wrong.
        """
        chunk = envelope.chunk_index
        if self._first_chunk is None:
            self._first_chunk = self._canary_chunk = chunk
        if envelope.reset_crossattn_cache:
            with self._state_vouches_for(chunk - self._within):
                self._state.verify_leaving(chunk)
        self._ran_canary = self._canary.is_due(chunk)
        if self._ran_canary:
            self._canary.run()
            self._canary_from, self._canary_chunk = self._canary_chunk, chunk
        self._made.begin(envelope, tensors)
        self._is_watched = not chunk % self._every or envelope.do_kv_recompute
        plans = self._planner.calls(envelope, tensors) if self._is_watched else []
        self._edges.begin(envelope, tensors, plans)
        if self._is_watched:
            self._arithmetic.begin(envelope, tensors, plans)
        else:
            self._arithmetic.abandon()
            self._planner.skip(envelope)

    def end(self, chunk: int, latents_BFCHW: Tensor, latents_sha256: str) -> RankEvidence:
        """Verify what was computed, and the share of the state that is due.

        `latents_BFCHW` are the chunk's, on the CPU, `latents_sha256` is of their bytes.

        Raises:
            FingerprintError, IntegrityError: naming the rank and what is wrong.
        """
        # First: it knows the cause, of which the other sees the effect.
        with self._state_vouches_for(chunk - self._within):
            self._state.verify(chunk)
        self._made.end()
        if self._is_watched:
            with suspect_from(self._arithmetic.suspect_from):
                self._arithmetic.end()
        masses = self._arithmetic.masses if self._is_watched else None
        self._kept_frames.end(chunk, masses=masses, seen_from=self._arithmetic.suspect_from)
        self._pooled_rows.end(chunk)
        self._edges.end(latents_BFCHW)
        return RankEvidence(
            result=self._result(latents_sha256),
            canary=self._canary.digest if self._ran_canary else "",
            expected_canary=self._canary.expected if self._ran_canary else "",
            canary_from=self._canary_from,
            sums=(*self._made.report(), *self._arithmetic.report(), *self._kept_frames.report()),
            sums_from=self._arithmetic.suspect_from,
        )

    def _result(self, latents_sha256: str) -> str:
        """With the noise, where another rank has drawn it as well."""
        if self._generator.model.group.size == 1:
            return latents_sha256
        digest = blake2b(latents_sha256.encode(), digest_size=HASH_BYTES)
        for noise in self._generator.noise_drawn:
            digest.update(bytes_of(noise))
        return digest.hexdigest()

    def close(self, chunk: int) -> None:
        """Verify all state once more after the last chunk: no later one would.

        Raises:
            FingerprintError, IntegrityError: naming the rank and what is wrong.
        """
        with self._state_vouches_for(chunk + 1 - self._within):
            self._state.verify(chunk, is_last=True)

    def _state_vouches_for(self, chunk: int) -> AbstractContextManager[None]:
        """What is found in here speaks against no chunk up to this one, after which all state was
        verified, nor against one that this process did not make."""
        return suspect_from(max(chunk + 1, self._first_chunk or 0))
