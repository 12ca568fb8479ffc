"""FLOPs and bytes of a chunk and of each layer of evidence, counted from shapes.

Counted of generation: products of linear layers and attention; the weights once a call, what goes
into and out of these products, and the cached rows that attention reads. Norms, gates and other
operations number by number are left out, which makes the shares of evidence larger. Bytes are those
of the memory that holds the model: what a digest makes of a piece stays in a cache. A chunk in the
middle is meant: its window is full, so as many rows leave as are written, and its text is not new.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from scope_contracts.integrity import IntegrityLevel
from scope_rt.integrity.canary import ROTATIONS
from scope_rt.integrity.edges import NOISE_EVERY
from scope_rt.integrity.linear_sums import NUM_SUMS
from scope_rt.integrity.verifier import AUDITED_CHUNKS
from scope_rt.models.config import CausalWanConfig

WAN_1_3B = CausalWanConfig(
    num_attention_heads=12,
    attention_head_dim=128,
    in_channels=16,
    out_channels=16,
    text_dim=4096,
    freq_dim=256,
    ffn_dim=8960,
    num_layers=30,
)
_CANARY_CALLS, _CANARY_TOKENS = 2, 8
_COLUMNS, _PASSED = 5 * 4 + 4 * 9 + 3 * 4, 14
"""Sums of what passes in a block, and tensors of the model's width that pass."""
_FLOAT32 = 4
"""Bytes of a number that sums are taken of: stacked, summed and measured; scores are written,
normed in place and used."""
_OPERATIONS_A_DRAW = 100
"""Of a normal number by Philox and Box-Muller, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What is counted."""

    model: CausalWanConfig
    frame_tokens: int
    chunk_frames: int
    window_frames: int
    """With the chunk's own."""
    num_calls: int
    """With the clean pass."""
    text_tokens: int
    number_bytes: int
    """Of weights and cache."""
    verify_within: int = 32

    @property
    def tokens(self) -> int:
        return self.frame_tokens * self.chunk_frames

    @property
    def keys(self) -> int:
        return self.frame_tokens * self.window_frames

    @property
    def patch_numbers(self) -> int:
        return 4 * self.model.in_channels

    @property
    def latent_numbers(self) -> int:
        return self.tokens * self.patch_numbers


