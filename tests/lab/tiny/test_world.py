"""The world moves as it says: named speeds, no overlap, and a change of scene keeps the paths."""

from itertools import pairwise

import pytest
import torch

from scope_lab.tiny.detector import detect
from scope_lab.tiny.world import (
    CHUNK_FRAMES,
    SPEED_PX_PER_FRAME,
    sample_clips,
    sample_scenes,
    simulate,
)
from scope_rt.text.words import parse


def _centres(video_TCHW: torch.Tensor) -> torch.Tensor:
    frames = ((video_TCHW + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return torch.tensor([detect(frame)[0].centre_px for frame in frames])


def test_equal_seeds_give_equal_clips() -> None:
    first, again, other = (
        sample_clips(2, 24, torch.Generator().manual_seed(seed), 0.5) for seed in (3, 3, 4)
    )
    assert torch.equal(first.video_BTCHW, again.video_BTCHW)
    assert first.scenes == again.scenes
    assert not torch.equal(first.video_BTCHW, other.video_BTCHW)


def test_clips_have_the_promised_shape_and_range() -> None:
    clips = sample_clips(3, 36, torch.Generator().manual_seed(0), 0.5)
    assert clips.video_BTCHW.shape == (3, 36, 3, 64, 64)
    assert clips.video_BTCHW.dtype == torch.float32
    assert clips.video_BTCHW.abs().max() <= 1
    assert [len(clip) for clip in clips.scenes] == [3, 3, 3]


@pytest.mark.parametrize(("probability", "changes"), [(0.0, 0), (1.0, 24)])
def test_change_probability_decides_how_often_scenes_change(
    probability: float, changes: int
) -> None:
    clips = sample_clips(8, 48, torch.Generator().manual_seed(0), probability)
    seen = sum(a is not b for clip in clips.scenes for a, b in pairwise(clip))
    assert seen == changes


@pytest.mark.parametrize("speed", SPEED_PX_PER_FRAME)
def test_objects_move_at_the_named_speed(speed: str) -> None:
    scene = parse(f"a red circle, {speed}")
    video = simulate([[scene] * 4], torch.Generator().manual_seed(5))[0]
    steps_px = (_centres(video)[1:] - _centres(video)[:-1]).norm(dim=-1)
    assert float(steps_px.median()) == pytest.approx(SPEED_PX_PER_FRAME[scene.speed], abs=0.15)


def test_objects_never_overlap_or_leave_the_picture() -> None:
    scene = parse("a red triangle and a green square, fast")
    video = simulate([[scene] * 8] * 4, torch.Generator().manual_seed(6))
    red, green = ((video[:, :, channel] + 1) * 127.5 for channel in (0, 1))
    assert not bool(((red > 120) & (green > 120)).any())
    areas = (red > 120).sum((2, 3))
    assert int(areas.min()) > 0.85 * int(areas.max())


def test_objects_that_meet_keep_their_distance_and_part_at_once() -> None:
    scene = parse("a red circle and a green circle, fast")
    video = simulate([[scene] * 8] * 4, torch.Generator().manual_seed(6))
    frames = ((video + 1) * 127.5).round().to(torch.uint8).permute(0, 1, 3, 4, 2).numpy()
    centres = torch.tensor(
        [[[seen.centre_px for seen in detect(frame)] for frame in clip] for clip in frames]
    )
    gap_px = (centres[:, :, 0] - centres[:, :, 1]).norm(dim=-1)
    near = gap_px < 24.7
    assert float(gap_px.min()) > 24
    assert bool(near.any())
    assert not bool((near[:, :-2] & near[:, 1:-1] & near[:, 2:]).any())


def test_a_change_of_scene_keeps_the_path() -> None:
    before, after = parse("a red circle, slow"), parse("a blue square, slow, on gray")
    video = simulate([[before, after]], torch.Generator().manual_seed(7))[0]
    centres = _centres(video)
    jump_px = (centres[CHUNK_FRAMES] - centres[CHUNK_FRAMES - 1]).norm()
    assert float(jump_px) < 2


def test_a_change_of_scene_adds_and_removes_objects() -> None:
    one, two = parse("a red circle"), parse("a red circle and a blue square")
    video = simulate([[one, two, one]] * 4, torch.Generator().manual_seed(8))
    frames = ((video + 1) * 127.5).round().to(torch.uint8).permute(0, 1, 3, 4, 2).numpy()
    for clip in frames:
        assert [len(detect(clip[index])) for index in (11, 12, 23, 24)] == [1, 2, 2, 1]


def test_sampled_scenes_cover_one_and_two_objects() -> None:
    scenes = sample_scenes(50, torch.Generator().manual_seed(0))
    assert {len(scene.objects) for scene in scenes} == {1, 2}
