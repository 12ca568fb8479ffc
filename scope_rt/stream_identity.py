"""What ranks compare, what a resume checks and what a log begins with follow from one setup."""

import os
import time
from pathlib import Path

import torch

from scope_contracts.errors import UserInputError
from scope_contracts.log_records import NOT_RESUMED, Opened, StartFrame
from scope_contracts.parity import ParityKeys
from scope_rt.control.log_entries import recordable
from scope_rt.faults import BROKEN_ON_PURPOSE
from scope_rt.numerics import processor
from scope_rt.record.snapshot_header import other_stream
from scope_rt.stream_setup import StreamSetup
from scope_rt.topology import plan_named
from scope_rt.version import __version__


def parity_keys(setup: StreamSetup, *, model_is_shared: bool) -> ParityKeys:
    """What this rank would do; where the environment contradicts it, what that asks for.

    Ranks that share the model's files are not compared by what those hold: they need not be read
    for it. A recipe may be none of them.
    """
    mesh, plan = setup.config.mesh, setup.topology.plan_id
    asked, pipelined = mesh.environment_plan, mesh.environment_pipelined
    return ParityKeys(
        plan_id=plan if asked is None else plan_named(asked),
        pp_enabled=setup.topology.pipelined if pipelined is None else pipelined,
        kv_cache_recompute_every=setup.recompute.every,
        kv_bias_backend=setup.backend.name,
        kv_cache=str(setup.cache),
        recompute_anchor=str(setup.recompute.anchor),
        tp_allow_compile=mesh.allow_compile,
        digest_every=mesh.digest_every,
        input_digest=mesh.input_digest,
        heartbeat_timeout_s=mesh.heartbeat_timeout_s,
        slow_rank_factor=mesh.slow_rank_factor,
        integrity=setup.config.integrity.level,
        verify_within=setup.config.integrity.verify_within,
        dtype=setup.dtype_name,
        codec_dtype=str(setup.codec_dtype) if setup.decodes else "",
        torch_version=str(torch.__version__),
        package_version=__version__,
        model_fingerprint="" if model_is_shared else setup.model_fingerprint,
        model_recipe=setup.model.layout.recipe_digest,
        start_frame=setup.geometry.start_frame,
        world_layout=f"{plan} tp={setup.topology.tp_degree} {setup.height}x{setup.width}",
        processor=processor(setup.device) if _is_compared(setup) else "",
    )


def _is_compared(setup: StreamSetup) -> bool:
    """Whether what this rank computes is compared with what others do."""
    generates = setup.environment.rank in setup.topology.generator_ranks
    return generates and setup.verifies


def check_environment(setup: StreamSetup) -> None:
    """Refuse environment variables that ask for another plan than the configuration does.

    Raises:
        UserInputError: naming the variable.
    """
    mesh, plan = setup.config.mesh, setup.topology.plan_id
    if mesh.environment_plan not in (None, plan):
        raise UserInputError(
            f"SCOPE_TP_PLAN is {mesh.environment_plan!r}, the plan is {plan}; unset the variable"
        )
    if mesh.environment_pipelined not in (None, setup.topology.pipelined):
        raise UserInputError(f"SCOPE_PP_ENABLED contradicts plan {plan}; unset the variable")
    if mesh.allow_compile:
        raise UserInputError(
            "allow_compile (SCOPE_TP_ALLOW_COMPILE) is not supported yet; leave it out"
        )


def identity(setup: StreamSetup) -> tuple[tuple[str, str], ...]:
    """What must be the same for a stream to be resumed, beside `check_same_picture`; plan and TP
    degree may differ."""
    return (
        ("recipe", setup.model.layout.family.name),
        ("model", setup.model_fingerprint),
        ("seed", str(setup.config.sampling.seed)),
        ("height", str(setup.height)),
        ("width", str(setup.width)),
        ("dtype", str(setup.dtype_name)),
        ("codec_dtype", str(setup.codec_dtype)),
        ("text_dtype", str(setup.text_dtype)),
        ("kv_cache_attention_bias", repr(setup.kv_cache_attention_bias)),
        ("recompute_every", str(setup.recompute.every)),
        ("recompute_anchor", str(setup.recompute.anchor)),
        ("kv_cache", str(setup.cache)),
    )


def check_same_picture(setup: StreamSetup, began: StartFrame | None, *, folder: Path) -> None:
    """Refuse to resume the stream in `folder` with another picture than it `began` with, or none.

    The absolute path alone must be the same, as the log has the picture's latents: the file may be
    gone, or be edited. Another must be of a file with the same bytes.

    Raises:
        UserInputError: it is another, or cannot be read.
    """
    image = setup.config.sampling.image
    if began is None or image is None:
        if (began is None) != (image is None):
            theirs = "none" if began is None else began.image
            raise other_stream(folder, "image", theirs, str(image or "none"))
    elif not is_same_picture(setup, began):
        raise other_stream(folder, "image", began.image, os.path.abspath(image))


def is_same_picture(setup: StreamSetup, began: StartFrame) -> bool:
    """Whether the picture that was asked for has the absolute path or the bytes of that one.

    Raises:
        UserInputError: its name is another, and it cannot be read.
    """
    image = setup.config.sampling.image
    assert image is not None, "asked for of a stream that begins with a picture"
    path = recordable(os.path.abspath(image))
    return path == began.image or setup.picture.sha256 == began.image_sha256


def opened(
    setup: StreamSetup,
    *,
    run_id: str = "",
    resumed_at_chunk: int | None,
    broken_on_purpose: str = "",
) -> Opened:
    """The first record of this process in the stream's log."""
    settings = setup.config.in_effect()
    if broken_on_purpose:
        settings += f"; {BROKEN_ON_PURPOSE}{broken_on_purpose}"
    return Opened(
        at_s=time.time(),
        run_id=run_id,
        package_version=__version__,
        torch_version=str(torch.__version__),
        model=setup.config.model.folder,
        model_fingerprint=setup.model_fingerprint,
        recipe=setup.model.layout.family.name,
        plan_id=setup.topology.plan_id,
        tp_degree=setup.topology.tp_degree,
        height=setup.height,
        width=setup.width,
        dtype=setup.dtype_name,
        codec_dtype=setup.codec_dtype,
        text_dtype=setup.text_dtype,
        base_seed=setup.config.sampling.seed,
        kv_cache_attention_bias=setup.kv_cache_attention_bias,
        backend=setup.backend.name,
        kv_cache_recompute_every=setup.recompute.every,
        recompute_anchor=str(setup.recompute.anchor),
        kv_cache=str(setup.cache),
        frames_per_block=setup.recipe.frames_per_block,
        fps=setup.recipe.fps,
        settings=settings,
        resumed_at_chunk=NOT_RESUMED if resumed_at_chunk is None else resumed_at_chunk,
    )
