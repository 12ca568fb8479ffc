"""The arguments of `scope-rt plan-memory`, each read into a value of ours."""

import argparse

from scope_contracts.envelope import PlanId
from scope_contracts.errors import shown
from scope_contracts.integrity import IntegrityLevel
from scope_contracts.tensor_spec import DType
from scope_rt.lm.specs.row_storage import BLOCK_SIZE, PREFILL_CHUNK
from scope_rt.lm.specs.state_format import StateFormat
from scope_runners.arguments import dtype, one_of, positive
from scope_runners.parts import add_parts_argument
from scope_runners.plan_memory.gpus import GPUS
from scope_runners.plan_memory.presets import PRESETS
from scope_runners.request import EMBEDDED_MODEL

DEFAULT_MODEL = "krea-14b"
_GIB = 1 << 30
_MOST = 1 << 31
"""No size is larger."""
_MOST_PARTS = 10_000
"""Layers, heads and frames: those that advice goes through one by one."""


def add_plan_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `scope-rt plan-memory`."""
    add = parser.add_argument
    presets = ", ".join(PRESETS)
    add("--model", help=f"{presets}, {EMBEDDED_MODEL!r}, or a folder (default {DEFAULT_MODEL})")
    add("--recipe", metavar="NAME", help="of a folder, as of `scope-rt stream`")
    add_parts_argument(parser)
    add("--tp", type=_part, default=1, help="ranks that share the heads (default 1)")
    add("--batch", type=_size, default=1, help="sequences, or streams (default 1)")
    add(
        "--dtype",
        type=dtype,
        metavar="NAME",
        help="of weights and rows: bf16, fp16, fp32, fp64 (default, as of `scope-rt stream`: bf16 "
        "with --gpu or --gpu-gib, else fp32; for language models bf16)",
    )
    add(
        "--kv-cache",
        metavar="KIND[:CODEC]",
        help="video: ring, quantized, h2o, paged, hierarchical; language: contiguous, paged, "
        "quantized, h2o, latent; codecs int8, int4, fp8",
    )
    add("--gpu", help=f"one of {', '.join(GPUS)}")
    add(
        "--gpu-gib",
        dest="gpu_bytes",
        type=_gib,
        metavar="GIB",
        help="memory of one GPU, where it is another one",
    )
    add("--json", action="store_true", help="print one JSON object")
    _add_video_arguments(parser)
    _add_language_arguments(parser)
    _add_sizes(parser)


def _add_video_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("video models; frames are latent frames").add_argument
    add("--plan", type=one_of(PlanId), help=f"one of {', '.join(PlanId)} (default single)")
    add(
        "--control-device",
        metavar="DEVICE",
        help="of rank0 in pp0 and pp1, as [mesh] control_device of a stream: cpu, or cuda:0 for "
        "the GPU of rank 1, cuda:1 of rank 2, ... (default: a GPU of its own)",
    )
    add("--height", type=_size, help="pixels (default: the model's own)")
    add("--width", type=_size, help="pixels (default: the model's own)")
    add("--window", type=_part, help="frames a chunk sees, itself included")
    add("--sink", type=_sink, help="first frames that are never evicted")
    add("--block", type=_part, help="frames of a chunk")
    add(
        "--integrity",
        type=one_of(IntegrityLevel),
        metavar="LEVEL",
        help=f"one of {', '.join(IntegrityLevel)} (default {IntegrityLevel.DEFAULT})",
    )


def _add_language_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("language models").add_argument
    add("--length", type=_size, help="tokens of a sequence (default 8192)")
    add("--models", type=_size, help="models of this shape side by side (default 1)")
    add(
        "--block-size",
        type=_size,
        help=f"tokens of a block of --kv-cache paged (default {BLOCK_SIZE})",
    )
    add(
        "--keep",
        type=_size,
        metavar="ROWS",
        help="of a sequence in a layer under --kv-cache h2o: sinks + budget + recent + "
        "evict_every - 1",
    )
    add(
        "--prefill-chunk",
        type=_size,
        metavar="TOKENS",
        help=f"of a prompt fed at once (default: {PREFILL_CHUNK} if paged, all of it if h2o)",
    )
    add(
        "--weights-gib",
        dest="weights_bytes",
        type=_gib,
        metavar="GIB",
        help="weights of one model over all ranks",
    )
    add(
        "--mamba2",
        type=_mamba2,
        metavar="HEADSxDIMxSTATExGROUPSxKERNEL",
        help="layers that do not attend keep such states, as 48x128x128x8x4",
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sizes, in place of --model").add_argument
    add("--layers", type=_part)
    add("--heads", type=_part)
    add("--head-dim", type=_size)
    add("--ffn-dim", type=_size, help="makes it a video model")
    add("--kv-heads", type=_part, help="default: --heads")
    add("--attention-layers", type=_part, help="layers that attend (default: all)")
    add("--latent-rank", type=_size, help="MLA: numbers of the latent (DeepSeek: 512)")
    add("--rope-dim", type=_size, help="MLA: numbers of the RoPE key (DeepSeek: 64)")


def _size(text: str) -> int:
    return _bounded(positive(text), _MOST)


def _part(text: str) -> int:
    return _bounded(positive(text), _MOST_PARTS)


def _sink(text: str) -> int:
    """Negative ones are refused with the window that they belong to."""
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return _bounded(int(text), _MOST_PARTS)


def _bounded(number: int, most: int) -> int:
    if number > most:
        raise argparse.ArgumentTypeError(f"{shown(number)} is more than {most:,}")
    return number


def _gib(text: str) -> int:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of GiB")
    return int(size * _GIB)


def _mamba2(text: str) -> StateFormat:
    numbers = text.split("x")
    if len(numbers) != 5 or not all(n.isdecimal() and 0 < int(n) <= _MOST for n in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not five sizes as 48x128x128x8x4")
    heads, dim, state, groups, kernel = map(int, numbers)
    if kernel < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: the convolution's kernel is at least 2")
    return StateFormat.mamba2(
        num_heads=heads,
        head_dim=dim,
        state_size=state,
        num_groups=groups,
        conv_kernel=kernel,
        dtype=DType.BFLOAT16,
    )
