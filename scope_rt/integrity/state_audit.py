"""What a rank holds from chunk to chunk is verified in rotation, all of it within M chunks.

Weights, text K/V and modulations have the digests they had when they were loaded or made, cached
rows those of what was written. In `strict` all of it is verified with every chunk. A chunk is
verified after it was computed and before it leaves the rank: what was changed earlier and is still
in use is found with the chunk, or within M.
"""

from scope_rt.checks import Checks
from scope_rt.integrity.rotation import Part, Rotation, parts_of
from scope_rt.models.generator import ChunkGenerator
from scope_rt.tensor_digests import TensorDigests


class StateAudit:
    """One generator rank's rotation."""

    def __init__(
        self,
        *,
        rank: int,
        weights: TensorDigests,
        generator: ChunkGenerator,
        within: int,
        checks: Checks,
    ) -> None:
        """`within` is M, in chunks."""
        self._rank, self._checks = rank, checks
        self._weights, self._derived = weights, generator.derived
        self._held = ((self._weights, checks.weights), (self._derived, checks.derived))
        self._cache = generator.cache
        self._rotation = Rotation(within)

    def verify_leaving(self, chunk: int) -> None:
        """Verify what `chunk` is about to replace: it was in use, and nobody can tell later.

        Raises:
            IntegrityError: naming rank and tensor.
        """
        changed = self._derived.changed(self._derived.names)
        self._checks.derived(self._rank, chunk, changed)

    def verify(self, chunk: int, *, is_last: bool = False) -> None:
        """Verify the next share, or all after the last chunk; `chunk` was computed. Reads it once.

        Raises:
            FingerprintError, IntegrityError: naming rank, and weight, tensor, or layer and frame.
        """
        rotation = self._all_parts()
        due = rotation.parts if is_last else rotation.due()
        for digests, check in self._held if due else ():
            changed = digests.changed(part.name for part in due if part.digests is digests)
            check(self._rank, chunk, changed)
        layers = [part.layer for part in due if part.digests is None]
        runs = [range(layer, layer + 1) for layer in layers]
        if layers and max(layers) - min(layers) + 1 == len(layers):
            runs = [range(min(layers), max(layers) + 1)]
        # Rows that the chunk has overwritten were verified before; no layer is read for that.
        damaged = [found for run in (range(0), *runs) for found in self._cache.damaged(run)]
        if damaged:
            self._checks.rows(self._rank, chunk, damaged)

    def _all_parts(self) -> Rotation:
        """In an order that stays, found anew when something more was derived."""
        num_layers = self._cache.spec.num_layers
        num_tensors = len(self._weights) + len(self._derived)
        if len(self._rotation.parts) < num_tensors + num_layers:
            size = self._cache.num_bytes // num_layers
            layers = [Part(None, "", layer, size) for layer in range(num_layers)]
            self._rotation.hold([*layers, *parts_of(self._weights), *parts_of(self._derived)])
        return self._rotation
