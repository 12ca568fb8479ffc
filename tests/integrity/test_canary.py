"""A fixed chunk tells when anything that a chunk goes through has changed, and disturbs nothing."""

from collections.abc import Callable

import pytest
import torch

from scope_contracts.arithmetic import check_canary
from scope_contracts.errors import IntegrityError
from scope_rt.integrity.canary import Canary
from tests.integrity.audited import FAULTS, Fault, disarmed
from tests.integrity.sharded import sharded
from tests.thread_ranks import on_all_ranks, thread_ranks
from tests.tiny_models import Rollout

EVERY = 256
IN_EVERY_CHUNK = [fault for fault in FAULTS if fault.check != "cached_rows"]
"""A row of the stream's own cache is none of the canary's."""


def rollout(dtype: torch.dtype = torch.float32) -> Rollout:
    return Rollout(sink=1, window=8, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_gives_the_same_bits_again_and_leaves_the_stream_alone(dtype: torch.dtype) -> None:
    with_canary, without = rollout(dtype), rollout(dtype)
    canary = Canary(with_canary.generator, every=EVERY)
    for chunk in range(4):
        check_canary(chunk, [canary.run()], [0], canary.expected)
        assert torch.equal(with_canary.chunk(chunk, bias=0.6), without.chunk(chunk, bias=0.6))
    assert with_canary.generator.cache.digest() == without.generator.cache.digest()


def test_its_memory_is_what_it_says() -> None:
    made = rollout()
    config = made.model.config
    canary = Canary(made.generator, every=EVERY)
    assert canary.num_bytes == 32 * config.num_layers * config.dim * torch.float32.itemsize


def test_it_is_due_at_a_start_and_every_so_many_chunks() -> None:
    canary = Canary(rollout().generator, every=EVERY)
    assert canary.is_due(17)
    canary.run()
    assert [chunk for chunk in range(1, 2 * EVERY + 1) if canary.is_due(chunk)] == [EVERY, 512]


@pytest.mark.parametrize("fault", IN_EVERY_CHUNK, ids=str)
def test_it_finds_what_changed_since_its_first_run(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rollout()
    canary = Canary(made.generator, every=EVERY)
    canary.run()
    fault.bring_about(made, monkeypatch)
    digest = canary.run()
    with pytest.raises(IntegrityError, match="chunk 5: rank 3: the fixed chunk gives"):
        check_canary(5, [digest], [3], canary.expected)
    disarmed("canary").canary(5, [digest], [3], canary.expected)


def test_a_start_is_held_against_an_earlier_one() -> None:
    first, other = (
        Canary(rollout().generator, every=EVERY),
        Canary(rollout().generator, every=EVERY),
    )
    other.expected = first.run()
    check_canary(0, [other.run()], [0], other.expected)


def run_on_ranks(break_rank: Callable[[Rollout], None]) -> list[tuple[str, str]]:
    """Every rank's expected and latest digest."""
    of_rank = [sharded(group, torch.float32) for group in thread_ranks(2)]

    def body(rank: int) -> tuple[str, str]:
        made = of_rank[rank]
        canary = Canary(made.generator, every=EVERY)
        canary.run()
        if rank == 1:
            break_rank(made)
        canary.run()
        return canary.expected, canary.digest

    return on_all_ranks(2, body)


def test_all_ranks_of_a_group_give_the_same_bits() -> None:
    (expected, first), (_, second) = run_on_ranks(lambda made: None)
    check_canary(3, [first, second], [0, 1], expected)
    (expected, first), (_, second) = run_on_ranks(lambda made: made.model.zero_grad())
    check_canary(3, [first, second], [0, 1], expected)


def test_a_rank_whose_last_projection_changed_is_named() -> None:
    def turn(made: Rollout) -> None:
        made.generator.model.proj_out.weight.detach().neg_()

    (expected, first), (_, second) = run_on_ranks(turn)
    with pytest.raises(IntegrityError, match="chunk 3: rank 1: the fixed chunk"):
        check_canary(3, [first, second], [0, 1], expected)
