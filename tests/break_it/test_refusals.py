"""What is not as it was planned is refused: by the rank that sees it, and before it is shown.

In one file, for all of it is held against the same few clean runs.
"""

import pytest

from tests.break_it.broken import Broken, said


# Ranks that were started for different plans stop before the first model collective.
def test_another_plan_in_rank_2s_environment_stops_all_ranks_before_the_first_chunk(
    broken: Broken,
) -> None:
    result = broken("plan-mismatch/variable")
    assert result.ends == ("ParityError",) * 3
    assert said(result, 2).startswith("ParityError: plan_id (SCOPE_TP_PLAN): rank 0 has 'pp1'")
    assert result.num_chunks == 0


def test_another_plan_in_rank_1s_arguments_stops_all_ranks_before_the_first_chunk(
    broken: Broken,
) -> None:
    result = broken("plan-mismatch/arguments")
    assert result.ends == ("ParityError",) * 2
    assert result.num_chunks == 0


# A generator call that was not planned never starts, and a short count is never committed.
def test_a_call_too_many_on_rank_2_in_chunk_3_is_refused_on_entry(broken: Broken) -> None:
    result = broken("call-count/extra")
    assert said(result, 2).startswith("CallCountError: chunk 3: generator call 4, budget 3")
    assert result.ends[:2] == ("PeerLostError",) * 2


def test_a_call_too_few_on_rank_1_in_chunk_3_is_refused_at_commit(broken: Broken) -> None:
    result = broken("call-count/short")
    assert said(result, 1).startswith("CallCountError: chunk 3: generator calls: got 2, want 3")
    assert result.num_chunks <= 3


def test_a_real_step_too_many_on_rank_1_strands_nobody_in_a_collective(broken: Broken) -> None:
    result = broken("call-count/steps")
    assert said(result, 1).startswith("CallCountError: chunk 3: generator call 4, budget 3")
    assert result.ends[0] == "PeerLostError"


# A recompute without its context is refused: by rank0 before a byte, or else by the leader.
def test_rank0_refuses_to_send_a_recompute_without_context_and_the_mesh_leaves_in_order(
    broken: Broken,
) -> None:
    result = broken("override/planned")
    assert said(result, 0).startswith("PreflightError: context_frames_override: got")
    assert result.ends[1] == "left"


def test_the_leader_refuses_it_before_its_group_has_heard_of_chunk_3(broken: Broken) -> None:
    result = broken("override/sent")
    assert said(result, 1).startswith("PreflightError: context_frames_override: got")
    assert (result.ends[0], result.ends[2]) == ("PeerLostError",) * 2
    assert result.num_chunks <= 3


# A cache is reset by all ranks at an epoch boundary, or the stream stops.
def test_a_cache_emptied_on_rank0_alone_is_seen_by_both_ranks_before_chunk_3(
    broken: Broken,
) -> None:
    result = broken("cache-reset/out-of-band")
    assert result.ends == ("ParityError",) * 2
    assert said(result, 1).startswith("ParityError: chunk 3: global_end_index: rank 0 has 0")
    assert result.num_chunks == 3


def test_a_reset_without_a_new_epoch_never_leaves_rank0(broken: Broken) -> None:
    result = broken("cache-reset/no-epoch")
    assert said(result, 0).startswith("EpochError: chunk 3: cache_epoch with init_cache True")
    assert (result.ends[1], result.num_chunks) == ("left", 3)


# `current_start_frame` follows the stream's progression on every rank, or the stream stops.
def test_a_start_frame_that_is_off_never_leaves_rank0(broken: Broken) -> None:
    result = broken("start-frame/planned")
    wanted = "StartFrameError: chunk 3: current_start_frame: got 10, want 9"
    assert said(result, 0).startswith(wanted)
    assert result.ends[1] == "left"


def test_a_start_frame_that_is_off_on_arrival_is_refused_by_the_leader(broken: Broken) -> None:
    result = broken("start-frame/sent")
    assert said(result, 1).startswith("StartFrameError: chunk 3: current_start_frame: got 10")
    assert result.num_chunks <= 3


def test_a_start_frame_that_is_off_on_rank_1_alone_is_refused_there(broken: Broken) -> None:
    result = broken("start-frame/one-rank")
    assert said(result, 1).startswith("StartFrameError: chunk 3: current_start_frame: got 10")
    assert result.ends[0] == "PeerLostError"


# A result that is not the answer to the current question is never emitted.
def test_a_late_result_after_a_hard_cut_is_never_emitted(broken: Broken) -> None:
    result = broken("late-result")
    assert result.ends == ("left",) * 2
    assert result.num_chunks == 8


def test_the_answer_of_the_chunk_before_is_refused_by_rank0(broken: Broken) -> None:
    result = broken("stale-answer")
    assert said(result, 0).startswith("OrderError: result: got call, chunk, epoch (2, 2, 0)")
    assert result.num_chunks == 3


