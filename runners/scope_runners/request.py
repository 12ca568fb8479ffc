"""What a person typed, as a value; times are exact fractions, so no event slips by a rounding.

Whether it can be done (model, sizes, processors) is decided in `job`; here only the syntax is.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path

from scope_contracts.cache_spec import CacheKind
from scope_contracts.errors import UserInputError
from scope_contracts.integrity import IntegrityLevel
from scope_rt.config import StreamConfig
from scope_rt.config_values import read_toml
from scope_rt.topology import RUNNABLE
from scope_runners.arguments import one_of, positive, seed
from scope_runners.command_parser import CommandParser
from scope_runners.parts import add_parts_argument

EMBEDDED_MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class TimedPrompt:
    """A prompt from `at_s` seconds on."""

    at_s: Fraction
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """What `scope-rt stream` is asked for: a configuration, prompts, a schedule and files.

    `seconds` and times in seconds, `transition` in chunks, 0 for at once.
    """

    config: StreamConfig
    parts: str | None
    prompt: str
    prompt_at: tuple[TimedPrompt, ...]
    hard_cut_at: tuple[Fraction, ...]
    seconds: Fraction
    transition: int
    transition_method: str
    transition_bias: float | None
    out: Path
    trace: Path | None
    record: Path | None
    threads: int
    oversubscribe: bool
    accept_quality_loss: bool
    json: bool

    @property
    def resume(self) -> bool:
        """Whether the stream that was left at `out` is to be resumed."""
        return bool(self.config.recovery.resume)


def parse_stream_request(argv: Sequence[str]) -> StreamRequest:
    """Read the arguments of `scope-rt stream`, and the environment.

    Raises:
        UserInputError: an argument is missing, unknown or cannot be read.
    """
    parser = CommandParser(prog="scope-rt stream")
    add_stream_arguments(parser)
    return request_of(parser.parse_args(argv))


def request_of(namespace: argparse.Namespace) -> StreamRequest:
    """The request of parsed arguments.

    Raises:
        UserInputError: the configuration file or the environment cannot be used.
    """
    given = dict(vars(namespace))
    arguments = {f.name: given.pop(f.name) for f in fields(StreamRequest) if f.name != "config"}
    for name in ("prompt_at", "hard_cut_at"):
        arguments[name] = tuple(arguments[name] or ())
    settings = {name: given[name] for name in _SETTINGS}
    settings["resume"] = True if given["resume"] else None
    if given["config"] is not None:
        _refuse_files_of_the_command(given["config"])
    config = StreamConfig.load(file=given["config"], **settings)
    return StreamRequest(config=config, **arguments)


def _refuse_files_of_the_command(file: Path) -> None:
    recovery = read_toml(file).get("recovery")
    taken = [name for name in _FILES if isinstance(recovery, dict) and name in recovery]
    if taken:
        raise UserInputError(
            f"{file}: [recovery] {', '.join(taken)}: scope-rt stream names its files itself; "
            "use --out and --record"
        )


_FILES = ("log", "record_latents", "snapshot")
"""Settings for Python: in a command they follow from `--out` and `--record`."""
_SETTINGS = (
    "seed",
    "image",
    "plan",
    "tp",
    "model",
    "dtype",
    "recipe",
    "height",
    "width",
    "kv_cache_attention_bias",
    "kv_cache",
    "integrity",
    "recompute",
    "max_restarts",
    "fallback_tp",
)
"""Arguments that are settings of `StreamConfig`; those that are left out come from elsewhere."""


def add_stream_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `scope-rt stream`."""
    add = parser.add_argument
    add("--prompt", required=True, help='such as "a red circle and a blue square, fast, on navy"')
    add(
        "--prompt-at",
        action="append",
        type=_timed_prompt,
        metavar="TIME:PROMPT",
        help='change the prompt, such as 6s:"a green square"; may be repeated',
    )
    add(
        "--hard-cut-at",
        action="append",
        type=_time,
        metavar="TIME",
        help="forget the past and start a new epoch, such as 10s; may be repeated",
    )
    add(
        "--seconds",
        type=_time,
        default=Fraction(20),
        help="length of the video, rounded up to whole chunks (default 20)",
    )
    add(
        "--config",
        type=Path,
        metavar="FILE.toml",
        help="settings for whatever is not given here or in the environment",
    )
    add("--seed", type=seed, help="equal seeds give equal videos (default 0)")
    add("--plan", type=one_of(RUNNABLE), help=f"one of {', '.join(RUNNABLE)} (default single)")
    add(
        "--tp",
        type=positive,
        help="ranks that share the model's heads (default: the plan's smallest)",
    )
    add("--height", type=int, help="pixels (default: the model's own)")
    add("--width", type=int, help="pixels (default: the model's own)")
    add(
        "--model",
        metavar="FOLDER",
        help="a model folder, a checkpoint's own file in one, or "
        f"{EMBEDDED_MODEL!r} for the embedded model (default)",
    )
    add(
        "--recipe",
        metavar="NAME",
        help="how the model is sampled: a family of checkpoints (scope-rt model recipes lists "
        "them), or a .toml file of your own (default: what the model's files tell)",
    )
    add(
        "--dtype",
        metavar="NAME",
        help="of weights, activations and cache: bf16, fp16, fp32, fp64 (default: bf16 on GPUs, "
        "fp32 on CPUs)",
    )
    add_parts_argument(parser)
    add(
        "--kv-cache-attention-bias",
        type=_bias,
        metavar="BIAS",
        help="0 < BIAS <= 1; below 1, the past weighs less (default: the model's, mostly 1.0)",
    )
    add(
        "--kv-cache",
        metavar="KIND[:CODEC]",
        help=f"how the past is kept: {', '.join(CacheKind)}, and in how many bits: "
        "quantized:int8, quantized:int4, h2o:fp8, ... (default: SCOPE_KV_CACHE, or ring)",
    )
    add(
        "--integrity",
        choices=[level.value for level in IntegrityLevel],
        help="how much is verified of what is computed (default: SCOPE_INTEGRITY, or default)",
    )
    add(
        "--image",
        type=Path,
        metavar="FILE",
        help="a picture that the stream begins with, cut to its aspect and scaled; for recipes of "
        "one latent frame a chunk (causal-forcing-1.3b); after a hard cut it begins with noise; "
        "the file is read once, and may be gone when the stream is resumed",
    )
    add("--threads", type=positive, default=1, help="CPU threads of every rank (default 1)")
    add("--oversubscribe", action="store_true", help="allow more ranks than CPU cores")
    add(
        "--out",
        type=Path,
        default=Path("out/stream.mp4"),
        help="a .mp4 or .webm file; a .png and a .json go beside it (default: out/stream.mp4)",
    )
    add("--trace", type=Path, metavar="FILE.json", help="write a Chrome/Perfetto trace")
    add(
        "--record",
        type=Path,
        metavar="FILE.scope",
        help="keep the stream's log, with latents, to inspect and replay; a new file",
    )
    add("--json", action="store_true", help="print one JSON object instead of the table")
    _add_transition_arguments(parser)
    _add_recovery_arguments(parser)


