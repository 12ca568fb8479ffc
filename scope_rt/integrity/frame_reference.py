"""Which frames a chunk sees and keeps, written out from the cache's sizes and what was attended to.

Nothing here calls what streams call: slot policies and their arithmetic are under test.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from scope_contracts.arithmetic import LAMBDA
from scope_contracts.cache_spec import CacheKind, KVCacheSpec
from scope_rt.integrity.edge_reference import Estimate
from scope_rt.integrity.oracle_attention import EXP_ROUNDINGS, largest_of
from scope_rt.integrity.tolerance import Rounding
from scope_rt.integrity.workspace import WORKSPACE_BYTES
from scope_rt.kv_cache.frame_cache import WriteWindow

_KNOWN = (
    *(CacheKind.RING, CacheKind.QUANTIZED, CacheKind.PAGED),
    *(CacheKind.HIERARCHICAL, CacheKind.H2O),
)
"""Others are a user's own: only their code says what they show."""
_SAME_WEIGHT = 1e-12
"""Two ways to work out the logarithm of a small power differ by less."""


def frames_by_age(spec: KVCacheSpec, end_frame: int) -> list[tuple[int, float]]:
    """What a chunk that ends before `end_frame` sees where age alone decides, in order.

    Each frame, a gist as the first one it stands for, with what is added to its scores.
    """
    sinks, first_new = spec.sink_frames, max(spec.sink_frames, end_frame - spec.window_frames)
    seen = [*range(min(sinks, end_frame)), *range(first_new, end_frame)]
    shown, num_behind = [(frame, 0.0) for frame in seen], first_new - sinks
    for level in range(1, spec.gists.num_levels + 1):
        pooled = spec.gists.group**level
        num_gists = math.ceil(num_behind / spec.gists.group)  # of all that lies behind
        num_older = max(0, num_gists - spec.gists.group)
        weight = -2 * math.log(pooled)
        shown += [(sinks + number * pooled, weight) for number in range(num_older, num_gists)]
        num_behind = num_older
    return sorted(shown)


def num_other(spec: KVCacheSpec, window: WriteWindow) -> int:
    """How many frames of `window` are not what its end says, or weigh otherwise; 0 of a kind that
    is not known here."""
    if spec.kind not in _KNOWN:
        return 0
    end_frame = window.indices.global_end_index // spec.frame_tokens
    weights = window.log_weights or [0.0] * len(window.frames_in_view)
    shown = sorted(zip(window.frames_in_view, weights, strict=True))
    want = frames_by_age(spec, end_frame)
    if spec.kind is CacheKind.H2O:  # which others stay, scores say
        surely = {*range(spec.sink_frames), *range(end_frame - spec.recent_frames, end_frame)}
        num_lacking = len({each for each in want if each[0] in surely} - set(shown))
        num_weighed = sum(weight != 0 for _, weight in shown)
        return num_lacking + num_weighed + abs(len(want) - len(set(shown)))
    pairs = zip(shown, want, strict=False)
    same = sum(a[0] == b[0] and abs(a[1] - b[1]) <= _SAME_WEIGHT for a, b in pairs)
    return max(len(shown), len(want)) - same


def chosen_frames(spec: KVCacheSpec, frames: Sequence[int], scores: Sequence[float]) -> set[int]:
    """Sinks, recent frames, and of the others those with the best scores; of equals the older."""
    by_age = sorted(frames)
    num_sinks, num_recent = spec.sink_frames, spec.recent_frames
    if len(by_age) <= num_sinks + num_recent + spec.hitter_frames:
        return set(by_age)
    first_recent = len(by_age) - num_recent
    score_of = dict(zip(frames, scores, strict=True))
    others = sorted(by_age[num_sinks:first_recent], key=lambda frame: (-score_of[frame], frame))
    return {*by_age[:num_sinks], *others[: spec.hitter_frames], *by_age[first_recent:]}


def frame_masses(
    q_BTHD: Tensor, k_BKHD: Tensor, *, frame_tokens: int, dtype: torch.dtype
) -> Estimate:
    """Probability that every frame of keys is given, over batch, queries and heads: `[K / tokens]`.

    A score that is off by r makes a probability off by 2 r of itself, and both the kernel's scores,
    which are products of float32, and these are rounded. Probabilities too small for float32 are
    lost on either side.
    """
    batch, num_queries, heads, dim = q_BTHD.shape
    num_keys, work = k_BKHD.shape[1], Rounding.of(torch.float32).work
    mass = torch.zeros(num_keys, dtype=torch.float64, device=q_BTHD.device)
    longest = torch.zeros((), dtype=dtype, device=q_BTHD.device)
    piece = max(1, WORKSPACE_BYTES // (batch * num_keys * mass.element_size()))
    for head in range(heads):  # all at once would be a second copy of the cache
        k = k_BKHD[:, :, head].to(dtype)
        of_keys = largest_of(k)
        for part in q_BTHD[:, :, head].split(piece, dim=1):
            q = part.to(dtype)
            longest = torch.maximum(longest, largest_of(q) * of_keys)
            scores = torch.bmm(q, k.mT) * dim**-0.5
            mass += torch.softmax(scores, -1).sum((0, 1), dtype=torch.float64)
    value = mass.view(-1, frame_tokens).sum(1)
    r = 2 * work * ((LAMBDA + 6) / math.sqrt(dim) * longest + 6 * math.log(num_keys))
    r += 2 * work * EXP_ROUNDINGS
    num = batch * num_queries * heads
    share = 2 * torch.expm1(2 * r.clamp_max(1.0)) + LAMBDA * work * math.sqrt(num)
    lost = num * frame_tokens * torch.finfo(torch.float32).tiny
    return Estimate(value, value * share + lost)
