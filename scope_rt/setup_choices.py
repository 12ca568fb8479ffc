"""What a configuration leaves open is settled by launcher, devices and model, or refused."""

from scope_contracts.cache_spec import CacheChoice, KVCacheSpec
from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.tensor_spec import DType
from scope_rt.config import StreamConfig
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.models.family import Family, family_names
from scope_rt.models.loading import ModelFolder
from scope_rt.models.recipe import Recipe
from scope_rt.placement import Host, model_device_type
from scope_rt.topology import Topology

_MOST_PIXELS = 16384
"""Of a side: no encoder of ours takes more, and sizes in bytes stay far from overflow."""


def dtype_of(config: StreamConfig) -> DType:
    """The dtype that was asked for, or that of the devices that generate."""
    if config.model.dtype is not None:
        return config.model.dtype
    return stream_dtype(on_gpu=model_device_type() == "cuda")


def stream_dtype(*, on_gpu: bool) -> DType:
    """What a stream runs in where nobody asks for another."""
    return DType.BFLOAT16 if on_gpu else DType.FLOAT32


def host_of(environment: LaunchEnvironment, topology: Topology, *, num_gpus: int) -> Host:
    """This process's; a launcher that says nothing of its hosts has all ranks here."""
    return Host(
        first_rank=environment.rank - environment.local_rank,
        num_ranks=environment.local_world_size or topology.world_size,
        num_gpus=num_gpus,
    )


def topology_of(config: StreamConfig, environment: LaunchEnvironment) -> Topology:
    """The topology of this start: after a loss it has the fallback degree, if there is one.

    A launcher that starts as many ranks as ever knows no other degree.

    Raises:
        UserInputError: plan and degree do not fit.
    """
    first = Topology.of(config.mesh.plan, config.mesh.tp)
    if config.recovery.fallback_tp is None or environment.attempt == 0:
        return first
    fallback = Topology.of(config.mesh.plan, config.recovery.fallback_tp)
    if environment.launched and fallback.world_size != environment.world_size:
        return first
    return fallback


def check_fallback(config: StreamConfig, model: ModelFolder) -> None:
    """Raises `UserInputError` for a degree after a loss that plan or model cannot have."""
    degree = config.recovery.fallback_tp
    if degree is None:
        return
    if config.mesh.plan is PlanId.SINGLE:
        raise UserInputError(
            f"fallback_tp is {degree}, and plan single runs on one rank; leave it out"
        )
    model.config.check_degree(Topology.of(config.mesh.plan, degree).tp_degree)


def check_image(config: StreamConfig, model: ModelFolder) -> None:
    """Raises `UserInputError` for a picture that no chunk of this recipe could be."""
    image, recipe = config.sampling.image, model.recipe
    if image is None or recipe.start_frame:
        return
    those = [name for name in family_names() if Family.named(name).recipe.start_frame]
    raise UserInputError(
        f"image {image}: recipe {model.layout.family.name} begins with noise, {_block(recipe)}, "
        "and takes no start frame; leave the image out, or stream a checkpoint of a recipe that "
        f"takes one: {', '.join(those)}"
    )


def _block(recipe: Recipe) -> str:
    frames = recipe.frames_per_block
    return "a latent frame at a time" if frames == 1 else f"{frames} latent frames at a time"


def size_of(config: StreamConfig, model: ModelFolder, *, multiple: int) -> tuple[int, int]:
    """Height and width in pixels: as asked for, or the recipe's.

    Raises:
        UserInputError: one is no `multiple` of what a latent token shows, or beyond any video.
    """
    recipe, asked = model.recipe, config.model
    height = recipe.default_height if asked.height is None else asked.height
    width = recipe.default_width if asked.width is None else asked.width
    for name, pixels in (("height", height), ("width", width)):
        if pixels > _MOST_PIXELS:
            raise UserInputError(f"{name} {pixels} is more than {_MOST_PIXELS} pixels; lower it")
        if pixels < multiple or pixels % multiple:
            raise UserInputError(
                f"{name} {pixels} is not a positive multiple of {multiple}; "
                f"try {max(multiple, pixels // multiple * multiple)}"
            )
    return height, width


def cache_spec_of(
    model: ModelFolder,
    geometry: ChunkGeometry,
    cache: CacheChoice,
    *,
    tp: int,
    height: int,
    width: int,
) -> KVCacheSpec:
    """Of all ranks together, for pictures of that size.

    Raises:
        UserInputError: the cache does not suit the model or its share.
    """
    _, _, _, rows, columns = geometry.latent_shape(height, width)
    num_heads = model.config.cache_heads(tp, cache)
    try:
        return KVCacheSpec(
            num_layers=model.config.num_layers,
            num_heads=num_heads,
            head_dim=model.config.attention_head_dim,
            frame_tokens=rows * columns // 4,
            sink_frames=model.recipe.sink_frames,
            window_frames=model.recipe.window_frames,
            batch=geometry.batch,
            dtype=geometry.dtype,
            block_frames=model.recipe.frames_per_block,
            kind=cache.kind,
            codec=cache.codec,
        )
    except UserInputError as error:
        raise UserInputError(f"kv_cache {cache}: {error}") from None
