"""A model folder is read once per machine; what is remembered of it is never out of date."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scope_contracts.errors import FingerprintError, UserInputError
from scope_contracts.weights import added_up, check_loaded
from scope_rt.bit_digest import bit_digest
from scope_rt.collectives import SoloCollectives
from scope_rt.models import content_cache, file_contents
from scope_rt.models.causal_wan import CausalWanModel
from scope_rt.models.content_cache import ContentCache, Stamp
from scope_rt.models.file_contents import FileEntry
from scope_rt.models.folder_contents import FolderContents
from scope_rt.models.loading import WEIGHTS_NAME, ModelFolder
from scope_rt.models.manifest import Manifest
from scope_rt.models.registry import Registry
from scope_rt.models.shards import is_sharded
from scope_rt.part_place import PartPlace
from scope_rt.tensor_files.stored_tensor import TensorReader
from tests.tensor_parallel import CPU, Group
from tests.tiny_folder import write_tiny_folder

WEIGHTS = f"transformer/{WEIGHTS_NAME}"
NUM_FILES = 7


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "scope-rt"


@pytest.fixture
def folder(tmp_path: Path, cache: Path) -> Path:
    """Old enough that any change of it shows."""
    written = write_tiny_folder(tmp_path / "model")
    settle()
    return written


def settle() -> None:
    time.sleep(content_cache._SETTLED_NS * 1.5e-9)


@pytest.fixture
def files_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read, one by one."""
    names: list[str] = []
    read = FolderContents._read_file

    def counted(self: FolderContents, path: Path) -> FileEntry:
        names.append(path.relative_to(self._folder).as_posix())
        return read(self, path)

    monkeypatch.setattr(FolderContents, "_read_file", counted)
    return names


def fingerprint(folder: Path) -> str:
    """As a process of its own would see it."""
    return ModelFolder.open(folder).fingerprint()


def digests(folder: Path) -> dict[str, int]:
    """What is known of the weights, as a process of its own would see it."""
    known = ModelFolder.open(folder).known_digests()
    assert known is not None
    return known


def test_a_folder_that_was_read_is_not_read_again(folder: Path, files_read: list[str]) -> None:
    assert ModelFolder.open(folder).known_digests() is None
    seen = fingerprint(folder), digests(folder)
    assert len(files_read) == NUM_FILES
    assert (fingerprint(folder), digests(folder)) == seen
    assert len(files_read) == NUM_FILES


def test_each_byte_of_the_weights_is_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[tuple[int, int]] = []
    fill = TensorReader.fill

    def counted(self: TensorReader, target: memoryview, offset: int) -> None:
        if self.path == folder / WEIGHTS:
            spans.append((offset, offset + len(target)))
        fill(self, target, offset)

    monkeypatch.setattr(TensorReader, "fill", counted)
    monkeypatch.setattr(file_contents, "_PIECE_BYTES", 64)
    fingerprint(folder)
    starts, ends = zip(*sorted(spans), strict=True)
    assert starts == (0, *ends[:-1])
    assert ends[-1] == (folder / WEIGHTS).stat().st_size


def test_digests_are_those_of_the_whole_weights_in_the_dtype_of_the_file(folder: Path) -> None:
    fingerprint(folder)
    whole = load_file(folder / WEIGHTS)
    assert digests(folder) == {
        f"{WEIGHTS}/{name}": bit_digest(weight) for name, weight in whole.items()
    }


def load(folder: Path, size: int = 2) -> ModelFolder:
    """What the ranks of a group do, in one process."""
    model = ModelFolder.open(folder)
    model.contents.place()
    read = {
        rank: model.transformer(Group(rank, size), dtype=torch.bfloat16, device=CPU).as_read.stored
        for rank in range(size)
    }
    model.learn(added_up(read, is_sharded), keep=True)
    return model


