"""A model that nobody has read before is read once, by all ranks together."""

import time
from pathlib import Path
from typing import Any

import pytest

from scope_rt.config import StreamConfig
from scope_rt.models.content_cache import _SETTLED_NS
from scope_rt.models.loading import WEIGHTS_NAME
from scope_rt.models.shards import is_sharded
from scope_rt.session import StreamSession
from scope_rt.tensor_files.safetensors_file import tensors_of
from scope_rt.tensor_files.stored_tensor import TensorReader
from scope_rt.tensors import sha256_of
from tests.multiprocess.ranks import Ranks
from tests.tiny_folder import write_tiny_folder

WEIGHTS = f"transformer/{WEIGHTS_NAME}"


def bytes_of_weights_read(folder: Path, plan: str, tp: int) -> int:
    """How much of the transformer's tensors this rank reads until it has streamed a chunk, and
    rank0 has named the model in its log."""
    read, fill = list[int](), TensorReader.fill

    def counted(self: TensorReader, target: memoryview, offset: int) -> None:
        if self.path == folder / WEIGHTS and offset:
            read.append(len(target))
        fill(self, target, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
        patch.setattr(TensorReader, "fill", counted)
        config = StreamConfig.load(model=folder, plan=plan, tp=tp, log=folder.parent / "log")
        with StreamSession(config) as session:
            list(session.stream("red circle", num_chunks=1))
    return sum(read)


@pytest.mark.parametrize(("plan", "num_ranks"), [("tp_v1_1", 2), ("pp1", 3)])
def test_ranks_read_each_byte_of_new_weights_once(
    ranks: Ranks, tmp_path: Path, plan: str, num_ranks: int
) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    sizes = {tensor.name: tensor.num_bytes for tensor in tensors_of(folder / WEIGHTS)}
    of_both = sum(size for name, size in sizes.items() if not is_sharded(name))
    time.sleep(_SETTLED_NS * 1.5e-9)  # what was written just now is read again
    read = ranks.results(num_ranks, bytes_of_weights_read, folder=folder, plan=plan, tp=2)
    assert sum(read) == sum(sizes.values()) + of_both


def latents_digests(folder: Path, plan: str, **settings: Any) -> list[str]:
    """Of two chunks, on rank0."""
    with StreamSession(StreamConfig.load(model=folder, plan=plan, tp=2, **settings)) as session:
        return [sha256_of(chunk.latents) for chunk in session.stream("red circle", num_chunks=2)]


@pytest.mark.parametrize(("plan", "num_ranks"), [("tp_v1_1", 2), ("pp1", 3)])
def test_ranks_warm_up_together_and_stream_the_same(
    ranks: Ranks, folder: Path, plan: str, num_ranks: int
) -> None:
    cold, *_ = ranks.results(num_ranks, latents_digests, folder=folder, plan=plan)
    warm, *_ = ranks.results(num_ranks, latents_digests, folder=folder, plan=plan, warm_up=True)
    assert warm == cold
