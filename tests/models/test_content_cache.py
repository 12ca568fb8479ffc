"""What is remembered of a model folder lies in a user's cache, and what is spoilt counts not."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scope_rt.models.content_cache import ContentCache
from scope_rt.models.loading import ModelFolder
from tests.models.test_folder_contents import NUM_FILES, cache, files_read, fingerprint, folder

__all__ = ["cache", "files_read", "folder"]


def flip_a_digit(text: str) -> str:
    at = text.index('"rest": "') + len('"rest": "')
    return text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]


@pytest.mark.parametrize(
    "spoil",
    [
        flip_a_digit,
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: json.dumps(json.loads(text) | {"version": 0}),
        lambda text: json.dumps(json.loads(text) | {"files": []}),
        lambda text: "[" * 100_000,
    ],
)
def test_a_cache_file_that_is_not_what_was_written_is_ignored(
    folder: Path, cache: Path, files_read: list[str], spoil: Callable[[str], str]
) -> None:
    before = fingerprint(folder)
    (kept,) = cache.glob("*.json")
    kept.write_text(spoil(kept.read_text()))
    files_read.clear()
    assert fingerprint(folder) == before
    assert len(files_read) == NUM_FILES


def test_without_a_folder_to_write_to_everything_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_read: list[str]
) -> None:
    before = fingerprint(folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    files_read.clear()
    model = ModelFolder.open(folder)
    assert model.fingerprint() == before
    assert len(files_read) == NUM_FILES
    model.fingerprint()
    model.known_digests()
    assert len(files_read) == NUM_FILES, "a process remembers by itself"


def test_a_user_without_xdg_has_the_cache_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        kept = ContentCache.of(tmp_path)
        assert kept is not None
        with kept.lock():
            assert (tmp_path / ".cache" / "scope-rt").is_dir()


def test_each_model_folder_has_its_own_entries(folder: Path, cache: Path) -> None:
    before = fingerprint(folder)
    assert fingerprint(folder.rename(folder.with_name("moved"))) == before
    assert len(list(cache.glob("*.json"))) == 2
