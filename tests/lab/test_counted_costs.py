"""What is counted from shapes is what the embedded model computes and what its digests read."""

from collections import defaultdict
from ctypes import sizeof
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from scope_contracts.integrity import IntegrityLevel
from scope_lab.counted_costs import (
    WAN_1_3B,
    WAN_AT_480P,
    Shapes,
    attention_flops,
    evidence,
    generation,
    linear_flops,
    num_weights,
    rows_written,
    state_numbers,
    table,
)
from scope_rt import tensor_digests
from scope_rt.config import StreamConfig
from scope_rt.integrity.state_audit import StateAudit
from scope_rt.kv_cache import frame_digests
from scope_rt.kv_cache.row_ledger import RowLedger
from scope_rt.kv_cache.slot_cache import SlotCache
from scope_rt.models.generator import ChunkGenerator
from scope_rt.session import StreamSession

PROMPT = "a red circle and a blue square"
WARM_UP, CHUNKS = 8, 32


def attention_of(q: Any, k: Any, *arguments: Any, **named: Any) -> int:
    count: int = sdpa_flop_count(q, k, k)
    return count


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> tuple[Shapes, list[dict[str, int]], int]:
    """The embedded model's shapes, the FLOPs of its last chunks by operation, and its weights."""
    generate, flops, generators = (
        ChunkGenerator.generate,
        list[dict[str, int]](),
        list[ChunkGenerator](),
    )

    def counting(generator: ChunkGenerator, *arguments: Any) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        with FlopCounterMode(display=False, custom_mapping={kernel: attention_of}) as counter:
            made = generate(generator, *arguments)
        of_all = counter.get_flop_counts()["Global"]
        flops.append({str(name): count for name, count in of_all.items()})
        generators.append(generator)
        return made

    monkeypatch.setattr(ChunkGenerator, "generate", counting)
    with StreamSession(StreamConfig.of(integrity="off")) as session:
        list(session.stream(PROMPT, num_chunks=6))
    model = generators[-1].model
    return shapes_of(generators[-1]), flops, sum(each.numel() for each in model.parameters())


def shapes_of(generator: ChunkGenerator) -> Shapes:
    spec = generator.cache.spec
    return Shapes(
        model=generator.model.config,
        frame_tokens=spec.frame_tokens,
        chunk_frames=spec.block_frames,
        window_frames=spec.window_frames,
        num_calls=5,
        text_tokens=generator.text[0].k.shape[1],
        number_bytes=4,
    )


def test_flops_and_weights_are_those_of_the_embedded_model(
    counted: tuple[Shapes, list[dict[str, int]], int],
) -> None:
    shapes, flops, weights = counted
    assert num_weights(shapes.model) == weights
    of_attention = sum(count for name, count in flops[-1].items() if "attention" in name)
    assert of_attention == shapes.num_calls * attention_flops(shapes)
    assert sum(flops[-1].values()) - of_attention == shapes.num_calls * linear_flops(shapes)
    assert sum(flops[-1].values()) == generation(shapes).flops


@pytest.mark.lab
def test_bytes_that_digests_read_are_those_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    read, part = defaultdict[str, int](int), ["elsewhere"]
    flush, leaving = RowLedger._flush, SlotCache._verify_leaving
    generate, generators = ChunkGenerator.generate, list[ChunkGenerator]()

    def counting(digest: Any) -> Any:
        def run(held: Any, *arguments: Any) -> Any:
            read[part[-1]] += sizeof(held)
            return digest(held, *arguments)

        return run

    def within(name: str, work: Any) -> Any:
        def run(*arguments: Any, **named: Any) -> Any:
            part.append(name)
            try:
                return work(*arguments, **named)
            finally:
                part.pop()

        return run

    def remember(generator: ChunkGenerator, *arguments: Any) -> Tensor:
        generators.append(generator)
        return generate(generator, *arguments)

    for user, name in (
        (frame_digests, "xxh3_64_intdigest"),
        (tensor_digests, "xxh3_64_intdigest"),
    ):
        monkeypatch.setattr(user, name, counting(getattr(user, name)))
    monkeypatch.setattr(RowLedger, "_flush", within("written", flush))
    monkeypatch.setattr(SlotCache, "_verify_leaving", within("replaced", leaving))
    monkeypatch.setattr(StateAudit, "verify", within("rotation", StateAudit.verify))
    monkeypatch.setattr(ChunkGenerator, "generate", remember)
    with StreamSession(StreamConfig.of()) as session:
        for number, _ in enumerate(session.stream(PROMPT, num_chunks=WARM_UP + CHUNKS + 1), 1):
            if number == WARM_UP:
                read.clear()
            if number == WARM_UP + CHUNKS:
                got = dict(read)
    shapes = shapes_of(generators[-1])
    assert got["written"] == got["replaced"] == CHUNKS * 4 * rows_written(shapes)
    assert got["rotation"] == 4 * state_numbers(shapes)
    default = {cost.name: cost for cost in evidence(shapes, IntegrityLevel.DEFAULT)}
    assert CHUNKS * default["rows digested as written"].bytes_moved == got["written"]
    assert CHUNKS * default["state in rotation"].bytes_moved == got["rotation"]


def test_default_is_a_small_share_of_the_flops_of_a_model_of_1_3b() -> None:
    flops = sum(cost.flops for cost in evidence(WAN_AT_480P, IntegrityLevel.DEFAULT))
    assert flops <= 0.005 * generation(WAN_AT_480P).flops
    assert 1.3e9 < num_weights(WAN_1_3B) < 1.5e9


def test_the_table_has_a_line_for_every_layer_and_their_sum() -> None:
    lines = table(WAN_AT_480P).splitlines()
    assert len(lines) == 4 + len(list(evidence(WAN_AT_480P, IntegrityLevel.STRICT))) + 1
    assert "**sum**" in lines[-1]
