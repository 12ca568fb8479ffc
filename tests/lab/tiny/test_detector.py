"""The detector names what is to be seen, survives blur, and is not fooled by wrong pictures."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scope_lab.tiny.detector import chunk_report, detect
from scope_lab.tiny.world import CHUNK_FRAMES, sample_clips, simulate
from scope_rt.text.words import Colour, Shape, parse


def _uint8(video_TCHW: Tensor) -> np.ndarray:
    return ((video_TCHW + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("blurred", [False, True])
def test_the_truth_is_named_in_99_of_100_frames(blurred: bool) -> None:
    clips = sample_clips(20, 24, torch.Generator().manual_seed(11), 1.0)
    right = total = 0
    for video, scenes in zip(clips.video_BTCHW, clips.scenes, strict=True):
        if blurred:
            video = F.avg_pool2d(F.pad(video, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
        for index in range(1, 24, 4):
            wanted = {(t.colour, t.shape) for t in scenes[index // CHUNK_FRAMES].objects}
            seen = detect(_uint8(video[index : index + 1])[0])
            right += {(d.colour, d.shape) for d in seen} == wanted and len(seen) == len(wanted)
            total += 1
    assert right / total >= 0.99


def test_area_and_centre_are_in_pixels() -> None:
    frame = np.zeros((64, 64, 3), np.uint8)
    frame[10:26, 30:46] = (230, 40, 40)
    (seen,) = detect(frame)
    assert (seen.colour, seen.shape) == (Colour.RED, Shape.SQUARE)
    assert seen.area_px == 256
    assert seen.centre_px == (38.0, 18.0)


def test_blur_does_not_change_the_area() -> None:
    video = simulate([[parse("a white circle on gray")]], torch.Generator().manual_seed(4))[0]
    blurred = F.avg_pool2d(F.pad(video, (3, 3, 3, 3), mode="replicate"), 7, stride=1)
    (sharp,), (soft,) = (detect(_uint8(shown)[0]) for shown in (video, blurred))
    assert soft.area_px == pytest.approx(sharp.area_px, rel=0.1)


def test_a_long_bar_is_no_known_shape() -> None:
    frame = np.zeros((64, 64, 3), np.uint8)
    frame[30:36, 5:60] = (230, 40, 40)
    (seen,) = detect(frame)
    assert seen.shape is None


def test_specks_and_empty_pictures_hold_nothing() -> None:
    frame = np.full((64, 64, 3), 96, np.uint8)
    frame[20:25, 20:25] = 245
    assert detect(frame) == []


def test_a_report_finds_what_is_missing_wrong_or_too_much() -> None:
    shown = parse("a red circle and a blue square")
    frames = _uint8(simulate([[shown]], torch.Generator().manual_seed(2))[0])

    def verdict(prompt: str) -> tuple[bool, bool, bool]:
        report = chunk_report(frames, parse(prompt))
        return report.colours_present, report.shapes_right, report.no_extra

    assert verdict("a red circle and a blue square") == (True, True, True)
    assert verdict("a red circle and a blue triangle") == (True, False, True)
    assert verdict("a red circle and a green square") == (False, False, False)
    assert verdict("a red circle") == (True, True, False)


def test_an_object_seen_in_a_third_of_the_frames_is_not_present() -> None:
    scene = parse("a red circle")
    frames = _uint8(simulate([[scene]], torch.Generator().manual_seed(2))[0])
    frames[4:] = 0
    assert not chunk_report(frames, scene).colours_present
