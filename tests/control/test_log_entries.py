"""What rank0 does is in the log's records whole: latents to the bit, control input, the failure."""

import hashlib

import numpy as np
import pytest
import torch

from scope_contracts.errors import PeerLostError
from scope_contracts.log_records import Control
from scope_contracts.tensor_spec import DType
from scope_rt.control.chunk import Chunk
from scope_rt.control.inbox import Conditioning, Directive
from scope_rt.control.log_entries import (
    control_records,
    dropped_record,
    failed_record,
    finished_record,
    planned_record,
)
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.tensors import bytes_of
from tests.tiny_models import envelope


def chunk(dtype: torch.dtype = torch.float32) -> Chunk:
    latents = torch.arange(24.0).reshape(3, 2, 2, 2).to(dtype)
    return Chunk(
        chunk_index=4,
        cache_epoch=1,
        prompt="a red circle",
        frames=np.zeros((12, 4, 4, 3), np.uint8),
        latents=latents,
        latents_sha256=hashlib.sha256(bytes_of(latents)).hexdigest(),
        generator_calls=3,
        recomputed=True,
        kv_cache_attention_bias=0.5,
        stage_ms={"plan": 0.5, "generate": 40.0},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_are_logged_bit_for_bit_in_their_own_dtype(dtype: torch.dtype) -> None:
    made = chunk(dtype)
    record = finished_record(made, with_latents=True)
    assert record.latents is not None
    assert record.latents.dtype == DType(str(dtype).removeprefix("torch."))
    blob = bytearray(bytes_of(made.latents))
    latents = torch.frombuffer(blob, dtype=dtype).reshape(record.latents.shape)
    assert torch.equal(latents, made.latents)
    assert hashlib.sha256(blob).hexdigest() == record.latents_sha256


def test_a_finished_chunk_is_told_whole_with_or_without_its_latents() -> None:
    record = finished_record(chunk(), with_latents=False)
    assert record.latents is None
    assert (record.chunk_index, record.cache_epoch, record.prompt) == (4, 1, "a red circle")
    assert (record.num_frames, record.observed_generator_calls) == (12, 3)
    assert (record.recomputed, record.kv_cache_attention_bias) == (True, 0.5)
    assert record.stage_ms == (("plan", 0.5), ("generate", 40.0))
    assert record.at_s > 1e9


def test_control_input_is_logged_whole_and_its_absence_takes_no_space() -> None:
    embeds = torch.ones(1, 2, 3)
    assert control_records(0, Directive()) == ()
    (prompt,) = control_records(
        4,
        Directive(
            conditioning=Conditioning("a green square", embeds),
            transition=TransitionSpec(num_chunks=5, method=Interpolation.SLERP, bias_floor=0.25),
        ),
    )
    assert prompt == Control(
        at_s=prompt.at_s,
        chunk_index=4,
        prompt="a green square",
        embeds_sha256=hashlib.sha256(embeds.numpy().tobytes()).hexdigest(),
        transition_num_chunks=5,
        transition_method="slerp",
        transition_bias_floor=0.25,
    )
    (cut,) = control_records(9, Directive(hard_cut=True, drop_in_flight=True, recompute=True))
    assert cut == Control(
        at_s=cut.at_s, chunk_index=9, hard_cut=True, drop_in_flight=True, recompute=True
    )


def test_plans_and_drops_name_their_chunk() -> None:
    assert planned_record(envelope(3)).envelope == envelope(3)
    dropped = dropped_record(envelope(3))
    assert (dropped.chunk_index, dropped.cache_epoch) == (3, 0)


def test_a_failure_is_told_by_name_at_any_length_and_in_any_letters() -> None:
    failed = failed_record(0, PeerLostError("rank 1 \udcff " + "x" * 100_000))
    assert failed.chunk_index == 0
    assert failed.error.startswith("PeerLostError: rank 1 ? xxx")
    assert len(failed.error) < 5000
