"""Faults 60 to 68: what rank0 takes, encodes, plans, keeps, decodes or hands out is wrong."""

from functools import partial

from scope_contracts.envelope import CONDITIONING_EMBEDS, CONTEXT_FRAMES_OVERRIDE, LATENTS_IN
from scope_contracts.integrity import IntegrityLevel
from scope_rt.faults import FaultPoint
from scope_rt.topology import Topology
from scope_runners.break_it.cases.recompute import RECOMPUTED_ALWAYS
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.job import Script, ScriptEvent
from scope_runners.break_it.numeric import NumericFault, cases_of, rank0
from scope_runners.break_it.scenario import (
    FAULT_CHUNK,
    IN_ORDER,
    PP0,
    WITH_START_FRAME,
    Expected,
    refused_by,
)


def _refused(error: str, topology: Topology, level: IntegrityLevel) -> Expected:
    """By rank0; the others are told to leave, or why it does."""
    return refused_by(0, topology, error, others=IN_ORDER | {"IntegrityError"})


_RANK0 = partial(
    NumericFault,
    refusal=partial(_refused, "IntegrityError"),
    on=rank0,
    topology=PP0,
)
_ONCE = (IntegrityLevel.STRICT,)
"""By default a chunk has its turn to be decoded again once in 8 M chunks."""

CASES = cases_of(
    _RANK0(
        number=60,
        name="codec-weight",
        description="a weight of the codec changes on rank0",
        layer=(Detector.FINGERPRINT, Detector.CODEC),
        refusal=partial(_refused, "FingerprintError"),
        action="scale_codec_weight",
        arguments={"by": 1.05},
        point=FaultPoint.DECODER,
        takes_turns=True,
    ),
    _RANK0(
        number=60,
        name="codec-highlights",
        description="the codec's code begins to give nothing brighter than three quarters",
        layer=(Detector.CODEC,),
        action="dim_highlights",
        point=FaultPoint.DECODER,
        levels=_ONCE,
    ),
    _RANK0(
        number=61,
        name="text-encoded",
        description="the text encoder gives other embeddings, once",
        layer=(Detector.TEXT,),
        action="scale_embeds",
        arguments={"by": 1.02},
        point=FaultPoint.ENCODED,
        chunk=-1,
    ),
    _RANK0(
        number=62,
        name="text-planned",
        description="the prompt's embeddings change on rank0 before they are sent",
        layer=(Detector.KEPT,),
        action="scale_tensor",
        arguments={"name": CONDITIONING_EMBEDS, "by": 1.02},
        point=FaultPoint.PLANNED,
        chunk=0,
    ),
    _RANK0(
        number=63,
        name="latents-arrived",
        description="latents change on rank0 after they were checked",
        layer=(Detector.KEPT, Detector.EMITTED),
        action="nudge_arrived",
        point=FaultPoint.ARRIVED,
    ),
    _RANK0(
        number=64,
        name="context-planned",
        description="the context of a recompute changes on rank0",
        layer=(Detector.KEPT,),
        action="scale_tensor",
        arguments={"name": CONTEXT_FRAMES_OVERRIDE, "by": 1.02},
        point=FaultPoint.PLANNED,
        script=RECOMPUTED_ALWAYS,
    ),
    _RANK0(
        number=69,
        name="start-picture",
        description="the latents of the start frame change on rank0 after they were encoded",
        layer=(Detector.KEPT,),
        action="scale_tensor",
        arguments={"name": LATENTS_IN, "by": 1.02},
        point=FaultPoint.PLANNED,
        chunk=0,
        script=WITH_START_FRAME,
    ),
    _RANK0(
        number=65,
        name="decoder-memory",
        description="the decoder forgets the latents of the chunk before",
        layer=(Detector.DECODED,),
        action="reset_decoder",
        point=FaultPoint.DECODER,
        levels=_ONCE,
    ),
    _RANK0(
        number=65,
        name="frames-shifted",
        description="the decoder shows a chunk one pixel to the right",
        layer=(Detector.DECODED,),
        action="shift_frames",
        point=FaultPoint.DECODED,
        levels=_ONCE,
    ),
    _RANK0(
        number=66,
        name="frames-earlier",
        description="a chunk is handed out with the frames of the one before",
        layer=(Detector.EMITTED,),
        action="show_earlier",
        point=FaultPoint.EMIT,
    ),
    _RANK0(
        number=67,
        name="bias-planned",
        description="rank0 plans another attention bias than was asked for, for all ranks",
        layer=(Detector.PLANNED,),
        action="edit",
        arguments={"kv_cache_attention_bias": 0.5},
        point=FaultPoint.PLANNED,
    ),
    _RANK0(
        number=68,
        name="control-lost",
        description="a hard cut that was asked for is lost on rank0",
        layer=(Detector.PLANNED,),
        action="lose_control",
        point=FaultPoint.TAKEN,
        script=Script(events=(ScriptEvent(chunk=FAULT_CHUNK, hard_cut=True),)),
    ),
)
