"""What a stream remembers of frames that left the window, against means of these frames."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from scope_contracts.cache_spec import GIST_LEVELS, CacheChoice, CacheKind, KVCacheSpec
from scope_contracts.errors import CacheError, UserInputError
from scope_contracts.gists import GistPlan
from scope_contracts.row_format import CodecKind
from scope_contracts.tensor_spec import DType
from scope_rt.attention.key_bias import key_bias
from scope_rt.collectives import SoloCollectives
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.kv_cache.frame_cache import FrameCache
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_rt.models.recipe_choices import CacheUpkeep
from tests.rounding import FP64_CONTRACT, gamma
from tests.tiny_models import Rollout

pytestmark = pytest.mark.numeric

GROUP = BLOCK = 3
CPU = torch.device("cpu")
SPEC = KVCacheSpec(
    num_layers=2,
    num_heads=2,
    head_dim=4,
    frame_tokens=2,
    sink_frames=1,
    window_frames=7,
    batch=1,
    dtype=DType.FLOAT64,
    block_frames=BLOCK,
    kind=CacheKind.HIERARCHICAL,
)
RING_SLOTS = SPEC.sink_frames + SPEC.window_frames


class Stream:
    """Random K/V chunk after chunk, all of which it remembers."""

    def __init__(self, cache: FrameCache, *, heads: slice = slice(None)) -> None:
        self.cache, self.heads = cache, heads
        self.keys: list[Tensor] = []
        """Of layer 0, frame by frame: `[tokens, heads, head_dim]`."""
        self.shown: list[Tensor] = []
        self.frames: tuple[int, ...] = ()
        self.log_weights: tuple[float, ...] = ()

    def run(self, num_chunks: int, *, num_frames: int = BLOCK) -> None:
        spec = self.cache.spec
        for _ in range(num_chunks):
            window = self.cache.window(start_frame=len(self.keys), num_frames=num_frames)
            shape = (1, num_frames * spec.frame_tokens, spec.num_heads, spec.head_dim)
            for layer in range(spec.num_layers):
                seed = torch.Generator().manual_seed(len(self.keys) + 1_000 * layer)
                k = torch.randn(shape, generator=seed, dtype=torch.float64)[:, :, self.heads]
                k_all, v_all = self.cache.update(layer, window, k, -k)
                assert torch.equal(v_all, -k_all)
                if layer == 0:
                    self.shown = list(k_all[0].clone().split(spec.frame_tokens))
                    new = k[0].split(spec.frame_tokens)
            self.keys.extend(new)
            self.frames, self.log_weights = window.frames_in_view, window.log_weights
            self.cache.advance(window)
            assert self.cache.indices == window.indices == spec.indices_at(len(self.keys))


def opened(spec: KVCacheSpec = SPEC) -> FrameCache:
    return open_frame_cache(spec, device=CPU)


def covered(slot: int, first: int) -> range:
    """Frames that a slot stands for."""
    level = (slot - RING_SLOTS) // GROUP + 1 if slot >= RING_SLOTS else 0
    return range(first, first + GROUP**level)


def is_mean(shown: Tensor, frames: list[Tensor]) -> bool:
    """Both add n frames, in their own order, and divide: at once, or a group at a time."""
    each = torch.stack(frames)
    off = (shown - each.mean(0)).abs()
    return bool((off <= 2 * gamma(2 * len(frames), torch.float64) * each.abs().mean(0)).all())


def test_a_gist_is_the_mean_of_the_frames_it_stands_for() -> None:
    stream = Stream(opened())
    for _ in range(35):
        stream.run(1)
        for slot, (first, shown) in enumerate(zip(stream.frames, stream.shown, strict=True)):
            frames = [stream.keys[frame] for frame in covered(slot, first)]
            assert is_mean(shown, frames)


def test_every_frame_is_remembered_and_the_older_the_coarser() -> None:
    stream = Stream(opened())
    for chunk in range(90):
        stream.run(1)
        gists = list(enumerate(stream.frames))[RING_SLOTS:]
        seen = Counter(frame for slot, first in gists for frame in covered(slot, first))
        assert max(seen.values(), default=0) <= 2, "more than two levels cover a frame"
        end = BLOCK * (chunk + 1)
        left = range(SPEC.sink_frames, end - SPEC.window_frames)
        assert set(left) <= set(seen), "a frame that left the window is forgotten"
        assert max(seen, default=-1) < end - BLOCK, "a gist of the chunk in flight"
        oldest_first = sorted((first, len(covered(slot, first))) for slot, first in gists)
        widths = [width for _, width in oldest_first]
        assert widths == sorted(widths, reverse=True)


def test_memory_is_bounded_and_reaches_minutes() -> None:
    stream = Stream(opened())
    stream.run(310)
    assert len(stream.frames) == SPEC.capacity_frames == RING_SLOTS + GROUP * GIST_LEVELS
    assert stream.cache.num_bytes == SPEC.num_bytes(1)
    reach = 7 * (1 + 3 + 9 + 27 + 81)
    oldest_gist = min(frame for slot, frame in enumerate(stream.frames) if slot >= RING_SLOTS)
    assert oldest_gist <= len(stream.keys) - SPEC.window_frames - reach


def test_a_gist_is_written_once_and_not_touched_by_frames_that_leave() -> None:
    stream = Stream(opened())
    seen: dict[tuple[int, int], Tensor] = {}
    for _ in range(60):
        stream.run(1)
        for slot, (first, rows) in enumerate(zip(stream.frames, stream.shown, strict=True)):
            if slot >= RING_SLOTS:
                known = seen.setdefault((slot, first), rows.clone())
                assert torch.equal(known, rows)
    counters, per_frame = stream.cache.counters, SPEC.frame_tokens * SPEC.num_layers
    num_gists = sum(shown.stop for shown in SPEC.gists.in_view(3 * 61 - RING_SLOTS))
    assert counters.rows_written == (3 * 60 + num_gists) * per_frame
    assert (
        counters.rows_evicted == counters.rows_written - len(stream.cache.frames_kept) * per_frame
    )
    assert counters.gathers == 0


def test_until_the_window_is_full_it_is_the_ring() -> None:
    spec = replace(SPEC, window_frames=9)
    ring, mine = Stream(opened(replace(spec, kind=CacheKind.RING))), Stream(opened(spec))
    for stream in (ring, mine):
        stream.run(2)
    assert mine.cache.digest() == ring.cache.digest()
    for stream in (ring, mine):
        stream.run(20)
    assert mine.frames[: len(ring.frames)] == ring.frames
    assert all(map(torch.equal, mine.shown[: len(ring.frames)], ring.shown))


def test_ranks_write_their_own_heads_of_the_same_gists() -> None:
    class OfTwo(SoloCollectives):
        size = 2

    whole = Stream(opened())
    parts = [
        Stream(open_frame_cache(SPEC, device=CPU, group=OfTwo()), heads=slice(rank, rank + 1))
        for rank in range(2)
    ]
    for stream in (whole, *parts):
        stream.run(40)
    assert parts[0].frames == parts[1].frames == whole.frames
    both = [torch.cat(pair, dim=1) for pair in zip(*(p.shown for p in parts), strict=True)]
    assert all(map(torch.equal, both, whole.shown))
    assert parts[0].cache.num_bytes == SPEC.num_bytes(2) == SPEC.num_bytes(1) // 2


def test_a_reset_forgets_all_gists() -> None:
    stream, fresh = Stream(opened()), Stream(opened())
    stream.run(30)
    stream.cache.reset()
    assert stream.cache.frames_kept == ()
    stream.keys = []
    for again in (stream, fresh):
        again.run(11)
    assert stream.cache.digest() == fresh.cache.digest()
    assert stream.frames == fresh.frames


def test_the_bias_on_the_past_covers_gists_and_adds_to_their_weight() -> None:
    stream = Stream(opened())
    stream.run(30)
    window = stream.cache.window(start_frame=90, num_frames=BLOCK)
    bias, plain = (
        key_bias(
            window.frames_in_view,
            num_current=BLOCK,
            frame_tokens=SPEC.frame_tokens,
            bias=value,
            log_weights=window.log_weights,
        )
        for value in (0.5, 1.0)
    )
    assert bias is not None
    assert plain is not None
    by_slot = [
        x.vector(CPU, torch.float64).view(-1, SPEC.frame_tokens)[:, 0] for x in (bias, plain)
    ]
    exempt = {0, 90, 91, 92}  # the sink is the first frame in view
    past = torch.tensor([frame not in exempt for frame in window.frames_in_view])
    off = (by_slot[0] - by_slot[1] - past.double() * math.log(0.5)).abs()
    assert (off <= gamma(2, torch.float64) * (by_slot[0].abs() + by_slot[1].abs())).all()
    assert not by_slot[1][:RING_SLOTS].any()


def test_all_gists_together_weigh_less_than_a_frame() -> None:
    stream = Stream(opened())
    stream.run(60)
    weights = torch.tensor(stream.log_weights).exp()
    assert weights[:RING_SLOTS].tolist() == [1.0] * RING_SLOTS
    assert 0 < float(weights[RING_SLOTS:].sum()) < 1
    for slot, first in list(enumerate(stream.frames))[RING_SLOTS:]:
        assert stream.log_weights[slot] == pytest.approx(-2 * math.log(len(covered(slot, first))))


def test_gists_may_be_quantized() -> None:
    exact, small = Stream(opened()), Stream(opened(replace(SPEC, codec=CodecKind.INT8)))
    for stream in (exact, small):
        stream.run(40)
    assert small.frames == exact.frames
    worst = max(float((a - b).abs().max()) for a, b in zip(small.shown, exact.shown, strict=True))
    assert 0 < worst < 0.1
    assert small.cache.num_bytes < exact.cache.num_bytes / 4


def test_a_chunk_of_another_length_is_refused_before_it_could_hide_frames() -> None:
    stream = Stream(opened())
    stream.run(5)
    before = stream.cache.digest()
    with pytest.raises(CacheError, match=r"a chunk of 2 frames follows gists .* of 3; give chunks"):
        stream.cache.window(start_frame=15, num_frames=2)
    assert stream.cache.digest() == before


def test_a_window_that_holds_no_group_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"got 4, want at least 5, to hold a group; use"):
        replace(SPEC, window_frames=4)
    assert replace(SPEC, window_frames=4, kind=CacheKind.RING).gists.num_slots == 0


def test_levels_begin_where_the_finer_one_ends() -> None:
    plan = GistPlan(group=2, num_levels=3)
    assert plan.in_view(0) == (range(0), range(0), range(0))
    assert plan.in_view(1) == (range(0, 1), range(0), range(0))
    assert plan.in_view(5) == (range(1, 3), range(0, 1), range(0))
    assert plan.in_view(13) == (range(5, 7), range(1, 3), range(0, 1))
    assert plan.num_slots == 6


def test_a_model_that_rebuilds_its_cache_from_the_latest_frames_is_refused() -> None:
    embedded = ModelFolder.open(EMBEDDED).recipe
    recipe = replace(embedded, cache_upkeep=CacheUpkeep.RECOMPUTE, kv_cache_num_frames=3)
    with pytest.raises(UserInputError, match="so there is nothing to remember; use ring"):
        recipe.check_cache(CacheChoice.named("hierarchical"))


@pytest.mark.parametrize("backend", ["sdpa", "lse_merge"])
def test_a_model_streams_on_gists_and_every_backend_weighs_them_alike(backend: str) -> None:
    choice = CacheChoice.named("hierarchical")
    ring, mine = (
        Rollout(sink=0, window=6, backend=backend, cache=cache) for cache in (CacheChoice(), choice)
    )
    first, second = (rollout.run(range(2)) for rollout in (ring, mine))
    assert all(map(torch.equal, first, second)), "without gists it is the ring"
    reference = Rollout(sink=0, window=6, backend="reference", cache=choice)
    reference.run(range(2))
    got, want = (rollout.run(range(2, 5)) for rollout in (mine, reference))
    torch.testing.assert_close(got, want, rtol=0, atol=FP64_CONTRACT)
    assert not torch.equal(ring.run(range(2, 5))[-1], got[-1]), "gists were not seen"


def test_a_cache_that_was_rebuilt_from_context_remembers_from_there_on() -> None:
    stream = Stream(opened())
    stream.run(20)
    stream.cache.reset()
    stream.keys = []
    stream.run(1, num_frames=SPEC.sink_frames + SPEC.window_frames - BLOCK)
    stream.run(8)
    gists = list(enumerate(stream.frames))[RING_SLOTS:]
    remembered = {frame for slot, first in gists for frame in covered(slot, first)}
    left = range(SPEC.sink_frames, len(stream.keys) - SPEC.window_frames)
    assert set(left) <= remembered
    for slot, (first, shown) in enumerate(zip(stream.frames, stream.shown, strict=True)):
        frames = [stream.keys[frame] for frame in covered(slot, first)]
        assert is_mean(shown, frames)
