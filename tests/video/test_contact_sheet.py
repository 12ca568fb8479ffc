from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scope_contracts.errors import UserInputError
from scope_rt.video.contact_sheet import write_contact_sheet

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 0, 255)]
FRAMES = [np.full((64, 64, 3), colour, dtype=np.uint8) for colour in COLOURS]
LABELS = [f"{second} s, epoch 0" for second in range(len(FRAMES))]


def test_every_frame_is_on_the_sheet_enlarged_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "sheet.png"
    write_contact_sheet(FRAMES, LABELS, path)
    sheet_HWC = np.asarray(Image.open(path))
    places = []
    for colour in COLOURS:
        rows, columns = np.nonzero((sheet_HWC == colour).all(axis=2))
        assert len(rows) == 128 * 128
        places.append((rows.min(), columns.min()))
    assert places == sorted(places)
    assert list(tmp_path.iterdir()) == [path]


def test_labels_are_drawn_below_their_frames(tmp_path: Path) -> None:
    write_contact_sheet(FRAMES, LABELS, tmp_path / "with.png")
    write_contact_sheet(FRAMES, [""] * len(FRAMES), tmp_path / "without.png")
    with_HWC = np.asarray(Image.open(tmp_path / "with.png")).astype(int)
    without_HWC = np.asarray(Image.open(tmp_path / "without.png"))
    changed_rows = np.nonzero((with_HWC != without_HWC).any(axis=(1, 2)))[0]
    assert changed_rows.min() > 128


def test_labels_must_match_the_frames(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 4 for 5 frames"):
        write_contact_sheet(FRAMES, LABELS[:-1], tmp_path / "sheet.png")


def test_a_sheet_is_a_png(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"want one of \.png"):
        write_contact_sheet(FRAMES, LABELS, tmp_path / "sheet.txt")
    assert list(tmp_path.iterdir()) == []
