"""What a rank holds from chunk to chunk is verified in rotation, all of it within M chunks.

Weights, text K/V and modulations have the digests they had when they were loaded or made, cached
rows those of what was written. In `strict` all of it is verified with every chunk. A chunk is
verified after it was computed and before it leaves the rank: what was changed earlier and is still
in use is found with the chunk, or within M.
"""

from scope_contracts.weights import Checksums
from scope_rt.checks import Checks
from scope_rt.integrity.rotation import Digests, Part, Rotation, parts_of
from scope_rt.memory_digest import memory_digest
from scope_rt.models.generator import ChunkGenerator


class DerivedState:
    """What a generator computed once and uses for many chunks: text K/V and modulations.

    Read where it is used, so that a tensor that was replaced counts as changed too.
    """

    def __init__(self, generator: ChunkGenerator) -> None:
        self._generator = generator

    @property
    def noted(self) -> Checksums:
        return self._generator.derived_digests

    def now(self, name: str) -> int:
        return memory_digest(self._generator.derived(name))

    def num_bytes(self, name: str) -> int:
        return self._generator.derived(name).nbytes


class StateAudit:
    """One generator rank's rotation."""

    def __init__(
        self,
        *,
        rank: int,
        weights: Digests,
        generator: ChunkGenerator,
        within: int,
        checks: Checks,
    ) -> None:
        """`within` is M, in chunks."""
        self._rank, self._checks = rank, checks
        self._weights, self._derived = weights, DerivedState(generator)
        self._cache = generator.cache
        self._rotation = Rotation(within)

    def verify_leaving(self, chunk: int) -> None:
        """Verify what `chunk` is about to replace: it was in use, and nobody can tell later.

        Raises:
            IntegrityError: naming rank and tensor.
        """
        self._checks.derived(self._rank, chunk, self._derived.noted, self._derived.now)

    def verify(self, chunk: int, *, is_last: bool = False) -> None:
        """Verify the next share, or all after the last chunk; `chunk` was computed. Reads it once.

        Raises:
            FingerprintError, IntegrityError: naming rank, and weight, tensor, or layer and frame.
        """
        rotation = self._all_parts()
        due = rotation.parts if is_last else rotation.due()
        for digests, check in (
            (self._weights, self._checks.weights),
            (self._derived, self._checks.derived),
        ):
            if names := [part.name for part in due if part.digests is digests]:
                noted = {name: digests.noted[name] for name in names}
                check(self._rank, chunk, noted, digests.now)
        layers = [part.layer for part in due if part.digests is None]
        runs = [range(layer, layer + 1) for layer in layers]
        if layers and max(layers) - min(layers) + 1 == len(layers):
            runs = [range(min(layers), max(layers) + 1)]
        # Rows that the chunk has overwritten were verified before; no layer is read for that.
        damaged = [found for run in (range(0), *runs) for found in self._cache.damaged(run)]
        self._checks.rows(self._rank, chunk, damaged)

    def _all_parts(self) -> Rotation:
        """In an order that stays, found anew when something more was derived."""
        num_layers = self._cache.spec.num_layers
        num_tensors = len(self._weights.noted) + len(self._derived.noted)
        if len(self._rotation.parts) < num_tensors + num_layers:
            size = self._cache.num_bytes // num_layers
            layers = [Part(None, "", layer, size) for layer in range(num_layers)]
            self._rotation.hold([*layers, *parts_of(self._weights), *parts_of(self._derived)])
        return self._rotation
