"""A figure above 1 is a system that is faster than what it is compared with, round by round."""

from collections.abc import Callable

import pytest
import torch

from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_lab.kv_bench import h2o, states, storage
from scope_lab.kv_bench.report import table
from scope_lab.kv_bench.result import Part
from scope_lab.kv_bench.stopwatch import median_ratio
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.layer_map import AttnLayerMap


def as_it_says(step: Callable[[], float], count: int) -> float:
    """A clock that believes every step."""
    return step()


def test_a_ratio_is_the_median_of_the_rounds_and_says_how_much_faster_mine_is() -> None:
    assert median_ratio([2, 4, 6], [1, 1, 1]) == 4
    assert median_ratio([8, 8, 8], [1, 2, 8]) == 4
    assert median_ratio([1, 10, 4], [1, 2, 4]) == 1  # of the medians of both sides it were 2


def test_a_row_of_known_seconds_shows_how_much_faster_its_system_is() -> None:
    seconds = {h2o.RECOMPUTE: (6.0, 8.0, 10.0), h2o.FULL: (3.0, 3.0, 9.0), "h2o": (2.0, 2.0, 2.0)}
    rounds = [
        {name: h2o.Decoding(step_s=of_rounds[number]) for name, of_rounds in seconds.items()}
        for number in range(3)
    ]
    shown = table(Part(title="known", systems=(h2o._row("h2o", rounds),))).splitlines()
    heads, _, cells = ([cell.strip() for cell in line.split("|")] for line in shown[2:5])
    told = dict(zip(heads, cells, strict=True))
    assert (told["x recompute"], told["x contiguous"]) == ("4", "1.5")


def test_forms_of_known_seconds_are_compared_with_a_recompute_and_with_the_baseline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage, "step_seconds", as_it_says)
    cache = ContiguousCache(
        RowFormat.full(heads=1, head_dim=2, dtype=DType.FLOAT32),
        layers=AttnLayerMap.all_of(1),
        batch=1,
        max_tokens=1,
        device=torch.device("cpu"),
    )
    cache.extend([1])
    cache.append(0, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
    cache.advance()
    made = storage._compared(
        {
            "plain": lambda: storage.Steps(cache=cache, step=lambda: 3.0),
            "other": lambda: storage.Steps(cache=cache, step=lambda: 2.0),
        },
        lambda: 12.0,
        baseline="plain",
        scale=states.Scale(context=1, num_steps=1, rounds=2),
    )
    figures = [(row.throughput_vs_recompute, row.throughput_vs_contiguous) for row in made]
    assert figures == [(4.0, 1.0), (6.0, 1.5)]


def test_a_decode_and_a_recompute_keep_the_seconds_that_were_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(states, "step_seconds", as_it_says)
    scale = states.Scale(context=1, num_steps=1, rounds=2)
    times = states._timed({"step": lambda: lambda: 2.0}, lambda: 6.0, scale)
    assert (times.step_s, times.anew_s) == ({"step": [2.0, 2.0]}, [6.0, 6.0])
