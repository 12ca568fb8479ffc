"""One rank of a stream that runs a recorded rollout: it writes down what it computed and called."""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheIndices
from scope_contracts.envelope import PlanId
from scope_lab.recorded_noise import RecordedNoise
from scope_lab.rollouts.recording import Recording
from scope_rt.config import StreamConfig
from scope_rt.control.anchor import AnchorEncoder
from scope_rt.control.chunk import Chunk
from scope_rt.control.context import Context
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.models.family import Family
from scope_rt.session import StreamSession
from scope_rt.stream_setup import StreamSetup
from scope_rt.vae.pictures import to_bytes
from scope_runners.command_parser import CommandParser
from scope_runners.guarded import guarded

RESULT = "result.json"
"""Of rank0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRun:
    """What a rank runs, and where its answer goes."""

    folder: Path
    rollout: str
    recipe: Path
    """The family with the recording's values."""
    plan: PlanId
    tp: int | None
    answers: Path

    def argv(self) -> list[str]:
        tp = [] if self.tp is None else ["--tp", str(self.tp)]
        words = [self.folder, self.rollout, self.recipe, self.answers, "--plan", self.plan, *tp]
        return list(map(str, words))


@dataclass(frozen=True, kw_only=True)
class RecordedSetup(StreamSetup):
    """A stream with recorded noise, whose anchors are recorded too."""

    recording: Recording
    family: Family
    calls: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Timestep, first token and indices of each generator call of this rank."""
    encoded: dict[int, Tensor] = field(default_factory=dict)
    contexts: list[Tensor] = field(default_factory=list)
    """What recomputes were given."""

    @cached_property
    def noise(self) -> RecordedNoise:
        return self.recording.noise(self.family)

    def observe_call(self, timestep: float, start_token: int, indices: CacheIndices) -> None:
        where = (indices.global_end_index, indices.local_end_index)
        self.calls.append((timestep, start_token, *where))

    def anchor_encoder(self) -> AnchorEncoder:
        anchors = self.recording.anchors(self.family)

        def recorded(frames_BTHWC: Tensor) -> Tensor:
            """Asked again for the same frames, the same anchor."""
            key = hash(frames_BTHWC.numpy().tobytes())
            if key not in self.encoded:
                self.encoded[key] = next(anchors)
            return self.encoded[key]

        return recorded

    def context_memory(self) -> Context:
        memory, consumed = super().context_memory(), self.contexts
        ask = memory.context

        def context(*, holds_cache: bool = False) -> Tensor:
            consumed.append(ask(holds_cache=holds_cache))
            return consumed[-1]

        memory.context = context  # type: ignore[method-assign]
        return memory


def run(asked: RolloutRun) -> None:
    """Run this rank's part of the stream, and write its answer."""
    torch.set_num_threads(1)
    recording = Recording.read(asked.folder, asked.rollout)
    config = StreamConfig.of(
        asked.folder,
        recipe=str(asked.recipe),
        plan=asked.plan,
        tp=asked.tp,
        height=recording.height,
        width=recording.width,
        integrity="off",  # it knows whence noise comes
    )
    family = Family.named(str(asked.recipe))
    environment = LaunchEnvironment.from_environment()
    setup = RecordedSetup.of(config, environment, recording=recording, family=family)
    with StreamSession(setup) as session:
        chunks = list(
            session.stream(
                recording.prompts[0],
                num_chunks=recording.num_chunks(family),
                schedule=recording.schedule(family),
            )
        )
    if environment.rank in setup.topology.generator_ranks:
        _write(asked.answers / f"calls.{environment.rank}.json", setup.calls)
    if environment.rank == 0:
        _write(asked.answers / RESULT, _compared(setup, chunks))


def _write(path: Path, plain: object) -> None:
    path.write_text(json.dumps(plain))


def _compared(setup: RecordedSetup, chunks: Sequence[Chunk]) -> dict[str, object]:
    """How far rank0's results are from the recording's."""
    recording = setup.recording
    latents = torch.cat([chunk.latents for chunk in chunks])[None]
    embeds = torch.cat([setup.conditioning(prompt).embeds for prompt in recording.prompts])
    ids = getattr(setup.text_encoder, "ids", None)
    text = recording.text_embeds(embeds.shape[1])
    return {
        "token_ids_equal": ids is None
        or [ids(prompt) for prompt in recording.prompts] == recording.token_ids(),
        "text_max_abs_diff": difference(embeds, text),
        "latents_max_abs_diff": difference(latents, recording.latents),
        "context_max_abs_diff": _context_difference(setup),
        **_pixels(setup, chunks),
    }


def difference(got: Tensor, want: Tensor) -> float:
    """The largest; infinite for other shapes, and where one is no number."""
    if got.shape != want.shape:
        return math.inf
    return float((got - want).abs().nan_to_num(nan=math.inf).max())


def _context_difference(setup: RecordedSetup) -> float:
    """Of what recomputes and re-caches were given; 0 where none is recorded."""
    recorded = setup.recording.contexts()
    if not recorded:
        return 0.0
    if len(recorded) != len(setup.contexts):
        return math.inf
    pairs = zip(setup.contexts, recorded, strict=True)
    return max(difference(mine, theirs) for mine, theirs in pairs)


def _pixels(setup: RecordedSetup, chunks: Sequence[Chunk]) -> dict[str, object]:
    """The stream's pictures are bytes: they are compared with its latents' own decode, and that
    with the recording."""
    recording, decoder = setup.recording, setup.codec.streaming_decoder()
    num = recording.num_comparable_pixels()
    video, are_shown = list[Tensor](), True
    for chunk in chunks:
        piece: Tensor = decoder.decode_video(chunk.latents[None])[0]  # type: ignore[attr-defined]
        shown = torch.as_tensor(chunk.frames).permute(0, 3, 1, 2)
        are_shown &= torch.equal(to_bytes(piece), shown)
        video.append(piece)
    got = recording.as_recorded(torch.cat(video)[:num])
    want = recording.tensors.get("pixels", torch.empty(0))
    return {
        "pixels_max_abs_diff": difference(got, want[:num]) if num else None,
        "num_pixels_compared": num,
        "pixels_recorded": len(want),
        "decoder": setup.recording.decoder,
        "shown_as_decoded": are_shown,
    }


def main(argv: Sequence[str]) -> int:
    """What the launcher starts as each rank."""
    return guarded(lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    parser: argparse.ArgumentParser = CommandParser(prog="scope_lab.rollouts.rank")
    parser.add_argument("folder", type=Path)
    parser.add_argument("rollout")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--plan", type=PlanId, required=True)
    parser.add_argument("--tp", type=int)
    run(RolloutRun(**vars(parser.parse_args(argv))))
    return 0
