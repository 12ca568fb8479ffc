"""The cost of a leaf is what a clock shows of whole chunks, and measuring changes nothing."""

import pytest
import torch

from scope_contracts.errors import CacheError, UserInputError
from scope_rt.lm.hierarchical.calibration import calibrate
from scope_rt.lm.hierarchical.cost import CostModel
from tests.lm.hierarchical.dense import worst_difference
from tests.lm.hierarchical.small_context import MODEL, STRICT, TOKENS, editable
from tests.rounding import FP64_CONTRACT


def test_calibration_finds_the_quadratic_share_of_what_the_clock_shows() -> None:
    made = editable(chunk_leaves=2)
    cost = CostModel(linear=1.0, quadratic=0.05)

    def clock() -> float:
        leaves = made.cache.num_leaves
        return cost.linear * leaves + cost.quadratic * leaves**2

    found = calibrate(made, TOKENS[:23], clock=clock)
    assert made.cost is found
    assert found.quadratic_share(23) == pytest.approx(cost.quadratic_share(23))
    assert made.context.tokens.tolist() == TOKENS[:23]
    assert worst_difference(MODEL, STRICT, made) < FP64_CONTRACT


def test_calibration_with_less_than_two_chunks_changes_nothing() -> None:
    made = editable()
    with pytest.raises(UserInputError, match="leaves to calibrate with: got 7, want at least 8"):
        calibrate(made, TOKENS[:7])
    assert made.context.num_leaves == 0


def test_a_chunk_that_cannot_be_timed_leaves_no_speculative_span() -> None:
    made = editable(tokens=TOKENS)
    before = made.cache.digest()
    with pytest.raises(CacheError, match="truncate"):
        made.time_chunk(-4, lambda: 0.0)
    assert made.cache.digest() == before
    made.fork()


def test_a_chunk_is_timed_from_when_the_device_is_idle_until_its_result_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, events = editable(tokens=TOKENS), []
    read = torch.Tensor.item

    def item(tensor: torch.Tensor) -> object:
        events.append("wait")
        return read(tensor)

    def clock() -> float:
        events.append("clock")
        return 0.0

    monkeypatch.setattr(torch.Tensor, "item", item)
    hook = MODEL.register_forward_hook(lambda *_: events.append("launched"))
    made.time_chunk(8, clock)
    hook.remove()
    assert events == ["wait", "clock", "launched", "wait", "clock"]
