"""Train the embedded model from nothing. Every stage is seeded and resumes where it was stopped.

stages, each with its folder under --out; times are for one shared core without a GPU:
  codec   codec/   Solve the encoder from the world's patches (two minutes), then train the decoder
                   on endless fresh clips: 0.6 s a step, 31 dB after 1,000. Saves every minute.
  clips   clips/   Encode 36 shards of 512 clips of 3 s, with the text of every chunk: 6 minutes,
                   500 MB. Needs the encoder only, so it may run beside `codec`.
  dit     dit/     Train the DiT on the clips with teacher forcing: about 1 s a step.
                   Saves every two minutes; new clips join as they appear.
  model   model/   Put the model folder together from what is trained so far, at any time: watch
                   training with `scripts/lab eval_tiny --model OUT/model --quick`.
  all              All of them in this order.

With CUDA the DiT trains on the GPU.
"""

import argparse
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import torch

from scope_contracts.errors import UserInputError
from scope_lab.tiny import train_codec, train_dit
from scope_lab.tiny.assemble import assemble, install
from scope_lab.tiny.make_clips import make_clips
from scope_rt.text.words import WordTextEncoder
from scope_rt.vae.tiny import TinyVideoCodec
from scope_runners.arguments import seed
from scope_runners.command_parser import CommandParser


class Stage(StrEnum):
    CODEC = "codec"
    CLIPS = "clips"
    DIT = "dit"
    MODEL = "model"
    ALL = "all"


def main(argv: Sequence[str]) -> int:
    """Run the stages that were asked for.

    Raises:
        UserInputError: a stage lacks what another one makes.
    """
    args = _parser().parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    stage: Stage = args.stage
    codec, clips, dit = (args.out / name for name in (Stage.CODEC, Stage.CLIPS, Stage.DIT))
    codec_part, transformer_part = codec / "codec", dit / "transformer"
    text_encoder = WordTextEncoder.from_seed(0)
    if stage in (Stage.CODEC, Stage.ALL):
        codec_trainer = train_codec.Trainer(
            out=codec, num_steps=args.codec_steps, seed=args.seed, resume=True
        )
        codec_trainer.run(args.codec_batch)
    if stage in (Stage.CLIPS, Stage.ALL):
        make_clips(
            clips,
            codec=TinyVideoCodec.from_pretrained(codec_part),
            text_encoder=text_encoder,
            num_shards=args.shards,
            seed=args.seed + 1,
        )
    if stage in (Stage.DIT, Stage.ALL):
        if not any(clips.glob("*.safetensors")):
            raise UserInputError(f"{clips} holds no clips; run --stage clips first")
        dit_trainer = train_dit.Trainer(
            folder=dit, num_steps=args.dit_steps, seed=args.seed, compiled=args.compile
        )
        if dit_trainer.step < dit_trainer.num_steps:
            dit_trainer.run(clips, args.dit_batch)
    if args.install or stage in (Stage.MODEL, Stage.ALL):
        model = assemble(
            args.out / Stage.MODEL,
            codec=codec_part,
            transformer=transformer_part,
            text_encoder=text_encoder,
        )
        print(f"model: {model.path}")
        if args.install:
            print(f"installed: {install(model)}")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="scripts/lab train_tiny",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/train"), help="folder of all stages (%(default)s)")
    add("--stage", type=Stage, choices=list(Stage), default=Stage.ALL, help="(%(default)s)")
    add("--install", action="store_true", help="make the result the embedded model")
    add("--seed", type=seed, default=0, help="of every random choice (%(default)s)")
    add("--codec-steps", type=int, default=2000, help="(%(default)s)")
    add("--codec-batch", type=int, default=4, help="clips of 24 frames a step (%(default)s)")
    add("--shards", type=int, default=36, help="of 512 clips (%(default)s)")
    add("--dit-steps", type=int, default=3200, help="(%(default)s)")
    add("--dit-batch", type=int, default=12, help="clips of 48 frames a step (%(default)s)")
    add("--compile", action="store_true", help="faster DiT training; needs a C++ compiler")
    add("--threads", type=int, help="CPU threads (torch's own choice)")
    return parser