WAN_AT_480P = Shapes(
    model=WAN_1_3B,
    frame_tokens=1560,
    chunk_frames=3,
    window_frames=21,
    num_calls=5,
    text_tokens=512,
    number_bytes=2,
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one chunk."""

    name: str
    flops: float
    bytes_moved: float


def num_weights(model: CausalWanConfig) -> int:
    """Numbers of a model's weights."""
    d, f = model.dim, model.ffn_dim
    block = 8 * (d * d + d) + 4 * d + 2 * d * f + f + d + 6 * d + 2 * d
    text = model.text_dim * d + d + d * d + d
    time = model.freq_dim * d + d + d * d + d + 6 * (d * d + d)
    patch, head = 4 * model.in_channels * (d + 1), 4 * model.out_channels * (d + 1)
    return model.num_layers * block + text + time + patch + d - 4 * model.in_channels + head + 2 * d


def products(shapes: Shapes) -> Iterator[tuple[int, int, int]]:
    """Tokens, numbers in and numbers out of each linear layer of one call."""
    model, tokens = shapes.model, shapes.tokens
    for _ in range(model.num_layers):
        yield from [(tokens, model.dim, model.dim)] * 6  # the text's keys and values are made once
        yield tokens, model.dim, model.ffn_dim
        yield tokens, model.ffn_dim, model.dim
    yield tokens, shapes.patch_numbers, model.dim
    yield tokens, model.dim, shapes.patch_numbers


def linear_flops(shapes: Shapes) -> int:
    """Of one call."""
    return sum(2 * num * inside * outside for num, inside, outside in products(shapes))


def attention_flops(shapes: Shapes) -> int:
    """Of one call: over the window, and over the text."""
    seen = shapes.keys + shapes.text_tokens
    return 4 * shapes.model.num_layers * shapes.tokens * seen * shapes.model.dim


def generation(shapes: Shapes) -> Cost:
    """All calls of a chunk."""
    model = shapes.model
    numbers = num_weights(model)
    numbers += sum(num * (inside + outside) for num, inside, outside in products(shapes))
    q_k_v_out = 2 * (shapes.tokens + shapes.keys) + 2 * (shapes.tokens + shapes.text_tokens)
    numbers += model.num_layers * model.dim * q_k_v_out
    flops = linear_flops(shapes) + attention_flops(shapes)
    times = shapes.num_calls
    return Cost("generation", times * flops, times * numbers * shapes.number_bytes)


def rows_written(shapes: Shapes) -> int:
    """Numbers of keys and values that a chunk adds to the cache."""
    return 2 * shapes.model.num_layers * shapes.tokens * shapes.model.dim


def state_numbers(shapes: Shapes) -> int:
    """Numbers of all that is held from chunk to chunk: weights, cache, text K/V, modulations."""
    model = shapes.model
    cached = 2 * model.num_layers * (shapes.keys + shapes.text_tokens) * model.dim
    modulations = shapes.num_calls * (6 * model.num_layers + 2) * model.dim
    return num_weights(model) + cached + modulations


def evidence(shapes: Shapes, level: IntegrityLevel) -> Iterator[Cost]:
    """Each layer's share of a chunk at `level`."""
    is_strict = level is IntegrityLevel.STRICT
    size, num_rows, state = shapes.number_bytes, rows_written(shapes), state_numbers(shapes)
    yield Cost("rows digested as written", 2 * num_rows, num_rows * size)
    yield Cost("rows verified before replaced", 2 * num_rows, num_rows * size)
    within = 1 if is_strict else shapes.verify_within
    yield Cost("state in rotation", 2 * state / within, state * size / within)
    yield _blocks(shapes, level)
    calls = shapes.num_calls if is_strict else 1 / AUDITED_CHUNKS
    yield _edges(shapes, calls=calls)
    draws = shapes.latent_numbers * (shapes.num_calls - 1 if is_strict else 1 / NOISE_EVERY)
    yield Cost("noise drawn again", _OPERATIONS_A_DRAW * draws, 4 * draws)
    compared = shapes.latent_numbers * (shapes.num_calls - 1)
    yield Cost("results compared between ranks", 2 * compared, 4 * compared)
    yield Cost("values", 4 * shapes.latent_numbers, 12 * shapes.latent_numbers)
    yield _canary(shapes)


def _blocks(shapes: Shapes, level: IntegrityLevel) -> Cost:
    """All tokens of all layers and calls, or one token of all layers in one call in turn.

    Attention to the sums of values, the text's likewise, sums and lengths of what passes, and the
    chunk's rows compared with those given, as attention saw them and as they were kept.
    """
    is_strict = level is IntegrityLevel.STRICT
    times = shapes.model.num_layers * (shapes.num_calls if is_strict else 1 / AUDITED_CHUNKS)
    tokens, d, f = shapes.tokens if is_strict else 1, shapes.model.dim, shapes.model.ffn_dim
    scores = tokens * (shapes.keys + shapes.text_tokens)
    rows, passed = 2 * shapes.keys * d, tokens * (_PASSED * d + f)
    compared = 2 * 2 * 2 * shapes.tokens * d
    flops = 2 * scores * (d + 2 * NUM_SUMS * shapes.model.num_attention_heads)
    flops += 2 * NUM_SUMS * rows + 2 * tokens * (_COLUMNS * d + 2 * NUM_SUMS * f)
    flops += 2 * passed + compared
    size, taken = shapes.number_bytes, _FLOAT32 * (3 if shapes.number_bytes == _FLOAT32 else 5) / 2
    moved = rows * (size + taken) + passed * (size + 3 * _FLOAT32) + compared * size
    moved += _FLOAT32 * (4 * scores * shapes.model.num_attention_heads + 8 * tokens * f)
    return Cost("blocks computed again", times * flops, times * moved)


def _edges(shapes: Shapes, *, calls: float) -> Cost:
    """Patch embedding and head of so many calls."""
    d, patch = shapes.model.dim, shapes.patch_numbers
    flops = 2 * 2 * shapes.tokens * patch * d
    numbers = 2 * shapes.tokens * (patch + d) + 2 * patch * d
    return Cost(
        "what enters and leaves blocks", calls * flops, calls * numbers * shapes.number_bytes
    )


def _canary(shapes: Shapes) -> Cost:
    """The fixed chunk: next to no tokens, so that its weights are what it costs."""
    model, every = shapes.model, ROTATIONS * shapes.verify_within
    numbers = num_weights(model) * _CANARY_CALLS / every
    return Cost("fixed chunk", 2 * _CANARY_TOKENS * numbers, numbers * shapes.number_bytes)


def table(shapes: Shapes) -> str:
    """What each layer costs at both levels, as shares of generation."""
    whole = generation(shapes)
    levels = (IntegrityLevel.DEFAULT, IntegrityLevel.STRICT)
    titles = [f"{level} {what}" for level in levels for what in ("FLOP", "B")]
    row = "| {:<30} | {:>12} | {:>12} | {:>12} | {:>12} |".format
    lines = [
        f"A chunk of {shapes.tokens} tokens, a window of {shapes.window_frames} frames: generation "
        f"is {whole.flops / 1e12:.1f} TFLOP and moves {whole.bytes_moved / 1e9:.1f} GB.",
        "",
        row("share of generation", *titles),
        f"|{'-' * 32}|" + 4 * f"{'-' * 13}:|",
    ]
    by_level = [list(evidence(shapes, level)) for level in levels]
    sums = [
        Cost("**sum**", sum(c.flops for c in costs), sum(c.bytes_moved for c in costs))
        for costs in by_level
    ]
    for costs in (*zip(*by_level, strict=True), tuple(sums)):
        shares = [
            f"{share:.3%}"
            for cost in costs
            for share in (cost.flops / whole.flops, cost.bytes_moved / whole.bytes_moved)
        ]
        lines.append(row(costs[0].name, *shares))
    return "\n".join(lines)
