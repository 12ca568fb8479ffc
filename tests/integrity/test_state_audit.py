"""What a rank holds is verified: in strict before a chunk is shown, else within M chunks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from scope_contracts.errors import FingerprintError, IntegrityError
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.models.generator import ChunkGenerator
from scope_rt.session import StreamSession
from tests.integrity.corruption import PROMPT, Change, flip_bit, stored_rows, stream, swap_rows
from tests.tiny_folder import tiny_folder

AT, WITHIN = 4, 6
"""The chunk before which something is changed, and M in the tests of the default."""
WEIGHT = "blocks.1.ffn.net.0.proj.weight"
LAYER, SLOT = 1, 5
UNCHANGED = (
    "ring",
    "quantized:int8",
    "h2o",
    "h2o:fp8",
    "paged",
    "hierarchical",
    "hierarchical:int4",
)
ROWS = rf"cached rows of layer {LAYER}, latent frame \d+, are not what was written"


def flip_weight(generator: ChunkGenerator) -> None:
    flip_bit(generator.model.get_parameter(WEIGHT))


def swap_weight_rows(generator: ChunkGenerator) -> None:
    swap_rows(generator.model.get_parameter(WEIGHT))


def replace_weight(generator: ChunkGenerator) -> None:
    proj = generator.model.get_submodule(WEIGHT.removesuffix(".weight"))
    proj.weight = nn.Parameter(generator.model.get_parameter(WEIGHT) * 1.001, requires_grad=False)


def cached_frame(generator: ChunkGenerator) -> torch.Tensor:
    tokens = generator.cache.spec.frame_tokens
    return stored_rows(generator, layer=LAYER, plane=1)[:, SLOT * tokens : (SLOT + 1) * tokens]


def flip_row(generator: ChunkGenerator) -> None:
    flip_bit(cached_frame(generator)[0])


def zero_rows(generator: ChunkGenerator) -> None:
    cached_frame(generator).zero_()


def fill_rows(generator: ChunkGenerator) -> None:
    cached_frame(generator).fill_(torch.nan)


def swap_cached_rows(generator: ChunkGenerator) -> None:
    swap_rows(cached_frame(generator)[0])


@torch.inference_mode()
def shift_text(generator: ChunkGenerator) -> None:
    generator.text[0].v.add_(1e-3)


@torch.inference_mode()
def scale_modulation(generator: ChunkGenerator) -> None:
    next(iter(generator.modulations.values())).layers.mul_(1.01)


CHANGES: dict[Callable[[ChunkGenerator], None], tuple[type[IntegrityError], str]] = {
    flip_weight: (FingerprintError, f"weight {WEIGHT} is not what was loaded"),
    swap_weight_rows: (FingerprintError, f"weight {WEIGHT} is not what was loaded"),
    replace_weight: (FingerprintError, f"weight {WEIGHT} is not what was loaded"),
    flip_row: (IntegrityError, ROWS),
    zero_rows: (IntegrityError, ROWS),
    fill_rows: (IntegrityError, ROWS),
    swap_cached_rows: (IntegrityError, ROWS),
    shift_text: (IntegrityError, "text values of layer 0 is not what was computed"),
    scale_modulation: (IntegrityError, "modulation of timestep 1000, layers is not what"),
}


def shown_until_found(
    change: Callable[[ChunkGenerator], None], *, num_chunks: int, **settings: object
) -> int:
    """Chunks that were shown from the change on; the error must name what was changed."""
    error, said = CHANGES[change]
    shown: list[Chunk] = []
    with pytest.raises(error, match=rf"chunk \d+: rank 0: {said}"):
        stream(
            Change(FaultPoint.GENERATOR, AT, change),
            num_chunks=num_chunks,
            shown=shown,
            **settings,
        )
    return len(shown) - AT


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_strict_shows_no_chunk_of_a_changed_state(change: Callable[[ChunkGenerator], None]) -> None:
    assert shown_until_found(change, num_chunks=AT + 2, integrity="strict") == 0


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_by_default_a_changed_state_is_found_within_m_chunks(
    change: Callable[[ChunkGenerator], None],
) -> None:
    num_chunks = AT + WITHIN + 2
    assert shown_until_found(change, num_chunks=num_chunks, verify_within=WITHIN) <= WITHIN


def test_text_that_changed_is_found_before_another_prompt_replaces_it() -> None:
    config, shown = StreamConfig.of(tiny_folder()), list[int]()
    change = Change(FaultPoint.GENERATOR, 1, shift_text)
    with StreamSession(config, instruments=Instruments(faults=change)) as session:
        schedule = [ScheduledEvent(chunk_index=3, prompt="a green triangle")]
        with pytest.raises(IntegrityError, match="chunk 3: rank 0: text values of layer 0"):
            for chunk in session.stream(PROMPT, num_chunks=6, schedule=schedule):
                shown.append(chunk.chunk_index)
    assert shown == [0, 1, 2]


def model_for(kind: str) -> str | Path:
    """Four bits need wider heads than those of the test model."""
    return "tiny" if kind.endswith("int4") else tiny_folder()


@pytest.mark.parametrize(
    "kind", ["quantized:int8", "quantized:int4", "h2o", "h2o:int8", "paged", "hierarchical"]
)
def test_every_kind_of_cache_finds_a_changed_row(kind: str) -> None:
    settings = {"integrity": "strict", "kv_cache": kind, "model": model_for(kind)}
    assert shown_until_found(flip_row, num_chunks=AT + 2, **settings) == 0


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, "float32") for kind in UNCHANGED),
        (UNCHANGED[-1], "bfloat16"),
        *(pytest.param(kind, "bfloat16", marks=pytest.mark.lab) for kind in UNCHANGED[:-1]),
    ],
)
def test_an_unchanged_state_is_never_accused(kind: str, dtype: str) -> None:
    shown: list[Chunk] = []
    nothing = Change(FaultPoint.GENERATOR, AT, lambda generator: None)
    settings = {"integrity": "strict", "kv_cache": kind, "model": model_for(kind), "dtype": dtype}
    stream(nothing, num_chunks=6, shown=shown, **settings)
    assert len(shown) == 6


def test_without_the_audit_a_changed_state_is_shown() -> None:
    shown: list[Chunk] = []
    change = Change(FaultPoint.GENERATOR, AT, zero_rows)
    stream(change, num_chunks=AT + 2, shown=shown, integrity="off")
    assert change.was_made
    assert len(shown) == AT + 2
