from pathlib import Path

import pytest

from scope_rt import output_file


def test_a_failed_write_leaves_the_earlier_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("earlier")
    with (
        pytest.raises(KeyboardInterrupt),
        output_file.replacing(path, suffixes=(".json",)) as partial,
    ):
        partial.write_text("half of")
        raise KeyboardInterrupt
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_the_partial_file_keeps_the_suffix_beside_the_target(tmp_path: Path) -> None:
    partial = output_file.claim(tmp_path / "Video.MP4", suffixes=(".mp4",))
    assert partial.suffix == ".mp4"
    assert partial.parent == tmp_path
    assert partial.name.startswith(".")
