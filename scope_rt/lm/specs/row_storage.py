"""How a sequence's rows are stored decides how many there are: each way counts its own.

A count of rows is summed over layers: one row is one token's in one layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scope_contracts.errors import UserInputError, mismatch
from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.kv_cache.row_view import view_bytes
from scope_rt.lm.specs.layer_groups import LayerGroup, layer_groups

BLOCK_SIZE = 16
"""Tokens of a block, where nobody says."""
PREFILL_CHUNK = 512
"""Tokens of a prompt that the decode loop feeds at once, where nobody says."""
Windows = Sequence[int | None]
"""Tokens that each attention layer sees, its own included; None sees all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCount:
    """Rows over all layers."""

    per_sequence: int
    shared: int = 0
    """Held once by all sequences together."""
    because: str
    """Of `per_sequence`, as a product."""


class RowStorage(Protocol):
    """A way to store rows, by its sizes."""

    @property
    def lossless(self) -> str:
        """What `--kv-cache` calls it with all bits."""
        ...

    @property
    def encoded(self) -> str:
        """What `--kv-cache` calls it before `:CODEC`."""
        ...

    def count(self, windows: Windows, max_tokens: int) -> RowCount:
        """Rows that are allocated for sequences of `max_tokens`."""
        ...

    def marks(self, dtype: DType) -> int:
        """Bytes beside each row, which say what it is."""
        ...

    def working(self, rows: RowFormat, windows: Windows, max_tokens: int) -> tuple[int, str]:
        """Bytes of a sequence beside the cache while one layer attends, and what they are."""
        ...


@dataclass(frozen=True, slots=True)
class Contiguous:
    """Every layer has room for every token."""

    lossless = "contiguous"
    encoded = "quantized"

    def count(self, windows: Windows, max_tokens: int) -> RowCount:
        num_layers = len(windows)
        because = f"{num_layers} layers x {max_tokens:,} rows"
        return RowCount(per_sequence=num_layers * max_tokens, because=because)

    def marks(self, dtype: DType) -> int:
        return 0

    def working(self, rows: RowFormat, windows: Windows, max_tokens: int) -> tuple[int, str]:
        num_bytes = max_tokens * view_bytes(rows, is_gathered=False)
        return num_bytes, f"{max_tokens:,} rows, decoded for attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged:
    """Blocks of one pool; layers with a window give theirs back. A block more stays zero.

    Raises `UserInputError` for a size below 1.
    """

    lossless = encoded = "paged"

    block_size: int = BLOCK_SIZE
    prefill_chunk: int = PREFILL_CHUNK
    """Tokens that a sequence grows by at once."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.prefill_chunk < 1:
            got = (self.block_size, self.prefill_chunk)
            raise UserInputError(mismatch("block size and chunk", got=got, want="at least 1"))

    def count(self, windows: Windows, max_tokens: int) -> RowCount:
        groups = layer_groups(windows)
        num_layers = len(groups[0].slots)
        num_blocks = sum(self._blocks(group, max_tokens) for group in groups)
        return RowCount(
            per_sequence=num_blocks * self.block_size * num_layers,
            shared=self.block_size * num_layers,
            because=f"{num_blocks:,} blocks x {self.block_size} rows in {num_layers} layers",
        )

    def marks(self, dtype: DType) -> int:
        return 0

    def working(self, rows: RowFormat, windows: Windows, max_tokens: int) -> tuple[int, str]:
        held = max(self._blocks(group, max_tokens) for group in layer_groups(windows))
        visible = min(max_tokens, held * self.block_size)
        verb = "gathered" if rows.codec is CodecKind.IDENTITY else "gathered and decoded"
        num_bytes = visible * view_bytes(rows, is_gathered=True)
        return num_bytes, f"{visible:,} rows, {verb} for attention"

    def _blocks(self, group: LayerGroup, max_tokens: int) -> int:
        return group.most_blocks(max_tokens, block_size=self.block_size, at_once=self.prefill_chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicting:
    """Heavy hitters (Zhang et al. 2023): rows leave, each with its column, its score and a flag.

    Raises `UserInputError` for a size below 1.
    """

    lossless = encoded = "h2o"

    keep: int
    """Rows a layer holds between steps: sinks + budget + recent + evict_every - 1."""
    prefill_chunk: int | None = None
    """Tokens of a prompt that are fed at once; None feeds it whole."""

    def __post_init__(self) -> None:
        if self.keep < 1 or (self.prefill_chunk is not None and self.prefill_chunk < 1):
            got = (self.keep, self.prefill_chunk)
            raise UserInputError(mismatch("rows kept and chunk", got=got, want="at least 1"))

    def count(self, windows: Windows, max_tokens: int) -> RowCount:
        num_layers, kept = len(windows), min(self.keep, max_tokens)
        because = f"{num_layers} layers x {kept:,} rows"
        return RowCount(per_sequence=num_layers * kept, because=because)

    @staticmethod
    def marks(dtype: DType) -> int:
        score = max(dtype.num_bytes, DType.FLOAT32.num_bytes)
        return DType.INT64.num_bytes + DType.BOOL.num_bytes + score

    def working(self, rows: RowFormat, windows: Windows, max_tokens: int) -> tuple[int, str]:
        """New rows join old ones in new memory; then old memory goes, and the view is decoded.

        The old rows are in the cache's own count.
        """
        num_rows, kept = self.rows_at_once(max_tokens), min(self.keep, max_tokens)
        stored = rows.bytes_per_row + self.marks(rows.dtype)
        num_bytes = num_rows * stored
        if viewed := num_rows * view_bytes(rows, is_gathered=False):
            fed = self.fed_at_once(max_tokens)
            joining = fed if num_rows > fed else 0  # encoded, and let go after the view
            num_bytes = max(num_bytes, (num_rows - kept + joining) * stored + viewed)
        return num_bytes, f"{num_rows:,} rows of a prefill, before any leaves"

    def fed_at_once(self, max_tokens: int) -> int:
        """Most tokens of one step."""
        return min(max_tokens, self.prefill_chunk or max_tokens)

    def rows_at_once(self, max_tokens: int) -> int:
        """Rows that the tokens of that step attend to, their own included."""
        return min(max_tokens, self.keep + self.fed_at_once(max_tokens))