def test_what_ranks_loaded_by_slice_is_what_the_files_hold(
    folder: Path, files_read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nobody reads the weights for their digests."""
    known = load(folder).known_digests()
    assert known == digests(folder), "kept for other processes too"
    seen = fingerprint(folder)
    assert WEIGHTS not in files_read
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert (fingerprint(folder), digests(folder)) == (seen, known)
    assert WEIGHTS in files_read


def test_weights_that_were_written_while_they_were_loaded_are_not_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformer = ModelFolder.transformer

    def racing(self: ModelFolder, *arguments: Any, **options: Any) -> CausalWanModel:
        model = transformer(self, *arguments, **options)
        path = folder / WEIGHTS
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        return model

    with monkeypatch.context() as patch:
        patch.setattr(ModelFolder, "transformer", racing)
        assert load(folder, size=1).known_digests() is None
    assert ModelFolder.open(folder).known_digests() is None


def test_weights_that_were_written_just_now_are_not_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_cache, "_SETTLED_NS", 10**12)  # this test may take its time
    assert load(folder).known_digests() is None


def test_digests_of_another_function_do_not_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint(folder)
    with monkeypatch.context() as patch:
        patch.setattr(content_cache, "bit_digest", lambda part: 7)
        assert ModelFolder.open(folder).known_digests() is None
    assert digests(folder)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def test_weights_that_a_manifest_does_not_list_are_not_compared_with_it(folder: Path) -> None:
    Manifest(files={}).write(folder)
    ModelFolder.open(folder).check_files({})


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"16", b"17"))


def rewrite_with_old_times(path: Path) -> None:
    before = path.stat()
    rewrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_with_old_times(path: Path) -> None:
    before, other = path.stat(), path.with_suffix(".other")
    other.write_bytes(path.read_bytes().replace(b"16", b"17"))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [grow, rewrite, rewrite_with_old_times, replace_with_old_times])
def test_a_file_that_changed_is_read_again_and_no_other(
    folder: Path, files_read: list[str], change: Callable[[Path], None]
) -> None:
    before = fingerprint(folder)
    files_read.clear()
    change(folder / "recipe.json")
    assert fingerprint(folder) != before
    assert files_read == ["recipe.json"]


def test_a_stream_is_not_named_by_files_that_were_written_since_it_read_them(folder: Path) -> None:
    model = ModelFolder.open(folder)
    before = model.fingerprint()
    rewrite(folder / "recipe.json")
    with pytest.raises(UserInputError, match=r"recipe.json was written while it was read"):
        model.fingerprint()
    assert fingerprint(folder) != before


@pytest.mark.parametrize("part", ["vae", "text_encoder"])
def test_a_part_that_was_replaced_while_it_was_loaded_is_named(
    folder: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelFolder.open(folder)
    file = next((folder / part).glob("*.safetensors"))
    load = Registry.load

    def replaced_first(self: Any, path: Path, place: PartPlace) -> Any:
        other = file.with_suffix(".other")
        other.write_bytes(file.read_bytes())
        other.replace(file)
        return load(self, path, place)

    monkeypatch.setattr(Registry, "load", replaced_first)
    with pytest.raises(UserInputError, match=f"{file.name} was written while it was read"):
        model.codec() if part == "vae" else model.text_encoder()


def test_a_file_added_or_removed_changes_the_fingerprint(folder: Path) -> None:
    before = fingerprint(folder)
    (folder / "vae" / "notes.txt").write_text("")
    assert fingerprint(folder) != before
    (folder / "vae" / "notes.txt").unlink()
    assert fingerprint(folder) == before


def test_hidden_files_are_no_part_of_a_model(folder: Path) -> None:
    before = fingerprint(folder)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "download.json").write_text("{}")
    (folder / "vae" / ".lock").write_text("")
    assert fingerprint(folder) == before


def test_a_folder_behind_links_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    assert fingerprint(linked) == fingerprint(folder)


def test_a_link_that_leads_back_is_not_followed(folder: Path) -> None:
    before = fingerprint(folder)
    (folder / "vae" / "loop").symlink_to(folder)
    assert fingerprint(folder) == before


def test_a_file_written_just_now_is_not_remembered(
    folder: Path, files_read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as slowly:
        slowly.setattr(content_cache, "_SETTLED_NS", 10**12)  # this test may take its time
        rewrite(folder / "recipe.json")
        for _ in range(2):
            files_read.clear()
            fingerprint(folder)
            assert "recipe.json" in files_read
    settle()
    fingerprint(folder)
    files_read.clear()
    fingerprint(folder)
    assert not files_read


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, files_read: list[str]
) -> None:
    read = FolderContents._read_file

    def racing(self: FolderContents, path: Path) -> FileEntry:
        entry = read(self, path)
        if path.name == "recipe.json":
            rewrite(path)
        return entry

    with monkeypatch.context() as patch:
        patch.setattr(FolderContents, "_read_file", racing)
        with pytest.raises(UserInputError, match=r"recipe.json was written while it was read"):
            fingerprint(folder)
    files_read.clear()
    fingerprint(folder)
    assert files_read == ["recipe.json"]


def test_files_that_were_read_before_a_start_failed_are_not_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, files_read: list[str]
) -> None:
    read, num_failed_after = FolderContents._read_file, 3

    def failing(self: FolderContents, path: Path) -> FileEntry:
        if len(files_read) == num_failed_after:
            raise InterruptedError
        return read(self, path)

    with monkeypatch.context() as patch, pytest.raises(UserInputError):
        patch.setattr(FolderContents, "_read_file", failing)
        fingerprint(folder)
    fingerprint(folder)
    assert len(files_read) == len(set(files_read)) == NUM_FILES


def test_ranks_of_one_machine_read_a_folder_once(folder: Path, files_read: list[str]) -> None:
    with ThreadPoolExecutor(4) as ranks:
        seen = set(ranks.map(fingerprint, [folder] * 4))
    assert len(seen) == 1
    assert sorted(files_read) == sorted(set(files_read))


def test_a_rank_does_not_wait_for_ever_for_one_that_reads(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    files_read: list[str],
) -> None:
    monkeypatch.setattr(content_cache, "LOCK_WAIT_S", 0.2)
    monkeypatch.setattr(content_cache, "LOCK_WARNING_S", 0.1)
    kept = ContentCache.of(folder)
    assert kept is not None
    with kept.lock():
        assert fingerprint(folder)
    assert len(files_read) == NUM_FILES
    (message,) = caplog.messages
    assert "waiting up to 0 s for another process" in message
    assert ".lock" in message


def test_a_disk_that_gives_other_weights_under_the_same_times_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint(folder)
    stamps = {path: Stamp.of(path) for path in folder.rglob("*")}
    weights = load_file(folder / WEIGHTS)
    weights["blocks.0.attn1.to_q.weight"][3, 2] += 1
    save_file(weights, folder / WEIGHTS)
    monkeypatch.setattr(Stamp, "of", staticmethod(stamps.__getitem__))
    model = ModelFolder.open(folder)
    loaded = model.transformer(SoloCollectives(), dtype=torch.float32, device=CPU)
    known = model.known_digests()
    assert known is not None
    with pytest.raises(FingerprintError, match=r"/blocks\.0\.attn1\.to_q\.weight"):
        check_loaded({0: loaded.as_read.stored}, known, is_sharded)
