"""Trained parts become one model folder that loads and is small enough for a repository."""

import shutil
from pathlib import Path

from scope_contracts.errors import UserInputError, mismatch
from scope_lab.tiny.train_dit import FRAMES_PER_BLOCK, WINDOW_CHUNKS
from scope_lab.tiny.world import FRAMES_PER_SECOND, SIZE_PX
from scope_rt.models.loading import WEIGHTS_NAME, ModelFolder, embedded_folder
from scope_rt.models.manifest import Manifest
from scope_rt.models.recipe import Recipe
from scope_rt.text.words import WordTextEncoder

MAX_BYTES = 16_000_000
RECIPE = Recipe(
    denoising_steps=(1000.0, 750.0, 500.0, 250.0),
    shift=5.0,
    frames_per_block=FRAMES_PER_BLOCK,
    window_frames=WINDOW_CHUNKS * FRAMES_PER_BLOCK,
    sink_frames=0,
    fps=FRAMES_PER_SECOND,
    default_height=SIZE_PX,
    default_width=SIZE_PX,
)


def assemble(
    folder: Path, *, codec: Path, transformer: Path, text_encoder: WordTextEncoder
) -> ModelFolder:
    """Write the model folder from a codec folder and a transformer folder, and open it.

    Raises:
        UserInputError: a part is missing, or the whole is larger than `MAX_BYTES`.
    """
    for part, name in ((codec, "vae"), (transformer, "transformer")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file in ("config.json", WEIGHTS_NAME):
            if not (part / file).is_file():
                raise UserInputError(f"{part / file} is missing; train that part first")
            shutil.copyfile(part / file, folder / name / file)
    text_encoder.save_pretrained(folder / "text_encoder")
    RECIPE.save(folder)
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    if num_bytes > MAX_BYTES:
        fix = "make the model smaller"
        raise UserInputError(mismatch("weights", got=num_bytes, want=f"<= {MAX_BYTES}", fix=fix))
    model = ModelFolder.open(folder)
    model.codec(), model.text_encoder()
    return model


def install(model: ModelFolder) -> Path:
    """Make `model` the embedded one of this installation; returns where it lies."""
    target = embedded_folder()
    shutil.copytree(model.path, target, dirs_exist_ok=True)
    Manifest.of(target).write(target)
    return target
