"""Measure a model of the embedded world as a viewer would: prompts in, pictures judged.

Each stream is a session of its own, `single`, as `scope-rt stream` would run it: 10 s of a prompt
(60 s for the first --long), then a new prompt with a hard cut, then a new one without. The new
prompts share no colour with the old ones, so what appears is new. The detector knows the palette
and the outlines, never the model. All seeds start at 1,000,000; training uses others. A scene is
one of 1,377, so training has seen most scenes, but none of this motion or noise.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from tqdm import tqdm

from scope_lab.tiny.prompts import random_prompt
from scope_lab.tiny.verdicts import (
    LONG_CHUNKS,
    SHORT_CHUNKS,
    ChunkVerdict,
    Figure,
    StreamVerdict,
    change_figures,
    codec_figures,
    judge,
    long_figures,
    psnr_db,
    short_figures,
    table,
)
from scope_lab.tiny.world import CHUNK_FRAMES, FRAMES_PER_SECOND, sample_clips
from scope_rt.config import StreamConfig
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_rt.session import StreamSession
from scope_rt.text.words import parse
from scope_rt.vae.codec import VideoCodec
from scope_rt.video.contact_sheet import write_contact_sheet
from scope_runners.arguments import positive
from scope_runners.command_parser import CommandParser

FIRST_SEED = 1_000_000
HARD_CUT_CHUNKS, PROMPT_CHUNKS = 4, 6
"""How long a stream is watched after each kind of prompt change."""
HELD_OUT_CLIPS, HELD_OUT_CHUNKS, CHANGE_PROBABILITY = 32, 4, 0.25
QUICK_PROMPTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One stream to watch: one prompt, or three that share no colour."""

    seed: int
    prompts: tuple[str, ...]
    steady_chunks: int

    @property
    def starts(self) -> tuple[int, int]:
        """The chunks at which the second and the third prompt take effect."""
        return self.steady_chunks, self.steady_chunks + HARD_CUT_CHUNKS

    @property
    def schedule(self) -> list[ScheduledEvent]:
        if len(self.prompts) == 1:
            return []
        cut, change = self.starts
        return [
            ScheduledEvent(chunk_index=cut, prompt=self.prompts[1], hard_cut=True),
            ScheduledEvent(chunk_index=change, prompt=self.prompts[2]),
        ]

    @property
    def num_chunks(self) -> int:
        return self.starts[1] + PROMPT_CHUNKS if self.schedule else self.steady_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The middle frame of a chunk, for the eyes of a person."""

    frame_HWC: NDArray[np.uint8]
    label: str


def draw_trials(count: int, *, num_long: int, changes: bool) -> list[Trial]:
    """The first `count` trials, always the same; the first `num_long` of them last 60 s."""
    generator = torch.Generator().manual_seed(FIRST_SEED)
    return [
        Trial(
            seed=FIRST_SEED + index,
            prompts=_disjoint_prompts(generator)[: 3 if changes else 1],
            steady_chunks=LONG_CHUNKS if index < num_long else SHORT_CHUNKS,
        )
        for index in range(count)
    ]


def _disjoint_prompts(generator: torch.Generator) -> tuple[str, ...]:
    """Three prompts, no colour in two of them."""
    prompts: list[str] = []
    colours: set[str] = set()
    while len(prompts) < 3:
        prompt = random_prompt(generator)
        named = {thing.colour for thing in parse(prompt).objects}
        if not named & colours:
            prompts.append(prompt)
            colours |= named
    return tuple(prompts)


def watch(model: str | Path, trial: Trial) -> tuple[StreamVerdict, list[Sample]]:
    """Run one stream and judge every chunk of it by the prompt that the chunk names."""
    verdicts: list[ChunkVerdict] = []
    samples: list[Sample] = []
    with StreamSession(StreamConfig.load(model=model, seed=trial.seed)) as session:
        chunks = session.stream(
            trial.prompts[0], num_chunks=trial.num_chunks, schedule=trial.schedule
        )
        for chunk in chunks:
            verdict = judge(chunk.frames, parse(chunk.prompt))
            verdicts.append(verdict)
            time_s = chunk.chunk_index * CHUNK_FRAMES / FRAMES_PER_SECOND
            label = f"{time_s:.0f} s {_in_words(verdict)}"
            samples.append(Sample(frame_HWC=chunk.frames[CHUNK_FRAMES // 2], label=label))
    cut, change = trial.starts
    stream = StreamVerdict(
        steady=tuple(verdicts[:cut]),
        after_hard_cut=tuple(verdicts[cut:change]),
        after_prompt=tuple(verdicts[change:]),
    )
    return stream, samples


def _in_words(verdict: ChunkVerdict) -> str:
    if not verdict.all_colours:
        return "colour missing"
    if not verdict.all_shapes:
        return "wrong shape"
    if not verdict.background:
        return "wrong background"
    return "right" if verdict.nothing_else else "something else"


def write_samples(folder: Path, index: int, trial: Trial, samples: Sequence[Sample]) -> None:
    """One contact sheet, `NNN.png`, and its prompts beside it, `NNN.txt`."""
    step = max(1, math.ceil(len(samples) / 28))
    shown = samples[::step]
    path = folder / f"{index:03d}.png"
    write_contact_sheet([s.frame_HWC for s in shown], [s.label for s in shown], path)
    lines = [f"seed {trial.seed}", trial.prompts[0]]
    lines += [f"from chunk {e.chunk_index}: {e.prompt}" for e in trial.schedule]
    path.with_suffix(".txt").write_text("\n".join(lines) + "\n")


@torch.inference_mode()
def measure_codec(codec: VideoCodec) -> list[Figure]:
    """Encode and decode video of the world that no training has seen."""
    clips = sample_clips(
        HELD_OUT_CLIPS,
        HELD_OUT_CHUNKS * CHUNK_FRAMES,
        torch.Generator().manual_seed(FIRST_SEED),
        CHANGE_PROBABILITY,
    )
    pixels = ((clips.video_BTCHW + 1) * 127.5).round().to(torch.uint8)
    video_BTHWC = rearrange(pixels, "b t c h w -> b t h w c").contiguous()
    rebuilt = codec.streaming_decoder().decode(codec.streaming_encoder().encode(video_BTHWC))
    chunks = rearrange(rebuilt.numpy(), "b (k t) h w c -> (b k) t h w c", t=CHUNK_FRAMES)
    scenes = [scene for clip in clips.scenes for scene in clip]
    verdicts = [judge(chunk, scene) for chunk, scene in zip(chunks, scenes, strict=True)]
    return codec_figures(psnr_db(video_BTHWC.numpy(), rebuilt.numpy()), verdicts)


def measure(
    model: str | Path, trials: Sequence[Trial], *, frames_out: Path | None, num_shown: int
) -> Iterator[Figure]:
    """All figures of a model."""
    yield from measure_codec(ModelFolder.open(model).codec())
    streams = []
    for index, trial in enumerate(tqdm(trials, desc="streams", unit="stream", disable=None)):
        stream, samples = watch(model, trial)
        streams.append(stream)
        if frames_out is not None and index < num_shown:
            write_samples(frames_out, index, trial, samples)
    yield from short_figures(streams)
    if any(trial.steady_chunks == LONG_CHUNKS for trial in trials):
        yield from long_figures(streams)
    if any(trial.schedule for trial in trials):
        yield from change_figures(streams)


def main(argv: Sequence[str]) -> int:
    """Measure and print; 1 if a target is missed."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.quick:
        trials = draw_trials(min(args.prompts, QUICK_PROMPTS), num_long=0, changes=False)
    else:
        trials = draw_trials(args.prompts, num_long=args.long, changes=True)
    figures = list(measure(args.model, trials, frames_out=args.frames_out, num_shown=args.frames))
    if args.json:
        shown = {figure.key: _finite(asdict(figure)) for figure in figures}
        print(json.dumps({"model": str(args.model), "streams": len(trials), "figures": shown}))
    else:
        print(table(figures))
    return int(any(figure.missed for figure in figures))


def _finite(entry: dict[str, object]) -> dict[str, object]:
    """JSON has no infinity: "never" is null."""
    value = entry["value"]
    return entry | {"value": value if isinstance(value, float) and math.isfinite(value) else None}


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="scripts/lab eval_tiny",
        description=__doc__,
        epilog="Exit code: 0 if every target is met, 1 if one is missed, 2 for unusable input.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default=EMBEDDED, help="a model folder, or tiny (%(default)s)")
    add("--prompts", type=positive, default=100, help="how many streams (%(default)s)")
    add("--long", type=int, default=20, help="how many of them last 60 s (%(default)s)")
    add("--quick", action="store_true", help=f"{QUICK_PROMPTS} prompts, 10 s, no changes")
    add("--frames-out", type=Path, help="folder for contact sheets of the first streams")
    add("--frames", type=positive, default=12, help="how many contact sheets (%(default)s)")
    add("--threads", type=positive, default=1, help="CPU threads (%(default)s)")
    add("--json", action="store_true", help="one JSON object instead of the table")
    return parser
