"""A small stream log with everything in it, to be changed by a fuzzer, a benchmark and tests."""

import hashlib
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scope_contracts.envelope import LATENTS_IN, LATENTS_OUT, MessageKind, PlanId, PPEnvelope
from scope_contracts.log_file import MAGIC, pack
from scope_contracts.log_records import (
    Begun,
    Closed,
    Control,
    Dropped,
    Durable,
    Failed,
    Finished,
    Opened,
    Planned,
    Published,
    Record,
    Scheduled,
    Segment,
    StartFrame,
)
from scope_contracts.tensor_spec import DType, TensorSpec

Story = list[tuple[Record, bytes]]


def opened(at_s: float = 1000.0, **changes: Any) -> Opened:
    fields: dict[str, Any] = {
        "package_version": "0.1.0",
        "torch_version": "2.13.0",
        "model": "tiny",
        "model_fingerprint": "ab" * 32,
        "recipe": "recipe.json",
        "plan_id": PlanId.PP1,
        "tp_degree": 2,
        "height": 64,
        "width": 64,
        "dtype": DType.FLOAT32,
        "codec_dtype": DType.FLOAT32,
        "text_dtype": DType.FLOAT32,
        "base_seed": 7,
        "kv_cache_attention_bias": 0.8,
        "backend": "sdpa",
        "kv_cache_recompute_every": 999_999,
        "recompute_anchor": "decoded",
        "kv_cache": "h2o:int8",
        "frames_per_block": 3,
        "fps": 16,
        "run_id": "0123456789abcdef",
    }
    return Opened(at_s=at_s, **(fields | changes))


def start_frame() -> tuple[StartFrame, bytes]:
    """And its latents, two numbers."""
    latents = struct.pack("<2f", 0.5, -0.5)
    record = StartFrame(
        at_s=1000.0,
        image="first.png",
        image_sha256="e" * 64,
        latents=TensorSpec(name=LATENTS_IN, dtype=DType.FLOAT32, shape=(1, 1, 2, 1, 1)),
        latents_sha256=hashlib.sha256(latents).hexdigest(),
    )
    return record, latents


def planned(chunk: int, epoch: int = 0, *, at_s: float = 0.0, **changes: Any) -> Planned:
    fields: dict[str, Any] = {
        "plan_id": PlanId.PP1,
        "call_id": chunk,
        "chunk_index": chunk,
        "cache_epoch": epoch,
        "kind": MessageKind.INFER,
        "init_cache": False,
        "reset_kv_cache": False,
        "reset_crossattn_cache": False,
        "current_start_frame": 3 * chunk,
        "do_kv_recompute": False,
        "clean_pass": True,
        "num_denoise_steps": 2,
        "expected_generator_calls": 3,
        "kv_cache_attention_bias": 0.8,
        "denoising_step_list": (1000.0, 500.0),
        "height": 64,
        "width": 64,
        "base_seed": 7,
    }
    return Planned(at_s=at_s or 1000.0 + chunk, envelope=PPEnvelope(**(fields | changes)))


def finished(
    chunk: int, epoch: int = 0, *, at_s: float = 0.0, values: Iterable[float] = (0.0, 1.0)
) -> tuple[Finished, bytes]:
    latents = b"".join(struct.pack("<f", value) for value in values)
    record = Finished(
        at_s=at_s or 1000.5 + chunk,
        chunk_index=chunk,
        cache_epoch=epoch,
        prompt="a red circle",
        num_frames=12,
        observed_generator_calls=3,
        recomputed=False,
        kv_cache_attention_bias=0.8,
        latents_sha256=hashlib.sha256(latents).hexdigest(),
        latents=TensorSpec(LATENTS_OUT, DType.FLOAT32, (len(latents) // 4,)),
        stage_ms=(("plan", 0.3), ("wait", 4.0 + chunk % 3), ("decode", 9.0), ("generate", 50.0)),
    )
    return record, latents


def segment(number: int = 0, **changes: Any) -> Segment:
    fields: dict[str, Any] = {
        "codec": "libx264",
        "width": 256,
        "height": 256,
        "fps": "16",
        "extradata": "0164",
    }
    return Segment(at_s=1000.0, number=number, **(fields | changes))


def durable(chunk: int, *, segment: int = 0, at_s: float = 0.0) -> Durable:
    return Durable(
        at_s=at_s or 1000.7 + chunk,
        chunk_index=chunk,
        segment=segment,
        end_bytes=600 + 400 * chunk,
        num_frames=12,
        crc32=0xDEADBEEF,
        digest="5e" * 16,
        encode_ms=7.5,
    )


def story() -> Story:
    """A stream with every kind of record: prompts, a transition, a cut, a crash and a restart."""
    records: Story = [
        (opened(), b""),
        (Begun(at_s=1000.0, prompt="a red circle"), b""),
        (Scheduled(at_s=1000.0, chunk_index=6, hard_cut=True), b""),
        (segment(), b""),
        (Control(at_s=1000.0, chunk_index=0, prompt="a red circle", embeds_sha256="c" * 64), b""),
        (planned(0, init_cache=True, reset_kv_cache=True, reset_crossattn_cache=True), b""),
        finished(0),
        (durable(0), b""),
        (planned(1), b""),
        finished(1),
    ]
    records += [
        (
            Control(
                at_s=1002.0,
                chunk_index=2,
                prompt="a green square",
                embeds_sha256="d" * 64,
                transition_num_chunks=3,
                transition_method="slerp",
                transition_bias_floor=0.2,
            ),
            b"",
        )
    ]
    for chunk, bias in ((2, 0.4), (3, 0.4), (4, 0.8)):
        plan = planned(chunk, reset_crossattn_cache=True, kv_cache_attention_bias=bias)
        records += [(plan, b""), finished(chunk)]
    records += [
        (planned(5), b""),
        (Control(at_s=1006.0, chunk_index=6, hard_cut=True, drop_in_flight=True), b""),
        (planned(6, 1, init_cache=True, current_start_frame=0), b""),
        (Dropped(at_s=1006.2, chunk_index=5, cache_epoch=0), b""),
        finished(6, 1),
        (planned(7, 1, current_start_frame=3), b""),
        (Failed(at_s=1008.0, chunk_index=7, error="PeerLostError: rank 2 is gone"), b""),
        (opened(1011.0, resumed_at_chunk=7), b""),
        (planned(7, 1, at_s=1011.2, current_start_frame=3, do_kv_recompute=True), b""),
        finished(7, 1, at_s=1011.8),
        (Published(at_s=1012.0, num_bytes=4000, digest="d1" * 16), b""),
        (Closed(at_s=1012.0), b""),
    ]
    return records


def packed(records: Story) -> bytes:
    return MAGIC + b"".join(pack(record, blob) for record, blob in records)


def write(path: Path, records: Story) -> Path:
    path.write_bytes(packed(records))
    return path
