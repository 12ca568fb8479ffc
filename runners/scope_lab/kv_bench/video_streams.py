"""Sessions that stream one scene in turn, each on its kind of cache, all of one seed and one past.

What is timed is the processor time of the generator, and another kind is first each time: a busy
machine changes that least.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from tempfile import NamedTemporaryFile

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from scope_contracts.cache_spec import CacheKind
from scope_contracts.errors import UnsupportedError
from scope_lab.kv_bench.stopwatch import Stopwatch
from scope_lab.tiny.prompts import describe
from scope_lab.tiny.world import CHUNK_FRAMES, sample_clips
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.instruments import Instruments
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_rt.session import StreamSession
from scope_rt.stream_setup import StreamSetup
from scope_rt.text.words import SceneSpec
from scope_rt.trace import Span

RING = "ring"
EQUAL_BYTES = "ring of hierarchical's bytes"
Frames = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A true video of one scene, whose prompt never changes."""

    scene: SceneSpec
    frames: Frames
    """uint8 `[T, H, W, 3]`."""
    latents: tuple[Tensor, ...]
    """By chunk, `[1, F, C, H/8, W/8]`."""


@dataclass(slots=True)
class GivenPast:
    """The past that later chunks attend to, by chunk index; a chunk without one keeps its own."""

    latents: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, chunk_index: int, latents_BFCHW: Tensor) -> Tensor:
        return self.latents.get(chunk_index, latents_BFCHW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A chunk, and the processor time of its generator calls."""

    chunk: Chunk
    generate_ms: float


class GeneratorTime:
    """A trace that keeps the processor time of every chunk's generator calls, in ms."""

    spans: tuple[Span, ...] = ()

    def __init__(self) -> None:
        self.chunks_ms: list[float] = []

    @contextmanager
    def span(self, name: str, *, track: str) -> Iterator[None]:
        with Stopwatch() as watch:
            yield
        if track == "generate":
            self.chunks_ms.append(watch.milliseconds)


class Streams:
    """One session for every kind of cache, all of one seed, that stream the same scenes."""

    def __init__(self, names: Sequence[str]) -> None:
        self.sessions: dict[str, StreamSession] = {}
        self.refusals: dict[str, str] = {}
        """Kinds that cannot run here, and why."""
        self._times = {name: GeneratorTime() for name in names}
        self._past = GivenPast()
        self._num_made = 0
        with ExitStack() as files:
            for name in names:
                kind, recipe = name, None
                if name == EQUAL_BYTES:
                    kind, recipe = RING, files.enter_context(equal_bytes_recipe())
                try:
                    self.sessions[name] = StreamSession(
                        StreamConfig.of(seed=1, kv_cache=kind, recipe=recipe),
                        instruments=Instruments(trace=self._times[name]),
                        feedback=self._past,
                    )
                except UnsupportedError as error:
                    self.refusals[name] = str(error)

    def run(
        self, scene: SceneSpec, num_chunks: int, *, given_past: Sequence[Tensor] = ()
    ) -> dict[str, list[Made]]:
        """A scene in every kind of cache, chunk by chunk in turn.

        `given_past` is the past of all of them, by chunk; where it is empty each has its own.
        """
        self._past.latents = {self._num_made + index: x for index, x in enumerate(given_past)}
        streams = {
            name: session.stream(describe(scene), num_chunks=num_chunks)
            for name, session in self.sessions.items()
        }
        made: dict[str, list[Made]] = {name: [] for name in streams}
        order = list(streams)
        for _ in range(num_chunks):
            for name in order:
                chunk = next(streams[name])
                made[name].append(Made(chunk=chunk, generate_ms=self._times[name].chunks_ms[-1]))
            order = order[1:] + order[:1]
        self._num_made += num_chunks
        return made

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()


@contextmanager
def equal_bytes_recipe() -> Iterator[str]:
    """A file: the embedded model's, with a window of as many frames as hierarchical has slots."""
    setup = StreamSetup.of(StreamConfig.of(kv_cache=CacheKind.HIERARCHICAL))
    window_frames = setup.cache_spec.capacity_frames - setup.recipe.sink_frames
    wide = replace(setup.recipe, window_frames=window_frames)
    with NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(replace(setup.model.layout.family, recipe=wide).to_toml())
        file.flush()
        yield file.name


def true_clip(num_chunks: int, *, seed: int) -> Clip:
    """A clip of the model's world, encoded by its codec."""
    generator = torch.Generator().manual_seed(seed)
    clips = sample_clips(1, num_chunks * CHUNK_FRAMES, generator, change_probability=0.0)
    video = ((clips.video_BTCHW + 1) * 127.5).round().to(torch.uint8)
    frames_BTHWC = rearrange(video, "b t c h w -> b t h w c")
    folder = ModelFolder.open(EMBEDDED)
    latents = folder.codec().streaming_encoder().encode(frames_BTHWC)
    return Clip(
        scene=clips.scenes[0][0],
        frames=frames_BTHWC[0].numpy(),
        latents=latents.split(folder.recipe.frames_per_block, dim=1),
    )
