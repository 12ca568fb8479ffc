"""Any model can be run as one that keeps its cache by recompute; its weights stay in place."""

from dataclasses import replace
from pathlib import Path

from scope_rt.models.loading import ModelFolder
from scope_rt.models.recipe import RECIPE_NAME, CacheUpkeep


def rebuilding_twin(model: ModelFolder, into: Path) -> Path:
    """The folder of the same model with recompute for cache upkeep; `into` gets links to it.

    What such a model shows is no picture to judge, unless it was trained so; its messages are those
    of any recompute model.
    """
    recipe = model.recipe
    if not recipe.clean_pass:
        return model.path
    for file in model.path.rglob("*"):
        link = into / file.relative_to(model.path)
        if file.is_file() and file.name != RECIPE_NAME:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())
    context_frames = max(1, recipe.window_frames - recipe.frames_per_block)
    replace(
        recipe,
        cache_upkeep=CacheUpkeep.RECOMPUTE,
        kv_cache_num_frames=context_frames,
        window_frames=context_frames + recipe.frames_per_block,
        sink_frames=0,
    ).save(into)
    return into
