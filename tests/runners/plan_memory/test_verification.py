"""What verifying keeps is a line of the plan, and as many bytes as a session keeps for it."""

import gc
import json
import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch

from scope_contracts.integrity import IntegrityLevel
from scope_rt.config import StreamConfig
from scope_rt.session import StreamSession
from scope_runners.main import main
from scope_runners.plan_memory.model_size import WanSize
from scope_runners.plan_memory.verification import Verification
from tests.integrity.corruption import PROMPT


def report(arguments: str, capsys: pytest.CaptureFixture[str]) -> Any:
    main(["plan-memory", "--json", *arguments.split()])
    return json.loads(capsys.readouterr().out)


def lines(arguments: str, rank: int, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    (part,) = (each for each in report(arguments, capsys)["ranks"] if rank in each["ranks"])
    return {line["name"]: line["bytes"] for line in part["lines"]}


def storages() -> dict[int, int]:
    """Bytes of all memory that tensors have on the CPU, by its place."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a module of PyTorch's warns of being looked at
        tensors = [each for each in gc.get_objects() if type(each) in _TENSORS]
    found: dict[int, int] = {}
    for tensor in tensors:
        with suppress(NotImplementedError):  # those that PyTorch traces with have no memory
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


_TENSORS = (torch.Tensor, torch.nn.Parameter)


def kept_bytes(level: str) -> tuple[int, StreamSession]:
    """Bytes of tensors that a session of the embedded model keeps between two chunks."""
    before = set(storages())
    with StreamSession(StreamConfig.of(integrity=level)) as session:
        for chunk in session.stream(PROMPT, num_chunks=4):
            if chunk.chunk_index == 2:
                del chunk
                now = storages()
                kept = sum(size for place, size in now.items() if place not in before)
    return kept, session


@pytest.mark.parametrize("level", ["default", "strict"])
def test_a_session_keeps_what_is_planned_for_verification(level: str) -> None:
    without, session = kept_bytes("off")
    kept, setup = kept_bytes(level)[0] - without, session.setup
    config, spec = setup.model.config, setup.cache_spec
    sizes = WanSize.of(config)
    text_len = setup.model.text_sizes().text_len
    planned = Verification(size=sizes, spec=spec, tp=1, text_len=text_len)
    is_strict = level == "strict"  # which looks at all calls of each chunk
    least = 0.6 * planned.kept_bytes if is_strict else 0
    most = 1.15 * planned.kept_bytes + planned.working_bytes(5 if is_strict else 1)
    assert least < kept < most


def test_verification_is_a_line_of_its_own_at_each_level(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"verification": 1, "decoder memory, again": 0}
    for name, rank in names.items():
        by_level = {
            level: lines(f"--model wan-1.3b --plan pp0 --integrity {level}", rank, capsys).get(name)
            for level in IntegrityLevel
        }
        assert by_level[IntegrityLevel.OFF] is None
        default, strict = by_level[IntegrityLevel.DEFAULT], by_level[IntegrityLevel.STRICT]
        assert default is not None
        assert strict is not None
        assert 0 < default <= strict
    assert "verification" not in lines("--model wan-1.3b --plan pp0", 0, capsys)


def test_ranks_that_share_heads_keep_less_of_what_they_share(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, four = (
        lines(f"--model wan-1.3b --plan pp0 --tp {tp}", 1, capsys)["verification"] for tp in (1, 4)
    )
    assert one / 4 < four < one
