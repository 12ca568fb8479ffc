"""The embedded model's world: discs of one size bounce in a square box, drawn as soft shapes.

Physics never depends on colour, shape or background, so a prompt change keeps every path intact.
Each object keeps its speed: a bounce, off a wall or off the other object, only mirrors its heading.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from einops import rearrange
from torch import Tensor

from scope_lab.tiny.prompts import random_scene
from scope_rt.text.words import MAX_OBJECTS, Background, Colour, SceneSpec, Shape, Speed

SIZE_PX = 64
FRAMES_PER_SECOND = 16
CHUNK_FRAMES = 12

COLOUR_RGB = MappingProxyType(
    {
        Colour.RED: (230, 40, 40),
        Colour.GREEN: (40, 200, 70),
        Colour.BLUE: (40, 90, 255),
        Colour.YELLOW: (250, 215, 50),
        Colour.PURPLE: (165, 60, 220),
        Colour.WHITE: (245, 245, 245),
    }
)
BACKGROUND_RGB = MappingProxyType(
    {
        Background.BLACK: (0, 0, 0),
        Background.NAVY: (10, 14, 60),
        Background.GRAY: (96, 96, 96),
    }
)
SPEED_PX_PER_FRAME = MappingProxyType({Speed.SLOW: 0.6, Speed.MEDIUM: 1.2, Speed.FAST: 2.4})

CIRCLE_RADIUS_PX = 9.5
SQUARE_HALF_PX = 8.0
TRIANGLE_RADIUS_PX = 12.75
"""Centre to corner."""

_EDGE_PX = 2.0
_WALL_PX = 12.0
"""How near a centre comes to the border."""
_CONTACT_PX = 24.5
"""How near two centres come; more than any two shapes reach towards each other."""
_SUBSTEPS = 2
_NEW_PLACE_TRIES = 16


@dataclass(frozen=True, slots=True)
class Clips:
    """`video_BTCHW` in [-1, 1], and for each clip one scene per chunk of 12 frames."""

    video_BTCHW: Tensor
    scenes: list[list[SceneSpec]]


def sample_scenes(batch: int, generator: torch.Generator) -> list[SceneSpec]:
    """Draw independent scenes."""
    return [random_scene(generator) for _ in range(batch)]


def sample_clips(
    batch: int, num_frames: int, generator: torch.Generator, change_probability: float
) -> Clips:
    """Draw clips; at each chunk border the scene is replaced with `change_probability`.

    Args:
        num_frames: a multiple of `CHUNK_FRAMES`.
    """
    num_chunks, rest = divmod(num_frames, CHUNK_FRAMES)
    assert rest == 0, "clips are whole chunks"
    scenes: list[list[SceneSpec]] = []
    for _ in range(batch):
        clip = [random_scene(generator)]
        for change in torch.rand(num_chunks - 1, generator=generator).tolist():
            clip.append(random_scene(generator) if change < change_probability else clip[-1])
        scenes.append(clip)
    return Clips(simulate(scenes, generator), scenes)


def simulate(scenes: Sequence[Sequence[SceneSpec]], generator: torch.Generator) -> Tensor:
    """Show clips of given scenes, one scene per chunk: `[B, 12 * chunks, 3, 64, 64]` in [-1, 1].

    A change of scene keeps positions and headings; a vanished object leaves, a new one appears at
    a random free place.
    """
    bodies = _assign_bodies(scenes, generator)
    speed = torch.tensor([[SPEED_PX_PER_FRAME[scene.speed] for scene in clip] for clip in scenes])
    centres = _move(bodies >= 0, speed, generator)
    return _draw(scenes, bodies, centres)


def _assign_bodies(scenes: Sequence[Sequence[SceneSpec]], generator: torch.Generator) -> Tensor:
    """Which object of its scene each body shows, -1 for none: `[B, chunks, bodies]`.

    A new scene is assigned at random, but first to the bodies that were already to be seen.
    """
    rows: list[list[list[int]]] = []
    for clip in scenes:
        row: list[list[int]] = []
        for index, scene in enumerate(clip):
            if index and scene == clip[index - 1]:
                row.append(row[-1])
                continue
            before = row[-1] if row else [-1] * MAX_OBJECTS
            bodies = torch.randperm(MAX_OBJECTS, generator=generator).tolist()
            bodies.sort(key=lambda body: before[body] < 0)
            objects = torch.randperm(len(scene.objects), generator=generator).tolist()
            shown = [-1] * MAX_OBJECTS
            for body, thing in zip(bodies, objects, strict=False):
                shown[body] = thing
            row.append(shown)
        rows.append(row)
    return torch.tensor(rows)


def _random_places(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    inside = SIZE_PX - 2 * _WALL_PX
    return _WALL_PX + inside * torch.rand(*shape, 2, generator=generator)


def _free_places(others: Tensor, generator: torch.Generator) -> Tensor:
    """A random place for each row of `others [B, 2]` that does not touch it."""
    tries = _random_places((len(others), _NEW_PLACE_TRIES), generator)
    free = (tries - others[:, None]).norm(dim=-1) >= _CONTACT_PX
    corner = torch.where(others < SIZE_PX / 2, SIZE_PX - _WALL_PX, _WALL_PX)
    chosen = tries[torch.arange(len(others)), free.int().argmax(1)]
    return torch.where(free.any(1, keepdim=True), chosen, corner)


def _move(present: Tensor, speed: Tensor, generator: torch.Generator) -> Tensor:
    """Centres over time, `[B, T, bodies, 2]` in (x, y) pixels.

    Args:
        present: `[B, chunks, bodies]`, which bodies are to be seen.
        speed: `[B, chunks]` in pixels per frame.
    """
    batch, num_chunks, _ = present.shape
    first = _random_places((batch,), generator)
    place = torch.stack([first, _free_places(first, generator)], 1)
    angle = 2 * torch.pi * torch.rand(batch, MAX_OBJECTS, generator=generator)
    heading = torch.stack([angle.cos(), angle.sin()], -1)
    frames = []
    for chunk in range(num_chunks):
        if chunk:
            appears = present[:, chunk] & ~present[:, chunk - 1]
            for body in range(MAX_OBJECTS):
                new = _free_places(place[:, 1 - body], generator)
                place[:, body] = torch.where(appears[:, body, None], new, place[:, body])
        both = present[:, chunk].all(1)
        step_px = speed[:, chunk, None, None] / _SUBSTEPS
        for _ in range(CHUNK_FRAMES):
            frames.append(place.clone())
            for _ in range(_SUBSTEPS):
                place, heading = _bounce(place + heading * step_px, heading, both)
    return torch.stack(frames, 1)


def _bounce(place: Tensor, heading: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """Mirror headings that lead into a wall or, where both bodies are seen, into the other body."""
    low, high = _WALL_PX, SIZE_PX - _WALL_PX
    apart = place[:, 0] - place[:, 1]
    gap = apart.norm(dim=-1, keepdim=True)
    normal = apart / gap.clamp_min(1e-6)
    outward = torch.stack([normal, -normal], 1)
    touching = (both & (gap[:, 0] < _CONTACT_PX))[:, None, None]
    inward = (heading * outward).sum(-1, keepdim=True).clamp_max(0)
    heading = torch.where(touching, heading - 2 * inward * outward, heading)
    push = outward * (_CONTACT_PX - gap)[:, None] / 2
    place = torch.where(touching, place + push, place)
    heading = torch.where(place < low, heading.abs(), heading)
    heading = torch.where(place > high, -heading.abs(), heading)
    return place.clamp(low, high), heading


def coverage(shape: Shape, dx: Tensor, dy: Tensor, *, scale: float = 1.0) -> Tensor:
    """How much of each pixel a shape covers, in [0, 1]: its signed distance, softened.

    Args:
        dx, dy: pixel minus centre, broadcastable to each other; y points down.
        scale: size relative to the world's own shapes.
    """
    match shape:
        case Shape.CIRCLE:
            distance = (dx.square() + dy.square()).sqrt() - scale * CIRCLE_RADIUS_PX
        case Shape.SQUARE:
            distance = torch.maximum(dx.abs(), dy.abs()) - scale * SQUARE_HALF_PX
        case Shape.TRIANGLE:
            slant = dx.abs() * (3**0.5 / 2) - dy / 2
            distance = torch.maximum(slant, dy) - scale * TRIANGLE_RADIUS_PX / 2
    return (0.5 - distance / _EDGE_PX).clamp(0, 1)


def _draw(
    scenes: Sequence[Sequence[SceneSpec]], bodies_BKN: Tensor, centres_BTN2: Tensor
) -> Tensor:
    """Paint every body over its background, `[B, T, 3, H, W]` in [-1, 1]."""
    num_chunks = bodies_BKN.shape[1]
    ground = torch.tensor([[BACKGROUND_RGB[s.background] for s in clip] for clip in scenes])
    ground_NC11 = (ground.float() / 127.5 - 1).flatten(0, 1)[:, :, None, None]
    video = ground_NC11[:, None].repeat(1, CHUNK_FRAMES, 1, SIZE_PX, SIZE_PX)
    centres = rearrange(centres_BTN2, "b (k t) n xy -> (b k) t n xy", k=num_chunks)
    pixels = torch.arange(SIZE_PX) + 0.5
    flat = [scene for clip in scenes for scene in clip]
    for body in range(MAX_OBJECTS):
        shown = bodies_BKN[..., body].flatten().tolist()
        for shape in Shape:
            rows = [
                row
                for row, index in enumerate(shown)
                if index >= 0 and flat[row].objects[index].shape is shape
            ]
            if not rows:
                continue
            colours = [COLOUR_RGB[flat[row].objects[shown[row]].colour] for row in rows]
            paint = (torch.tensor(colours) / 127.5 - 1)[:, :, None, None]
            centre = centres[rows, :, body]
            dx = pixels - centre[..., 0, None]
            dy = pixels - centre[..., 1, None]
            covered = coverage(shape, dx[..., None, :], dy[..., :, None])[:, :, None]
            video[rows] += covered * (paint - ground_NC11[rows])[:, None]
    return rearrange(video.clamp_(-1, 1), "(b k) t c h w -> b (k t) c h w", k=num_chunks)
