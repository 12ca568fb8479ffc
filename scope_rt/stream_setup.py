"""A configuration meets its model: complete and checked before any other rank is met.

Built once by every rank; what ranks compare, what identifies a stream and how its log begins are
read off it.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch

from scope_contracts.cache_spec import CacheChoice, CacheIndices, KVCacheSpec
from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.integrity import IntegrityLevel
from scope_contracts.tensor_spec import DType
from scope_rt.attention.backend import AttentionBackend, backend_named, default_backend
from scope_rt.checks import Checks
from scope_rt.config import StreamConfig
from scope_rt.control.anchor import AnchorEncoder, AnchorFrames
from scope_rt.control.context import Context, ContextMemory
from scope_rt.control.encoded_prompts import EncodedPrompts, check_prompt
from scope_rt.control.inbox import Conditioning
from scope_rt.control.planner import StreamSettings
from scope_rt.control.recompute import Recompute, RecomputeAnchor, choose_recompute
from scope_rt.control.rollout_context import RolloutMemory
from scope_rt.control.stages import ValueRules
from scope_rt.control.start_frame import StartFrame, encoded
from scope_rt.instruments import Instruments
from scope_rt.integrity.part_digests import part_digests
from scope_rt.integrity.pictures import RankZeroParts
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.models.loading import ModelFolder
from scope_rt.models.noise import NoiseSource, SeededNoise
from scope_rt.models.recipe import Recipe
from scope_rt.part_place import PartPlace, place_of
from scope_rt.placement import device_of, model_device_type
from scope_rt.setup_choices import (
    cache_spec_of,
    check_fallback,
    check_image,
    dtype_of,
    host_of,
    size_of,
    topology_of,
)
from scope_rt.tensors import NAMES, TORCH_DTYPES, sha256_of
from scope_rt.text.encoder import TextEncoder
from scope_rt.topology import Topology
from scope_rt.vae.checked import CheckedAnchorEncoder, CheckedDecoder
from scope_rt.vae.codec import CodecSizes, VideoCodec
from scope_rt.video.start_picture import StartPicture, read_start_picture


@dataclass(frozen=True, kw_only=True)
class StreamSetup:
    """One stream as every rank of it sees it. Sizes in pixels."""

    config: StreamConfig
    environment: LaunchEnvironment
    topology: Topology
    model: ModelFolder
    height: int
    width: int
    recompute: Recompute
    cache: CacheChoice
    codec_sizes: CodecSizes
    geometry: ChunkGeometry
    cache_spec: KVCacheSpec
    """Of all ranks together; a generator rank holds its share of the heads."""
    recorded_start: StartFrame | None = None
    """The start frame of a stream that is run again, in the place of a picture."""

    @classmethod
    def of(
        cls,
        config: StreamConfig,
        environment: LaunchEnvironment | None = None,
        *,
        recorded_start: StartFrame | None = None,
        **more: Any,
    ) -> Self:
        """Read the model folder and settle what `config` left open; `more` is a subclass's own.

        Raises:
            UserInputError: a setting cannot be used with this model or plan; the sentence says
                what to change.
        """
        environment = environment or LaunchEnvironment.from_environment()
        model = ModelFolder.open(config.model.folder, config.model.recipe)
        recipe, topology = model.recipe, topology_of(config, environment)
        model.config.check_degree(topology.tp_degree)
        check_fallback(config, model)
        check_image(config, model)
        recompute = choose_recompute(
            recipe, config.cache.recompute, every=config.cache.kv_cache_recompute_every
        )
        cache = CacheChoice.named(config.cache.kv_cache)
        recipe.check_cache(cache)
        dtype = TORCH_DTYPES[dtype_of(config)]
        if not dtype.is_floating_point:
            raise UserInputError(f"dtype {config.model.dtype} is no float; choose float32")
        image = config.sampling.image
        geometry = replace(
            model.geometry(dtype=dtype),
            start_frame=image is not None or recorded_start is not None,
        )
        height, width = size_of(config, model, multiple=geometry.pixel_multiple)
        setup = cls(
            config=config,
            environment=environment,
            topology=topology,
            model=model,
            height=height,
            width=width,
            recompute=recompute,
            cache=cache,
            codec_sizes=model.codec_sizes(),
            geometry=geometry,
            cache_spec=cache_spec_of(
                model, geometry, cache, tp=topology.tp_degree, height=height, width=width
            ),
            recorded_start=recorded_start,
            **more,
        )
        setup._load_parts()
        return setup

    @property
    def recipe(self) -> Recipe:
        """The model's."""
        return self.model.recipe

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations, cache and a chunk's latents."""
        return TORCH_DTYPES[self.dtype_name]

    @property
    def dtype_name(self) -> DType:
        """The same in the contract's words."""
        return dtype_of(self.config)

    @property
    def warms_up(self) -> bool:
        """Whether generator ranks warm up before they are ready."""
        asked = self.config.mesh.warm_up
        return model_device_type() == "cuda" if asked is None else asked

    @property
    def device(self) -> torch.device:
        """Of this rank, or of rank0 in a process that only starts ranks.

        Raises:
            UserInputError: there are too few GPUs, or no such device.
        """
        return device_of(
            self.environment.rank,
            self.topology,
            host_of(self.environment, self.topology, num_gpus=torch.cuda.device_count()),
            control_device=self.config.mesh.control_device,
        )

    @property
    def kv_cache_attention_bias(self) -> float:
        """The resting one: as asked for, or the recipe's."""
        asked = self.config.cache.kv_cache_attention_bias
        return self.recipe.kv_cache_attention_bias if asked is None else asked

    @property
    def noise(self) -> NoiseSource:
        """Where every rank draws its noise."""
        return SeededNoise()

    def observe_call(self, timestep: float, start_token: int, indices: CacheIndices) -> None:
        """Sees this rank's generator calls."""

    @property
    def backend(self) -> AttentionBackend:
        """The attention backend in effect: the one asked for, or the device's default."""
        # The generator ranks', on a rank0 that is none too: all must name the same.
        default = default_backend(torch.device(model_device_type()), self.dtype)
        return backend_named(self.config.mesh.attention_backend or default)

    @property
    def decodes(self) -> bool:
        """Whether this rank decodes frames: rank0, and in `tp_v0` every rank."""
        return self.environment.rank == 0 or self.topology.plan_id is PlanId.TP_V0

    @cached_property
    def codec(self) -> VideoCodec:
        """Of a rank that decodes; no other loads it."""
        return self.model.codec(self.codec_place)

    @cached_property
    def text_encoder(self) -> TextEncoder:
        """Of rank0; no other loads it."""
        return self.model.text_encoder(self.text_place)

    @property
    def codec_place(self) -> PartPlace:
        """Where this rank decodes. Raises `UserInputError`."""
        config = self.config.model
        dtype = None if config.codec_dtype is None else TORCH_DTYPES[config.codec_dtype]
        return place_of("codec", device=config.codec_device, dtype=dtype, own=self.device)

    @property
    def text_place(self) -> PartPlace:
        """Where rank0 encodes prompts. Raises `UserInputError`."""
        config = self.config.model
        return place_of(
            "text",
            device=config.text_device,
            dtype=None if config.text_dtype is None else TORCH_DTYPES[config.text_dtype],
            own=self.device,
            offload=config.text_offload,
        )

    @property
    def codec_dtype(self) -> DType:
        """Of this rank's codec, in the contract's words. Raises `UserInputError`."""
        return NAMES[self.codec_place.dtype]

    @property
    def text_dtype(self) -> DType:
        """Of rank0's text encoder; raises likewise."""
        return NAMES[self.text_place.dtype]

    @property
    def is_rank(self) -> bool:
        """Whether this process is a rank of the stream, not one that only starts them."""
        return self.environment.launched or self.topology.world_size == 1

    @cached_property
    def picture(self) -> StartPicture:
        """The file that a stream begins with. Raises `UserInputError` as `read_start_picture`."""
        image = self.config.sampling.image
        assert image is not None, "asked for of a stream that begins with a picture"
        return read_start_picture(image, height=self.height, width=self.width)

    @cached_property
    def start_frame(self) -> StartFrame:
        """What chunk 0 is, of a stream that begins with a picture; on rank0, or of a recording.

        Raises:
            UserInputError: as `read_start_picture` and `start_frame.encoded`.
            IntegrityError: encoding it twice gave two results.
        """
        if self.recorded_start is not None:
            return self.recorded_start
        frame = self._encoded(self.picture)
        if self.verifies:
            again = sha256_of(self._encoded(self.picture).latents)
            what = "its latents, encoded again,"
            Checks().kept(f"image {frame.image}", what, now=again, noted=frame.latents_sha256)
        return frame

    def _encoded(self, picture: StartPicture) -> StartFrame:
        return encoded(picture, self.codec, batch=self.geometry.batch, dtype=self.dtype)

    def check_prompt(self, prompt: str) -> None:
        """Refuse what cannot be encoded, before any rank starts; rank0 has the last word, where the
        encoder is none to be loaded for that.

        Raises:
            UserInputError, IntegrityError: as `conditioning`.
        """
        if self.is_rank or self.model.reads_prompts_at_once:
            self.conditioning(prompt)
        else:
            check_prompt(prompt)

    def _load_parts(self) -> None:
        """What this rank will need beside its generator. Raises `UserInputError`."""
        needs_picture = self._begins_with_picture and self.environment.rank == 0
        if needs_picture:
            _ = self.picture  # first: an encoder may take minutes to load
        if not self.is_rank:
            self.model.check_parts()
            return
        if self.decodes:
            _ = self.codec
        if self.environment.rank == 0:
            _ = self.text_encoder
        if needs_picture:
            _ = self.start_frame

    @property
    def _begins_with_picture(self) -> bool:
        """Whether this start is a stream's first, as far as is known before its log is read: a
        stream that is resumed needs its picture no more. A run that torchrun was given a name for
        may be an earlier one."""
        started = self.environment
        may_resume = started.attempt or started.run_id or self.config.recovery.resume
        return self.config.sampling.image is not None and not may_resume

    def release_parts(self) -> None:
        """Let go of a text encoder that has read prompts, and of embeddings: who only starts ranks
        holds none."""
        vars(self).pop("text_encoder", None)
        self._prompts.clear()

    @property
    def num_tail_frames(self) -> int:
        """Latent frames that rebuild the decoder and the context of a resumed stream.

        Where the context has a decoded frame, it is decoded again, by a decoder that must have all
        it needs before that frame; else both are rebuilt from the same latents.
        """
        decoder, context = self.codec_sizes.decoder_context_frames, self.recipe.context_frames
        if self.recompute.anchor is RecomputeAnchor.DECODED:
            return decoder + context
        return max(decoder, context)

    @cached_property
    def model_fingerprint(self) -> str:
        """Of all files of the model."""
        return self.model.fingerprint()

    @property
    def verifies(self) -> bool:
        """Whether numbers and state are verified."""
        return self.config.integrity.level is not IntegrityLevel.OFF

    @property
    def value_rules(self) -> ValueRules | None:
        """What latents and pictures must be; None where nothing is verified."""
        if not self.verifies:
            return None
        return ValueRules(latent_limit=self.recipe.latent_limit)

    @property
    def verify_within(self) -> int:
        """M: all state is verified within so many chunks; 1 is with every chunk."""
        integrity = self.config.integrity
        return 1 if integrity.level is IntegrityLevel.STRICT else integrity.verify_within

    @property
    def settings(self) -> StreamSettings:
        """What the planner puts into every envelope."""
        return StreamSettings(
            plan_id=self.topology.plan_id,
            recipe=self.recipe,
            height=self.height,
            width=self.width,
            base_seed=self.config.sampling.seed,
            start_frame=self.geometry.start_frame,
            kv_cache_attention_bias=self.kv_cache_attention_bias,
            recompute_every=self.recompute.every,
            bring_up=self.config.mesh.bring_up,
        )

    @cached_property
    def _prompts(self) -> EncodedPrompts:
        return EncodedPrompts(lambda: self.text_encoder, self.config.integrity.level)

    def conditioning(self, prompt: str, instruments: Instruments | None = None) -> Conditioning:
        """`prompt` and its embeddings. Raises what `EncodedPrompts.of` does."""
        return self._prompts.of(prompt, instruments or Instruments())

    def rank_zero_parts(self) -> RankZeroParts:
        """What rank0 makes pictures and embeddings with, to be verified; the codec's weights are
        taken to be right as they are now."""
        stride = self.codec_sizes.spatial_stride
        return RankZeroParts(
            decoder=self.decoder,
            codec=self.codec_sizes,
            latent_size=(self.height // stride, self.width // stride),
            weights=part_digests({"vae": self.codec}),
            encoded_again=self._prompts.first_again,
        )

    def decoder(self) -> CheckedDecoder:
        """At the start of an epoch; for ranks that decode."""
        return CheckedDecoder(self.codec)

    def anchor_encoder(self) -> AnchorEncoder:
        """Of the frames that a context begins with; for ranks that decode."""
        return CheckedAnchorEncoder(self.codec)

    def context_memory(self) -> Context:
        """Empty, for the context of this stream; for ranks that decode."""
        recipe, codec, rolls = self.recipe, self.codec_sizes, self.recipe.rollout_frames > 0
        anchor_frames = AnchorFrames(
            self.anchor_encoder(),
            num_latents=recipe.rollout_overlap if rolls else recipe.context_frames,
            first_latent_frames=codec.first_latent_frames,
            temporal_stride=codec.temporal_stride,
        )
        if rolls:
            return RolloutMemory(recipe, anchor_frames)
        return ContextMemory(recipe, anchor_frames, anchor=self.recompute.anchor)