def _add_transition_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prompt changes and cache upkeep").add_argument
    add(
        "--transition",
        type=_count,
        default=0,
        metavar="CHUNKS",
        help="let new prompts come in softly over so many chunks (default 0: at once)",
    )
    add(
        "--transition-method",
        choices=("lerp", "slerp"),
        default="slerp",
        help="how embeddings are interpolated (default slerp)",
    )
    add(
        "--transition-bias",
        type=_bias,
        metavar="BIAS",
        help="attention bias in the middle of a transition (default: the resting one)",
    )
    add(
        "--recompute",
        choices=("r1", "r0a", "r0"),
        help="for models that recompute their cache: r1 off, r0a with rank0's decoded anchor "
        "(default), r0 with the latent anchor, which costs quality",
    )
    add("--accept-quality-loss", action="store_true", help="needed for --recompute r0")


def _add_recovery_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("when a rank is lost").add_argument
    add(
        "--max-restarts",
        type=_count,
        metavar="N",
        help="start all ranks again up to N times without progress; plans of several ranks, or "
        "under torchrun its own --max-restarts (default 3)",
    )
    add("--fallback-tp", type=positive, metavar="TP", help="after a loss, continue with this --tp")
    add(
        "--resume",
        action="store_true",
        help="resume the stream that was killed at --out; give the same prompts and times again "
        "(--plan and --tp may be others)",
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _bias(text: str) -> float:
    if not re.fullmatch(r"0?\.\d+|1(\.0*)?", text) or float(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range; give 0 < BIAS <= 1")
    return float(text)


def _time(text: str) -> Fraction:
    if not re.fullmatch(r"\d+(\.\d+)?s?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write seconds, such as 6s or 2.5s")
    seconds = Fraction(text.removesuffix("s"))
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0; write such as 6s or 2.5s")
    return seconds


def _timed_prompt(text: str) -> TimedPrompt:
    time, colon, prompt = text.partition(":")
    if not colon or not prompt.strip():
        raise argparse.ArgumentTypeError(
            f'{text!r} is not TIME:PROMPT; write such as 6s:"a green square"'
        )
    return TimedPrompt(_time(time), prompt)
