"""Whatever its size, all that is held has its turn within M chunks, and turns are even."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from scope_rt.integrity.audit_plan import (
    CallPlan,
    CallTurns,
    audits_in_turn,
)
from scope_rt.integrity.rotation import Part, Rotation

MIB = 1 << 20


def parts(sizes: Sequence[int], first: int = 0) -> list[Part]:
    return [Part(None, f"part {first + i}", -1, size) for i, size in enumerate(sizes)]


def longest_wait(rotation: Rotation, part: Part, num_chunks: int) -> int:
    """Chunks from one time that `part` is verified to the next, from the beginning on."""
    seen = [chunk for chunk in range(1, num_chunks + 1) if part in rotation.due()]
    return max(later - earlier for earlier, later in pairwise([0, *seen]))


@pytest.mark.parametrize("size", [100, MIB, 64 * MIB], ids=["small", "middle", "large"])
@pytest.mark.parametrize("within", [1, 2, 6, 7, 32, 100])
def test_every_part_is_verified_within_m_chunks(within: int, size: int) -> None:
    held = parts([size, 5 * size, *[size // 10] * 40])
    for part in held:
        rotation = Rotation(within)
        rotation.hold(held)
        assert longest_wait(rotation, part, 4 * within) <= within


@pytest.mark.parametrize("size", [100, 64 * MIB], ids=["small", "large"])
def test_a_part_that_is_added_delays_no_other(size: int) -> None:
    for number in range(10):
        rotation, held = Rotation(12), parts([size] * 10)
        rotation.hold(held)
        seen = [0]
        for chunk in range(1, 60):
            if chunk in (5, 20):
                held = [*parts([3 * size] * 7, first=len(held)), *held]
                rotation.hold(held)
            if any(part.name == f"part {number}" for part in rotation.due()):
                seen.append(chunk)
        assert max(later - earlier for earlier, later in pairwise(seen)) <= 12


def test_turns_are_even() -> None:
    rotation, held = Rotation(32), parts([MIB * (1 + number % 7) for number in range(320)])
    rotation.hold(held)
    turns = [sum(part.num_bytes for part in rotation.due()) for _ in range(32)]
    assert sum(turns) == sum(part.num_bytes for part in held)
    assert max(turns) - min(turns) <= 7 * MIB


def test_little_is_verified_in_few_turns() -> None:
    rotation = Rotation(32)
    rotation.hold(parts([1000] * 100))
    assert sum(bool(rotation.due()) for _ in range(32)) == 4


def test_strict_verifies_all_with_every_chunk() -> None:
    rotation, held = Rotation(1), parts([MIB] * 5)
    rotation.hold(held)
    assert all(set(rotation.due()) == set(held) for _ in range(3))


EVERY, NUM_STEPS = 8, 5
RECOMPUTES: dict[str, Callable[[int], bool]] = {
    "never": lambda chunk: False,
    "in every chunk": lambda chunk: True,
    **{f"in one of {n}": lambda chunk, n=n: chunk % n == 0 for n in (2, 3, 16, 24)},  # type: ignore[misc]
    "once, in a chunk that has a turn": lambda chunk: chunk == 3 * EVERY,
    "in chunks that have none": lambda chunk: chunk % EVERY == 1,
}


@pytest.mark.parametrize("name", RECOMPUTES)
def test_each_call_has_its_turn_whichever_chunks_have_a_recompute(name: str) -> None:
    turns, seen = CallTurns(EVERY), dict[int, list[int]]()
    num_chunks = 6 * EVERY * NUM_STEPS
    for chunk in range(num_chunks):
        first = int(RECOMPUTES[name](chunk))
        calls = turns.due(chunk, num_calls=first + NUM_STEPS, has_recompute=bool(first))
        for call in calls:
            seen.setdefault(call - first, []).append(chunk)
    for step in range(NUM_STEPS):
        ends = [-1, *seen[step], num_chunks]
        assert max(b - a for a, b in pairwise(ends)) <= EVERY * NUM_STEPS
    for chunk in filter(RECOMPUTES[name], range(num_chunks)):
        assert any(chunk - EVERY < at <= chunk for at in seen[-1])


def test_strict_looks_at_every_call() -> None:
    turns = CallTurns(1)
    assert turns.due(7, num_calls=5, has_recompute=False) == [0, 1, 2, 3, 4]
    assert turns.due(8, num_calls=6, has_recompute=True) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_every_token_of_every_batch_row_has_its_turn_in_each_layer(batch: int) -> None:
    plan, layers = CallPlan(first_frame=0, num_frames=2, rows=2, columns=3), 4
    seen = [
        audit
        for number in range(plan.num_tokens * batch)
        for audit in audits_in_turn(number, call=1, plan=plan, num_layers=layers, batch=batch)
    ]
    assert len(set(seen)) == len(seen) == layers * plan.num_tokens * batch
