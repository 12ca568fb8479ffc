"""Stream a checkpoint of your own: `python runners/examples/own_checkpoint.py FOLDER`.

A model folder has `recipe.json` (how the model is sampled), `transformer/`, `vae/` and
`text_encoder/`; runbooks/guides/your-own-model.md says what belongs in each, and how a codec and a
text encoder of your own are registered, which this script leaves out. Without FOLDER it
makes one from the embedded model with a recipe of its own: two denoising steps instead of four.
"""

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from scope_rt import ScopeError, StreamConfig, StreamSession
from scope_rt.models.loading import embedded_folder


def copy_with_two_steps(folder: Path) -> Path:
    """The embedded model's files with another recipe."""
    # Without the manifest, which vouches for the embedded model's own recipe.
    ignore = shutil.ignore_patterns("scope_manifest.json")
    shutil.copytree(embedded_folder(), folder, dirs_exist_ok=True, ignore=ignore)
    recipe = json.loads((folder / "recipe.json").read_text())
    recipe["denoising_steps"] = [1000.0, 500.0]
    (folder / "recipe.json").write_text(json.dumps(recipe, indent=2))
    return folder


def stream(folder: Path) -> int:
    """Show what the folder's model makes; returns the generator calls of a chunk."""
    with StreamSession(StreamConfig.load(model=folder, seed=3)) as session:
        recipe = session.setup.recipe
        print(f"{folder.name}: steps {recipe.denoising_steps}, {recipe.fps} frames/s")
        calls = 0
        for chunk in session.stream("a red circle", num_chunks=3):
            calls = chunk.generator_calls
            print(f"chunk {chunk.chunk_index}: {chunk.frames.shape}, {calls} generator calls")
        return calls


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments:
        stream(Path(arguments[0]))
        return 0
    with TemporaryDirectory() as scratch:
        stream(copy_with_two_steps(Path(scratch) / "two-steps"))
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ScopeError as error:
        sys.exit(f"own_checkpoint.py: {error}")  # one sentence, with what to change
