"""`scripts/lab recompute_experiment`: is it a bargain to rebuild the cache less often?

A model that keeps its cache by recompute pays one generator call over its context before a chunk.
`SCOPE_KV_CACHE_RECOMPUTE_EVERY=2` saves every other one; in between, chunks append to the cache
what their last, still noisy denoise step wrote. This shows what is saved and what is lost.

The embedded model keeps its cache by clean passes, so it runs under recompute recipes here: equal
weights, a context of two blocks or of one, and a ring that holds context and chunk. Every variant
streams the same prompts from the same noise, and all of them take turns chunk by chunk, so that a
machine that slows down slows all.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from scope_lab.recompute_quality import Frames, judge_stream
from scope_lab.recompute_report import Experiment, Row, Sample, Variant, table, verdicts
from scope_lab.stream_process import plan_speed
from scope_lab.tiny.evaluate import FIRST_SEED, draw_trials
from scope_lab.tiny.verdicts import SHORT_CHUNKS
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.recompute import RecomputeMode
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_rt.models.recipe import Recipe
from scope_rt.session import StreamSession
from scope_rt.text.words import parse
from scope_rt.topology import PIPELINED
from scope_runners.arguments import positive
from scope_runners.break_it.driver import recompute_recipe
from scope_runners.command_parser import CommandParser

PLAN_CHUNKS = 16
QUICK_PROMPTS, QUICK_CHUNKS = 3, 6
_EVERY = "SCOPE_KV_CACHE_RECOMPUTE_EVERY"


def variants_of(recipe: Recipe) -> list[Variant]:
    """What is compared: first the clean pass of a model that is shipped with it."""
    main, *others = _contexts(recipe)
    tried = [
        (main, RecomputeMode.R0A, 1),
        (main, RecomputeMode.R0, 1),
        (main, RecomputeMode.R0A, 2),
        (main, RecomputeMode.R0A, 3),
        (main, RecomputeMode.R1, None),
        *((context, RecomputeMode.R0A, every) for context in others for every in (1, 2)),
    ]
    shipped = [Variant()] if recipe.clean_pass else []
    return shipped + [Variant(context_frames=c, mode=m, every=every) for c, m, every in tried]


def _contexts(recipe: Recipe) -> tuple[int, ...]:
    """Latent frames of context, the most first."""
    block = recipe.frames_per_block
    return (2 * block, block) if recipe.clean_pass else (recipe.kv_cache_num_frames,)


@contextmanager
def _recompute_folders(
    model: ModelFolder, variants: Sequence[Variant]
) -> Iterator[dict[Variant, Path]]:
    """A folder for each variant: `model` itself, or its parts under a recompute recipe."""
    with tempfile.TemporaryDirectory() as name:
        folders: dict[Variant, Path] = {}
        for variant in variants:
            context = variant.context_frames
            if context in (0, model.recipe.kv_cache_num_frames):
                folders[variant] = model.path
                continue
            folders[variant] = folder = Path(name) / f"context{context}"
            if folder.exists():
                continue
            folder.mkdir()
            for part in model.path.iterdir():
                (folder / part.name).symlink_to(part.resolve())
            (folder / "recipe.json").unlink()
            recompute_recipe(model.recipe, context).save(folder)
        yield folders


def run(
    model: str | Path,
    *,
    num_prompts: int,
    num_chunks: int,
    plans: Sequence[tuple[str, int]],
    rounds: int,
) -> Experiment:
    """All variants of `model`; each plan and its TP degree is measured in `rounds` of its own.

    Raises:
        UserInputError: the model cannot be used.
        ScopeError: a plan did not run; it said why.
    """
    opened = ModelFolder.open(model)
    variants = variants_of(opened.recipe)
    with _recompute_folders(opened, variants) as folders:
        samples = _stream_in_turn(folders, num_prompts=num_prompts, num_chunks=num_chunks)
        speeds = _plans_in_turn(folders, plans, rounds)
    return _experiment(samples, speeds, num_chunks)


def _experiment(
    samples: Mapping[Variant, Sequence[Sample]],
    speeds: Mapping[Variant, Mapping[str, Sequence[float]]],
    num_chunks: int,
) -> Experiment:
    rows = [
        Row(
            variant=variant,
            samples=tuple(of_variant),
            plans={plan: tuple(each) for plan, each in speeds.get(variant, {}).items()},
        )
        for variant, of_variant in samples.items()
    ]
    return Experiment(num_chunks=num_chunks, rows=tuple(rows))


@dataclass(slots=True)
class _Watched:
    """What came of one stream so far; the first chunk is not timed, it never has a recompute."""

    chunks: list[Chunk] = field(default_factory=list)
    taken_s: list[float] = field(default_factory=list)

    def take(self, stream: Iterator[Chunk]) -> None:
        start_s = time.perf_counter()
        self.chunks.append(next(stream))
        self.taken_s.append(time.perf_counter() - start_s)

    @property
    def frames(self) -> list[Frames]:
        return [chunk.frames for chunk in self.chunks]

    def sample(self, prompt: str, reference: Sequence[Frames]) -> Sample:
        later = self.chunks[1:]
        return Sample(
            quality=judge_stream(self.frames, parse(prompt), reference=reference),
            generator_calls=statistics.fmean(chunk.generator_calls for chunk in later),
            generate_ms=statistics.fmean(chunk.stage_ms["generate"] for chunk in later),
            frames_per_s=sum(len(chunk.frames) for chunk in later) / sum(self.taken_s[1:]),
        )


def _stream_in_turn(
    folders: Mapping[Variant, Path], *, num_prompts: int, num_chunks: int
) -> dict[Variant, list[Sample]]:
    """One sample of every variant for each prompt; `num_chunks` is at least 2."""
    samples: dict[Variant, list[Sample]] = {variant: [] for variant in folders}
    first, *_ = order = list(folders)
    with ExitStack() as stack:
        sessions = {v: stack.enter_context(_session(v, folder)) for v, folder in folders.items()}
        trials = draw_trials(num_prompts, num_long=0, changes=False)
        for trial in tqdm(trials, desc="prompts", unit="prompt", disable=None):
            prompt = trial.prompts[0]
            watched = {variant: _Watched() for variant in order}
            streams = {v: s.stream(prompt, num_chunks=num_chunks) for v, s in sessions.items()}
            for _ in range(num_chunks):
                for variant in order:
                    watched[variant].take(streams[variant])
                order = [*order[1:], order[0]]  # none always follows the same one
            reference = watched[first].frames
            for variant, seen in watched.items():
                samples[variant].append(seen.sample(prompt, reference))
    return samples


def _session(variant: Variant, folder: Path) -> StreamSession:
    config = StreamConfig.of(
        folder, seed=FIRST_SEED, recompute=variant.mode, kv_cache_recompute_every=variant.every
    )
    return StreamSession(config)


def _plans_in_turn(
    folders: Mapping[Variant, Path], plans: Sequence[tuple[str, int]], rounds: int
) -> dict[Variant, dict[str, list[float]]]:
    """Frames/s of `scope-rt stream`: as shipped, and every 1 and 2 with the largest context."""
    most = max(variant.context_frames for variant in folders)
    cadences = {(0, None), (most, 1), (most, 2)}
    chosen = [v for v in folders if (v.context_frames, v.every) in cadences]
    names = [f"{plan} --tp {tp}" for plan, tp in plans]
    speeds: dict[Variant, dict[str, list[float]]] = {v: {n: [] for n in names} for v in chosen}
    for _ in tqdm(range(rounds if plans else 0), desc="plans", unit="round", disable=None):
        for (plan, tp), name in zip(plans, names, strict=True):
            for variant in chosen:
                speeds[variant][name].append(variant_speed(variant, folders[variant], plan, tp))
    return speeds


def variant_speed(variant: Variant, folder: Path, plan: str, tp: int) -> float:
    """Frames/s from the first frame on, with the video encoder running.

    Raises:
        ScopeError: the command failed, or took too long.
    """
    recipe = ModelFolder.open(folder).recipe
    seconds = PLAN_CHUNKS * 4 * recipe.frames_per_block / recipe.fps
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["--prompt", "a red circle and a blue square, medium, on navy"]
        arguments += ["--model", str(folder), "--seconds", f"{seconds:.6f}"]
        arguments += ["--out", str(Path(scratch) / "stream.mp4")]
        if variant.mode is not None:
            arguments += ["--recompute", variant.mode, "--accept-quality-loss"]
        environ = {name: text for name, text in os.environ.items() if name != _EVERY}
        if variant.every is not None:
            environ[_EVERY] = str(variant.every)
        return plan_speed(plan, tp, arguments, environ=environ)


def main(argv: Sequence[str]) -> int:
    """Run the experiment and print it; returns the exit code."""
    parser = CommandParser(
        prog="scripts/lab recompute_experiment",
        description="Quality and speed of a model whose cache is rebuilt every 1, 2, ... chunks.",
    )
    add = parser.add_argument
    add("--model", default=EMBEDDED, metavar="FOLDER", help="a model of the embedded world")
    add("--prompts", type=positive, default=12, help="streams of each variant (%(default)s)")
    add("--plans", nargs="*", choices=sorted(PIPELINED), default=["pp1"], help="timed too (pp1)")
    add("--tp", type=positive, default=1, help="TP degree of --plans (%(default)s)")
    add("--rounds", type=positive, default=5, help="streams that time a plan (%(default)s)")
    add("--threads", type=positive, default=1, help="CPU threads (%(default)s)")
    add("--quick", action="store_true", help=f"{QUICK_PROMPTS} short prompts, no --plans")
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    quick = options.quick
    experiment = run(
        options.model,
        num_prompts=min(options.prompts, QUICK_PROMPTS) if quick else options.prompts,
        num_chunks=QUICK_CHUNKS if quick else SHORT_CHUNKS,
        plans=[] if quick else [(plan, options.tp) for plan in options.plans],
        rounds=options.rounds,
    )
    if options.json:
        judged = [asdict(verdict) for verdict in verdicts(experiment)]
        print(json.dumps(asdict(experiment) | {"every_2_instead_of_1": judged}, indent=2))
    else:
        print(table(experiment))
    return 0
