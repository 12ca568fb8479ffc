"""The one place where a stream's cache is put together from its parts: a `FrameCache`."""

import torch

from scope_contracts.cache_spec import CacheKind, KVCacheSpec
from scope_rt.collectives import Collectives, SoloCollectives
from scope_rt.kv_cache.frame_cache import FrameCache
from scope_rt.kv_cache.frame_pages import PagedFrames, PagePool
from scope_rt.kv_cache.gists import GistCache, GistFrames
from scope_rt.kv_cache.heavy_frames import HeavyFrames
from scope_rt.kv_cache.ring import NewestFrames
from scope_rt.kv_cache.row_ledger import RowLedger
from scope_rt.kv_cache.row_store import RowStore
from scope_rt.kv_cache.slot_cache import FrameStorage, InPlace, SlotCache, SlotPolicy


def open_frame_cache(
    spec: KVCacheSpec,
    *,
    device: torch.device,
    group: Collectives | None = None,
    finds_damage: bool = False,
) -> FrameCache:
    """Allocate this rank's share of the cache that `spec` describes, for one stream.

    A paged cache has its pool to itself, so all kinds but hierarchical hold as many frames. One
    that `finds_damage` keeps a digest of what was written.

    Raises:
        UserInputError: the heads cannot be shared by the group.
        UnsupportedError: the kind or the codec cannot run here.
    """
    group = group or SoloCollectives()
    rows = slots_for(spec, tp_degree=group.size, device=device)
    ledger = RowLedger(rows, frame_tokens=spec.frame_tokens) if finds_damage else None
    storage: FrameStorage = InPlace(rows)
    if spec.kind is CacheKind.PAGED:
        pool = PagePool(rows, page_tokens=spec.frame_tokens)
        storage = PagedFrames(pool, frame_tokens=spec.frame_tokens)
    policy: SlotPolicy
    match spec.kind:
        case CacheKind.HIERARCHICAL:
            return GistCache(spec, policy=GistFrames(spec), storage=InPlace(rows), ledger=ledger)
        case CacheKind.H2O:
            policy = HeavyFrames(spec, group)
        case _:
            policy = NewestFrames(spec)
    return SlotCache(spec, policy=policy, storage=storage, ledger=ledger)


def slots_for(spec: KVCacheSpec, *, tp_degree: int, device: torch.device) -> RowStore:
    """Memory for one rank's slots of one stream."""
    return RowStore(
        spec.row_format.shard(tp_degree),
        num_layers=spec.num_layers,
        batch=spec.batch,
        num_slots=spec.capacity_tokens,
        device=device,
    )
