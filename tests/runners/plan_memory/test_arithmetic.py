"""Known figures follow from sizes alone, and the advice says what to change."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scope_contracts.cache_spec import CacheKind, KVCacheSpec
from scope_contracts.envelope import PlanId
from scope_contracts.errors import CacheError, UserInputError
from scope_contracts.integrity import IntegrityLevel
from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.specs.domains import CacheDomain, SequenceCacheSpec, plan_domains
from scope_rt.lm.specs.row_storage import Contiguous, Paged, RowStorage
from scope_rt.lm.specs.state_format import StateFormat
from scope_runners.plan_memory.control import ControlSize
from scope_runners.plan_memory.gpus import GPUS, gpu_named
from scope_runners.plan_memory.model_size import WanSize
from scope_runners.plan_memory.plan import fits, fitting_changes
from scope_runners.plan_memory.serving import ServingRequirement
from scope_runners.plan_memory.video import VideoRequirement

GB = 10**9
MLA_ROWS = RowFormat.latent(rank=512, rope_dim=64, dtype=DType.BFLOAT16)
MHA_ROWS = RowFormat.full(heads=24, head_dim=128, dtype=DType.BFLOAT16)
WAN_14B = WanSize(num_layers=40, num_attention_heads=40, attention_head_dim=128, ffn_dim=13_824)

NO_CONTROL = ControlSize(text_encoder=0, autoencoder=0, codec=None)


def hybrid(rows: RowFormat) -> SequenceCacheSpec:
    return SequenceCacheSpec(num_layers=52, attention_layers=13, row_format=rows)


def specialists(rows: RowFormat, number: int) -> list[CacheDomain]:
    return [
        CacheDomain(name=f"specialist {i}", spec=hybrid(rows), batch=8, max_tokens=8192)
        for i in range(number)
    ]


def video(*, tp: int = 1, window: int = 21, batch: int = 1) -> VideoRequirement:
    spec = KVCacheSpec(
        num_layers=40,
        num_heads=40,
        head_dim=128,
        frame_tokens=(480 // 16) * (832 // 16),
        sink_frames=0,
        window_frames=window,
        batch=batch,
        dtype=DType.BFLOAT16,
        block_frames=3,
    )
    return VideoRequirement(
        size=WAN_14B,
        spec=spec,
        tp=tp,
        text_len=512,
        plan_id=PlanId.PP0,
        control=NO_CONTROL,
        integrity=IntegrityLevel.OFF,
    )


@pytest.mark.parametrize(
    ("rows", "token", "sequence_mb", "batch_gb", "eight_gb"),
    [(MLA_ROWS, 14_976, 122.7, 0.98, 7.85), (MHA_ROWS, 159_744, 1308.6, 10.47, 83.75)],
    ids=["mla", "mha"],
)
def test_eight_specialists_of_13_attention_layers(
    rows: RowFormat, token: int, sequence_mb: float, batch_gb: float, eight_gb: float
) -> None:
    spec = hybrid(rows)
    assert spec.bytes_per_token() == token
    assert round(spec.bytes_per_sequence(8192) / 1e6, 1) == sequence_mb
    planned = plan_domains(specialists(rows, 8), 84 * GB)
    assert [round(size / GB, 2) for size in planned.values()] == [batch_gb] * 8
    assert round(sum(planned.values()) / GB, 2) == eight_gb


def test_full_keys_and_values_cost_10_67_times_the_latent() -> None:
    assert (MLA_ROWS.bytes_per_row, MHA_ROWS.bytes_per_row) == (1152, 12_288)
    assert round(12_288 / 1152, 2) == 10.67


def test_a_video_ring_of_6_frames_takes_7_7_gb_and_of_32760_tokens_26_8() -> None:
    short, long = video(window=6).plan(), video().plan()
    assert round(short.bytes_of("cache") / GB, 1) == 7.7
    assert video().spec.capacity_tokens == 32_760
    assert round(long.bytes_of("cache") / GB, 1) == 26.8
    assert round(video(tp=2).plan().bytes_of("cache") / GB, 1) == 13.4


def test_the_budget_is_one_and_a_domain_too_many_is_refused_with_the_shortfall() -> None:
    budget = 8 * hybrid(MLA_ROWS).bytes_per_sequence(8192) * 8
    assert len(plan_domains(specialists(MLA_ROWS, 8), budget)) == 8
    with pytest.raises(CacheError, match=rf"{budget // 8} more than the budget of {budget}"):
        plan_domains(specialists(MLA_ROWS, 9), budget)


def test_two_domains_of_one_name_are_refused() -> None:
    with pytest.raises(CacheError, match="two cache domains are called 'specialist 0'"):
        plan_domains(specialists(MLA_ROWS, 1) * 2, 100 * GB)


def test_states_cost_the_same_at_any_length_and_index_keys_grow() -> None:
    state = StateFormat.mamba2(
        num_heads=48,
        head_dim=128,
        state_size=128,
        num_groups=8,
        conv_kernel=4,
        dtype=DType.BFLOAT16,
    )
    plain, with_states = hybrid(MLA_ROWS), replace(hybrid(MLA_ROWS), state_format=state)
    extra = {
        with_states.bytes_per_sequence(n) - plain.bytes_per_sequence(n) for n in (1, 8192, 10**6)
    }
    assert extra == {39 * state.bytes_per_layer}
    keys = RowFormat.latent(rank=64, rope_dim=64, dtype=DType.BFLOAT16)
    indexed = replace(plain, index_format=keys)
    assert indexed.bytes_per_token() - plain.bytes_per_token() == 13 * 2 * 128


def test_latents_are_whole_on_every_rank_and_full_heads_are_shared() -> None:
    assert hybrid(MLA_ROWS).bytes_per_token(8) == hybrid(MLA_ROWS).bytes_per_token(1)
    assert hybrid(MHA_ROWS).bytes_per_token(8) * 8 == hybrid(MHA_ROWS).bytes_per_token(1)


def serving(rows: RowFormat, *, batch: int = 8, weights_bytes: int = 0) -> ServingRequirement:
    domain = CacheDomain(name="model", spec=hybrid(rows), batch=batch, max_tokens=8192)
    return ServingRequirement(domain=domain, num_domains=8, tp=1, weights_bytes=weights_bytes)


def test_paged_rows_come_in_whole_blocks() -> None:
    requirement = serving(MLA_ROWS)
    odd = replace(
        requirement,
        domain=replace(requirement.domain, max_tokens=8185),
        storage=Paged(block_size=256),
    )
    zero_block = 256 * requirement.domain.spec.row_bytes(1)
    assert odd.plan().bytes_of("cache") == requirement.plan().bytes_of("cache") + zero_block


def test_what_fits_needs_no_change() -> None:
    assert fitting_changes(video(window=6), 80 * GB) == ()


def test_each_option_is_changed_no_further_than_needed() -> None:
    needed = video().plan().num_bytes
    assert fitting_changes(video(), needed - GB) == (
        "--tp 2",
        "--kv-cache quantized:int8",
        "--window 20",
    )
    (bits,) = (c for c in fitting_changes(video(), needed - 11 * GB) if "kv-cache" in c)
    assert bits == "--kv-cache quantized:int8"
    assert "--kv-cache quantized:int4" in fitting_changes(video(), needed - 15 * GB)


@given(st.integers(5, 110))
def test_every_answer_fits_and_a_smaller_window_would_not_have_been_needed(gigabytes: int) -> None:
    requirement, room = video(), gigabytes * GB
    changes = fitting_changes(requirement, room)
    if requirement.plan().fits(room):
        assert changes == ()
    for change in changes:
        words = dict(zip(change.split()[::2], change.split()[1::2], strict=True))
        tp = int(words.get("--tp", 1))
        spec = requirement.spec
        if "--kv-cache" in words:
            kind, codec = words["--kv-cache"].split(":")
            spec = replace(spec, kind=CacheKind(kind), codec=CodecKind(codec))
        window = int(words.get("--window", spec.window_frames))
        done = replace(requirement, tp=tp, spec=replace(spec, window_frames=window))
        assert done.plan().fits(room)
        if "--window" in words and window < 21:
            one_more = replace(done, spec=replace(done.spec, window_frames=window + 1))
            assert not one_more.plan().fits(room)


def test_where_one_change_is_not_enough_the_answer_names_several() -> None:
    assert fitting_changes(video(batch=8), 8 * GB) == (
        "--tp 40 --kv-cache quantized:int8",
        "--tp 40 --window 17",
        "--tp 40 --batch 6",
    )
    assert fitting_changes(video(), GB) == (), "weights alone are more"


def test_ranks_that_share_heads_unevenly_are_advised_where_they_stream() -> None:
    """40 heads on 14 ranks are 3 each, and zeros on the last one; heavy hitters refuse that."""
    requirement, room = video(batch=8), 24 * GB
    assert fitting_changes(requirement, room) == ("--tp 14",)
    assert not any(fits(replace(requirement, tp=tp), room) for tp in WAN_14B.degrees if tp < 14)
    scored = replace(requirement, spec=replace(requirement.spec, kind=CacheKind.H2O))
    assert fitting_changes(scored, room) == ("--tp 20",)
    with pytest.raises(UserInputError, match="40 heads are not shared evenly by tp 14; use ring"):
        replace(scored, tp=14)


@pytest.mark.parametrize("storage", [Contiguous(), Paged(block_size=256)])
def test_a_length_is_cut_no_further_than_needed(storage: RowStorage) -> None:
    requirement = replace(serving(MHA_ROWS), storage=storage)
    (change,) = [c for c in fitting_changes(requirement, 70 * GB) if c.startswith("--length")]
    length = int(change.split()[1])

    def fits(tokens: int) -> bool:
        return (
            replace(requirement, domain=replace(requirement.domain, max_tokens=tokens))
            .plan()
            .fits(70 * GB)
        )

    assert fits(length)
    assert not fits(length + 1)


def test_advice_for_a_stream_of_one_process_names_the_plan_that_shares_heads() -> None:
    alone = replace(video(), plan_id=PlanId.SINGLE)
    assert fitting_changes(alone, alone.plan().num_bytes - GB)[0] == "--plan tp_v1_1 --tp 2"


def test_quantized_rows_that_keep_all_bits_are_refused() -> None:
    with pytest.raises(UserInputError, match="'quantized:identity', want ring"):
        replace(video().spec, kind=CacheKind.QUANTIZED)


def test_no_advice_quantizes_a_latent() -> None:
    changes = fitting_changes(serving(MLA_ROWS), 8 * GB)
    assert changes
    assert not any("quantized" in change for change in changes)
    assert any("quantized:int8" in c for c in fitting_changes(serving(MHA_ROWS), 70 * GB))


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserInputError, match="does not divide the model's 40 heads"):
        video(tp=23)
    with pytest.raises(CacheError, match="attention layers: got 53"):
        SequenceCacheSpec(num_layers=52, attention_layers=53, row_format=MLA_ROWS)
    with pytest.raises(CacheError, match="max_tokens: got 0"):
        CacheDomain(name="a", spec=hybrid(MLA_ROWS), batch=1, max_tokens=0)


def test_an_unknown_gpu_names_those_that_are_known() -> None:
    assert gpu_named("H200").memory_mib == 143_771
    with pytest.raises(UserInputError, match=r"h100, h200.*, the nearest is rtx-4090; or give"):
        gpu_named("4090")
    assert all(name == name.lower() for name in GPUS)