# With R0a, rank0 supplies the context of every recompute, and the mesh has no other source.
def test_a_recompute_model_without_context_is_refused_before_a_byte(broken: Broken) -> None:
    result = broken("r0a/omitted")
    assert said(result, 0).startswith("PreflightError: context_frames_override: got")
    assert "the mesh has no other source" in said(result, 0)


def test_a_context_of_another_length_is_refused_before_a_byte(broken: Broken) -> None:
    result = broken("r0a/shortened")
    assert said(result, 0).startswith("PreflightError: context_frames_override.shape: got")


def test_the_mesh_refuses_a_recompute_whose_context_was_lost_on_the_way(broken: Broken) -> None:
    result = broken("r0a/lost")
    assert said(result, 1).startswith("PreflightError: context_frames_override: got")
    assert result.num_chunks == 3


# Nothing of an epoch that was cut off gets past rank0: not to a file, not to a viewer.
def test_a_late_result_reaches_neither_recording_nor_video_nor_viewer(broken: Broken) -> None:
    assert broken("late-result/whole-pipe").num_chunks == 8


# The attention backend is the same on all ranks, or the stream does not start.
def test_another_backend_on_rank_1_stops_both_ranks_before_the_first_chunk(broken: Broken) -> None:
    result = broken("backend-mismatch")
    assert said(result, 0).startswith("ParityError: kv_bias_backend (SCOPE_KV_BIAS_BACKEND)")
    assert (result.ends, result.num_chunks) == (("ParityError",) * 2, 0)


# `kv_cache_attention_bias` is the planned one on every rank, or the chunk is not shown.
def test_another_bias_on_rank_1_is_seen_by_both_ranks_before_chunk_3(broken: Broken) -> None:
    result = broken("bias-on-one-rank")
    wanted = "ParityError: chunk 3: kv_cache_attention_bias: rank 0 has 1.0, rank 1 has 0.5"
    assert said(result, 0).startswith(wanted)
    assert result.num_chunks == 3


def test_another_bias_on_a_mesh_of_one_is_seen_by_rank0_in_its_answer(broken: Broken) -> None:
    result = broken("bias-on-the-mesh")
    assert said(result, 0).startswith("ParityError: chunk 3: the state digest")
    assert result.num_chunks == 3


# The denoising steps are the planned ones on every rank, or the chunk is not made.
def test_a_longer_step_list_on_rank_1_is_seen_by_both_ranks_before_chunk_3(
    broken: Broken,
) -> None:
    result = broken("steps-on-one-rank")
    assert said(result, 0).startswith("ParityError: chunk 3: num_denoise_steps: rank 0 has 2")
    assert (result.ends, result.num_chunks) == (("ParityError",) * 2, 3)


# Weights are those of the checkpoint when a stream starts, and stay so.
def test_one_wrong_bit_in_rank_2s_shard_stops_all_ranks_before_the_first_chunk(
    broken: Broken,
) -> None:
    result = broken("weights/at-load")
    assert result.ends == ("FingerprintError",) * 3
    assert "blocks.0.attn1.to_q.weight" in said(result, 0)
    assert result.num_chunks == 0


def test_a_bit_of_rank_1s_weights_that_flips_in_memory_stops_it_before_chunk_3(
    broken: Broken,
) -> None:
    result = broken("weights/mid-stream")
    assert said(result, 1).startswith("FingerprintError: chunk 3: rank 1: weight blocks.0.attn1")
    assert (result.ends[0], result.num_chunks) == ("IntegrityError", 3)


# What arrives on a link is what was sent, or it is not used.
def test_a_bit_of_latents_in_that_flips_on_the_link_is_refused_by_the_leader(
    broken: Broken,
) -> None:
    result = broken("bit-flip/inputs")
    assert said(result, 1).startswith("DigestError: chunk 3: latents_in from rank 0")
    assert (result.ends[0], result.ends[2]) == ("PeerLostError",) * 2


def test_a_bit_of_latents_out_that_flips_on_the_link_is_refused_by_rank0(broken: Broken) -> None:
    result = broken("bit-flip/answer")
    assert said(result, 0).startswith("DigestError: chunk 3: latents_out from rank 1")
    assert result.num_chunks == 3


# An envelope of another version is refused by its number, before anything else of it is read.
def test_an_envelope_of_version_99_is_refused_by_the_leader(broken: Broken) -> None:
    result = broken("unknown-version")
    assert said(result, 1).startswith("VersionError: pp_envelope_version: got 99")
    assert result.ends[0] == "PeerLostError"
    assert result.num_chunks <= 3


# Envelopes are run once each, in the order of their calls.
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("order/duplicated", "OrderError: call_id: got 3, want 4"),
        ("order/reordered", "OrderError: call_id: got 4, want 3"),
        ("order/replayed", "OrderError: call_id: got 2, want 3"),
    ],
)
def test_an_envelope_that_is_not_the_next_one_is_refused_by_the_leader(
    broken: Broken, name: str, sentence: str
) -> None:
    result = broken(name)
    assert said(result, 1).startswith(sentence)
    assert result.ends[0] == "PeerLostError"
