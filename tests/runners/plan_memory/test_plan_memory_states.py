"""What recurrent states take is planned as a step holds it: the new ones beside the old ones."""

from dataclasses import replace

import pytest
import torch

from scope_lab.kv_bench.hybrid import domain
from scope_lab.kv_bench.states import NUM_DOMAINS, Scale, measure_domains
from scope_rt.lm.cache.domains import CacheDomains
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.cache.state import StateCache
from scope_runners.plan_memory.serving import ServingRequirement
from tests.lab.live_bytes import LiveBytes
from tests.runners.plan_memory.plan_requests import required

CPU = torch.device("cpu")
SIZES = "--layers 4 --attention-layers 1 --heads 4 --head-dim 16 --mamba2 8x32x64x2x4 --batch 8"
STATES = ("recurrent states", "new states of a span")


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [[1] * 8, [1, 0] * 4], ids=["all move", "some stay"])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_planned_for_states_is_the_most_that_a_step_holds(
    given: torch.dtype, counts: list[int], tp: int
) -> None:
    requirement = required(f"{SIZES} --dtype bfloat16 --tp {tp}")
    plan, state_format = requirement.plan(), requirement.domain.spec.state_format
    assert state_format is not None
    shared = state_format.shard(tp)
    new = [torch.ones((8, *part.shape), dtype=given) for part in shared.parts]  # the model's own
    with LiveBytes(new) as live:
        cache = StateCache(shared, layers=(0, 1, 2), batch=8, device=CPU)
        cache.extend(counts)
        for layer in cache.layers:
            cache.update(layer, *new)
        cache.advance()
    assert cache.num_bytes == plan.bytes_of("recurrent states")
    assert live.peak == pytest.approx(sum(map(plan.bytes_of, STATES)), rel=1e-3)


@pytest.mark.parametrize("models", [1, 8])
def test_new_states_are_those_of_one_model_at_a_time(models: int) -> None:
    requirement = required(f"{SIZES} --models {models}")
    held, new = map(requirement.plan().bytes_of, STATES)
    assert held == models * new
    assert new == requirement.domain.span_bytes() > 0
    domains = CacheDomains(models * requirement.domain.num_bytes())
    layers = AttnLayerMap(num_layers=4, attention_layers=(3,))
    assert domains.span_bytes == 0
    for number in range(models):
        domains.open(replace(requirement.domain, name=str(number)), layers=layers, device=CPU)
    assert domains.span_bytes == new


def test_states_of_layers_that_do_not_attend_are_a_line_of_any_length() -> None:
    given = "--model mla-52 --mamba2 48x128x128x8x4 --length"
    sizes = {required(f"{given} {n}").plan().bytes_of("recurrent states") for n in (100, 10_000)}
    assert sizes == {39 * 2 * ((48 * 128 + 2 * 8 * 128) * 3 + 48 * 128 * 128)}


def test_states_are_shared_by_the_ranks() -> None:
    given = "--model mla-52 --mamba2 48x128x128x8x4 --tp"
    one, four = (required(f"{given} {tp}").plan().bytes_of("recurrent states") for tp in (1, 4))
    assert one == 4 * four


def test_states_that_were_not_given_are_a_line_that_says_so_and_none_of_their_span() -> None:
    (line,) = (line for line in required("--model mla-52").plan().lines if "states" in line.name)
    assert (line.name, line.is_estimate, line.is_known) == ("recurrent states", True, False)
    assert line.because == "not known: 39 layers do not attend; give --mamba2"


def test_the_peak_of_the_benchmarks_domains_is_what_is_planned_for_models_side_by_side() -> None:
    scale = Scale(context=32, num_steps=1, rounds=1)
    requirement = ServingRequirement(
        domain=domain("any", scale.max_tokens), num_domains=NUM_DOMAINS, tp=1, weights_bytes=0
    )
    counted = ("cache", "index keys", *STATES)
    assert measure_domains(scale).peak_bytes == sum(map(requirement.plan().bytes_of, counted))
