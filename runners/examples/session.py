"""Steer a stream from Python, cell by cell or as a script: `python runners/examples/session.py`.

With a plan of several ranks the same lines run on every rank, and only rank0 gets chunks:
`torchrun --nproc-per-node 2 runners/examples/session.py --plan tp_v1_1`.
"""

import argparse

import numpy as np

from scope_rt import Chunk, Interpolation, StreamConfig, StreamSession, TransitionSpec


def watch(config: StreamConfig, num_chunks: int) -> list[Chunk]:
    """The chunks of a stream that is steered while it runs; none on a mesh rank."""
    chunks: list[Chunk] = []
    with StreamSession(config) as session:
        for chunk in session.stream("a red circle and a blue square", num_chunks=num_chunks):
            chunks.append(chunk)
            print(f"chunk {chunk.chunk_index}: {len(chunk.frames)} frames of {chunk.prompt!r}")
            if len(chunks) == 2:
                softly = TransitionSpec(num_chunks=2, method=Interpolation.SLERP, bias_floor=0.3)
                receipt = session.prompt("a yellow triangle, fast", softly)
            if len(chunks) == 4:
                taken = receipt.wait(1.0)
                print(f"the new prompt took effect at chunk {taken.chunk_index if taken else '?'}")
                session.hard_cut()  # forgets the past
    return chunks


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="single")
    parser.add_argument("--tp", type=int)
    args = parser.parse_args(argv)
    chunks = watch(StreamConfig.load(plan=args.plan, tp=args.tp, seed=7), num_chunks=6)
    if chunks:  # on rank0
        video = np.concatenate([chunk.frames for chunk in chunks])
        print(f"the stream is {video.shape[0]} frames of {video.shape[2]}x{video.shape[1]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
