"""`scripts/lab kv_cache_proof`: why keys and values may be cached, shown on numbers one can follow.

First one attention of three channels, every table printed; its numbers are golden values of a test.
Then the same claims on the embedded video model in float64: chunks generated through the cache are
block-causal attention over the whole sequence. The exit code is 1 where a claim does not hold.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_lab.kv_proof_video import VideoProof, prove_on_video
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_runners.command_parser import CommandParser
from scope_runners.exit_codes import FAILED

VIDEO_BAR = 1e-10
_DESCRIPTION = "Show why keys and values may be cached; exit code 1 where a claim does not hold."
_SEED, _CHANNELS, _NEW_TOKENS = 123, 3, 4
_PROMPT = (
    (0.43, 0.15, 0.89),
    (0.55, 0.87, 0.66),
    (0.57, 0.85, 0.64),
    (0.22, 0.58, 0.33),
    (0.77, 0.25, 0.10),
    (0.05, 0.80, 0.55),
)


@dataclass(frozen=True, slots=True)
class Weights:
    """What makes keys, queries and values of a token, `[C, C]` each."""

    keys: Tensor
    queries: Tensor
    values: Tensor


def full_attention(inputs_TC: Tensor, weights: Weights) -> Tensor:
    """Causal attention over all tokens at once: one context vector a token, `[T, C]`."""
    keys, queries = inputs_TC @ weights.keys, inputs_TC @ weights.queries
    future = torch.ones(len(inputs_TC), len(inputs_TC)).triu(1).bool()
    scores = (queries @ keys.T).masked_fill(future, -torch.inf)
    context: Tensor = (scores / _CHANNELS**0.5).softmax(1) @ (inputs_TC @ weights.values)
    return context


def decode(cache: ContiguousCache, token_1C: Tensor, weights: Weights) -> Tensor:
    """The context vector of one new token, `[1, C]`: its own query, key and value, and the cache's
    keys and values of all tokens before it.
    """
    append(cache, token_1C, weights)
    keys, values = (plane[0, :, 0] for plane in cache.view(0))
    scores = token_1C @ weights.queries @ keys.T
    context: Tensor = (scores / _CHANNELS**0.5).softmax(1) @ values
    cache.advance()
    return context


def append(cache: ContiguousCache, tokens_TC: Tensor, weights: Weights) -> None:
    """Open a span and write the tokens' keys and values: rows of batch 1, layer 0, head 0."""
    cache.extend([len(tokens_TC)])
    planes = (tokens_TC @ weights.keys, tokens_TC @ weights.values)
    cache.append(0, *(plane[None, :, None] for plane in planes))


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRows:
    """A copy of what the cache showed at one moment: a row a token, `[rows, C]` each."""

    keys: Tensor
    values: Tensor

    def grew_to(self, later: "CachedRows") -> bool:
        """Whether `later` is these very rows and one more, of keys and of values."""
        pairs = ((self.keys, later.keys), (self.values, later.values))
        return all(torch.equal(old, new[:-1]) for old, new in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProof:
    """Every table; T counts the 6 tokens of the prompt, N the 4 new ones."""

    inputs_TC: Tensor
    new_tokens_NC: Tensor
    weights: Weights
    prompt_context_TC: Tensor
    """The prompt alone."""
    longer_context: Tensor
    """The prompt and one new token, `[T + 1, C]`."""
    cached: tuple[CachedRows, ...]
    """The cache before the first new token, and after each."""
    decoded_NC: Tensor
    """Context vectors of all new tokens, one at a time, through the cache."""
    full_NC: Tensor
    """The same by full attention over everything."""

    @property
    def claims(self) -> dict[str, bool]:
        """What the cache rests on, and whether it is so."""
        return {
            "a new token leaves every earlier context vector as it was": torch.allclose(
                self.prompt_context_TC, self.longer_context[:-1]
            ),
            "a new token leaves every cached key and value as it was: K and V grow by one row": all(
                before.grew_to(after) for before, after in pairwise(self.cached)
            ),
            "the last context vector needs the last query only": torch.allclose(
                self.longer_context[-1], self.decoded_NC[0]
            ),
            "decoding one token at a time equals full attention": torch.allclose(
                self.decoded_NC, self.full_NC
            ),
        }


def prove_on_attention() -> AttentionProof:
    """Run the example."""
    torch.manual_seed(_SEED)
    inputs = torch.tensor(_PROMPT)
    shape = (_CHANNELS, _CHANNELS)
    keys, queries, values = (torch.rand(shape) for _ in range(3))
    weights = Weights(keys=keys, queries=queries, values=values)
    torch.manual_seed(_SEED)
    new_tokens = torch.rand(_NEW_TOKENS, _CHANNELS)
    longer = torch.cat([inputs, new_tokens[:1]])
    cache = ContiguousCache(
        RowFormat.full(heads=1, head_dim=_CHANNELS, dtype=DType.FLOAT32),
        layers=AttnLayerMap.all_of(1),
        batch=1,
        max_tokens=len(inputs) + _NEW_TOKENS,
        device=inputs.device,
    )
    append(cache, inputs, weights)  # prefill: the prompt's keys and values, once and for all
    cache.advance()
    cached, decoded = [rows_of(cache)], []
    for token in new_tokens.split(1):
        decoded.append(decode(cache, token, weights))
        cached.append(rows_of(cache))
    return AttentionProof(
        inputs_TC=inputs,
        new_tokens_NC=new_tokens,
        weights=weights,
        prompt_context_TC=full_attention(inputs, weights),
        longer_context=full_attention(longer, weights),
        cached=tuple(cached),
        decoded_NC=torch.cat(decoded),
        full_NC=full_attention(torch.cat([inputs, new_tokens]), weights)[len(inputs) :],
    )


def rows_of(cache: ContiguousCache) -> CachedRows:
    """A copy, for a view would change with the cache."""
    keys, values = (plane[0, :, 0].clone() for plane in cache.view(0))
    return CachedRows(keys=keys, values=values)


def report(proof: AttentionProof) -> Iterator[str]:
    """The tables, and what each of them shows."""
    yield "One causal attention, 3 channels, a prompt of 6 tokens"
    yield "\nContext vectors of the prompt:"
    yield from _rows(proof.prompt_context_TC)
    yield "\nThe same with one new token. A query sees no later key, so no earlier row moves:"
    yield from _rows(proof.longer_context)
    before, after = proof.cached[:2]
    yield "\nKeys in the cache before and after. Row t is x_t W_k: no other token enters, so K"
    yield "grows by one row (and V likewise):"
    yield from _rows(before.keys)
    yield "   +"
    yield from _rows(after.keys[len(before.keys) :])
    yield "\nSo prefill writes K and V of the prompt, and a step computes one query, one key and"
    yield "one value, appends two rows and reads the rest. Decoding four new tokens through the"
    yield f"cache, which holds {' -> '.join(str(len(rows.keys)) for rows in proof.cached)} rows:"
    yield from _rows(proof.decoded_NC)
    yield "\nThe last four rows of full attention over all ten tokens:"
    yield from _rows(proof.full_NC)
    yield ""
    for claim, holds in proof.claims.items():
        yield f"{'holds' if holds else 'FAILS':<6} {claim}"


def report_video(proof: VideoProof) -> Iterator[str]:
    """What the video model showed."""
    yield (
        f"\nThe embedded video model, float64, {proof.num_chunks} chunks of "
        f"{proof.frames_per_chunk} latent frames, a window of {proof.window_frames}"
    )
    yield "A token sees its own chunk and those before it: causal by blocks. Every step of a chunk"
    yield "rewrites the chunk's own keys; only a finished chunk's keys may be kept, and they are"
    yield "those of its clean latents, at noise level 0. Largest difference between chunks made"
    yield "through the cache and by one mask over the whole sequence, no cache at all:"
    for chunk, difference in enumerate(proof.differences):
        yield f"   chunk {chunk}   {difference:.1e}"
    holds = proof.largest <= VIDEO_BAR
    yield f"{'holds' if holds else 'FAILS':<6} cached generation equals it within {VIDEO_BAR:.0e}"


def _rows(table_TC: Tensor) -> Iterator[str]:
    for row in table_TC.tolist():
        yield "   [" + ", ".join(f"{value:.4f}" for value in row) + "]"


def main(argv: Sequence[str]) -> int:
    """Print both proofs."""
    CommandParser(prog="scripts/lab kv_cache_proof", description=_DESCRIPTION).parse_args(argv)
    attention = prove_on_attention()
    for line in report(attention):
        print(line)
    video = prove_on_video()
    for line in report_video(video):
        print(line)
    holds = all(attention.claims.values()) and video.largest <= VIDEO_BAR
    return 0 if holds else FAILED
