"""With R0a, rank0 supplies the context of every recompute, and the mesh has no other source."""

from tests.break_it.broken import Broken, said


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
