"""A recompute without its context is refused: by rank0 before a byte, or else by the leader."""

from tests.break_it.broken import Broken, said


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
