"""Where attention turns queries and keys itself, it is computed again as elsewhere."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scope_contracts.errors import IntegrityError
from scope_contracts.integrity import IntegrityLevel
from scope_rt.control.chunk import Chunk
from scope_rt.faults import FaultPoint
from scope_rt.integrity.verifier import AUDITED_CHUNKS
from scope_rt.models.recipe_choices import Positions
from scope_runners.break_it.actions.computing import ACTIONS
from tests.integrity.audited import AuditedStream, Fault
from tests.integrity.corruption import Change, stream
from tests.integrity.turning_faults import WINDOW_FAULTS
from tests.tiny_folder import RECIPE, write_tiny_folder
from tests.tiny_models import Rollout


@pytest.mark.parametrize("fault", WINDOW_FAULTS[:3], ids=str)
def test_half_precision_hides_no_place_where_places_matter(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights give scores near 0, and all keys about as much of what comes out."""
    rollout = Rollout(sink=1, window=8, dtype=torch.bfloat16)
    rollout.generator.positions = Positions.IN_WINDOW
    for block in rollout.model.blocks:
        block.get_parameter("attn1.norm_q.weight").mul_(8)
    audited = AuditedStream(rollout, IntegrityLevel.STRICT)
    audited.run(range(3))
    fault.bring_about(audited.rollout, monkeypatch)
    with pytest.raises(IntegrityError, match=r"chunk 3, rank 0, .*self-attention"):
        audited.run([3])


@pytest.mark.parametrize(("level", "num_chunks"), [("strict", 4), ("default", AUDITED_CHUNKS + 1)])
def test_a_stream_of_such_a_recipe_is_not_shown_what_a_wrong_kernel_gave(
    tmp_path: Path, level: str, num_chunks: int
) -> None:
    folder = write_tiny_folder(tmp_path / "model", replace(RECIPE, positions=Positions.IN_WINDOW))
    change, shown = Change(FaultPoint.GENERATOR, 3, ACTIONS["change_kernel"]), list[Chunk]()
    with pytest.raises(IntegrityError, match=f"chunk {num_chunks - 1}, rank 0, .*self-attention"):
        stream(change, num_chunks=num_chunks, shown=shown, model=folder, integrity=level)
    assert len(shown) == num_chunks - 1
