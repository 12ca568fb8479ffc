"""The plan of a chunk that belongs to no stream: what warms up, checks or measures a generator."""

from collections.abc import Sequence

from scope_contracts.envelope import MessageKind, PlanId, PPEnvelope


def lone_envelope(
    chunk: int,
    steps: Sequence[float],
    *,
    frames_per_block: int,
    height: int,
    width: int,
    clean_pass: bool = True,
    recomputes: bool = False,
    bias: float = 1.0,
    seed: int = 0,
) -> PPEnvelope:
    """Chunk number `chunk` of a single epoch, which begins with the first. Sizes in pixels."""
    is_first = chunk == 0
    return PPEnvelope(
        plan_id=PlanId.SINGLE,
        call_id=chunk,
        chunk_index=chunk,
        cache_epoch=0,
        kind=MessageKind.INFER,
        init_cache=is_first,
        reset_kv_cache=is_first,
        reset_crossattn_cache=is_first,
        current_start_frame=chunk * frames_per_block,
        do_kv_recompute=recomputes,
        clean_pass=clean_pass,
        num_denoise_steps=len(steps),
        expected_generator_calls=len(steps) + clean_pass + recomputes,
        kv_cache_attention_bias=bias,
        denoising_step_list=tuple(steps),
        height=height,
        width=width,
        base_seed=seed,
    )
