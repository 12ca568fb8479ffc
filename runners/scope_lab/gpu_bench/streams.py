"""Chunks of a model with random weights: what a generator call takes, and what the host does."""

import time
from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheIndices, KVCacheSpec
from scope_contracts.envelope import CONDITIONING_EMBEDS, LATENTS_IN
from scope_lab.gpu_bench.ceilings import Line, wait
from scope_lab.gpu_bench.sizes import Sizes
from scope_rt.attention.backend import backend_named, default_backend
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.models.causal_wan import CausalWanModel
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.lone_chunk import lone_envelope
from scope_rt.models.noise import SeededNoise
from scope_rt.models.schedule import FlowSchedule
from scope_rt.tensor_digests import NoDigests
from scope_rt.tensors import NAMES

STEPS = (1000.0, 937.5, 833.3, 625.0)
_BLOCK = 3
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
_SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def stream(model_name: str, sizes: Sizes, device: torch.device) -> Iterator[Line]:
    """Chunks at every window: the first ones fill it, one is timed, one is counted."""
    config = sizes.models[model_name]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(config, device, dtype)
    weights = sum(weight.nbytes for weight in model.parameters())
    yield {"model": model_name, "weights_bytes": weights, "dtype": NAMES[dtype]}
    for window in sizes.windows:
        bench = _Bench(model, sizes, window, device, dtype)
        bench.fill()
        yield {"model": model_name, "window": window} | bench.timed() | bench.counted()


def random_model(
    config: CausalWanConfig, device: torch.device, dtype: torch.dtype
) -> CausalWanModel:
    """Made where it is used: nothing of it passes through the host."""
    with torch.device("meta"):
        model = CausalWanModel(config).to(dtype)
    model = model.to_empty(device=device).requires_grad_(False).eval()
    for weight in model.parameters():
        weight.normal_(0, 0.02)
    return model


class _Bench:
    """One generator, and where its stream stands."""

    def __init__(
        self,
        model: CausalWanModel,
        sizes: Sizes,
        window: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        config, self._device, self._window = model.config, device, window
        spec = KVCacheSpec(
            num_layers=config.num_layers,
            num_heads=config.num_attention_heads,
            head_dim=config.attention_head_dim,
            frame_tokens=sizes.frame_tokens,
            sink_frames=0,
            window_frames=window,
            batch=1,
            dtype=NAMES[dtype],
            block_frames=_BLOCK,
        )
        self._ends: list[float] = []
        self._generator = ChunkGenerator(
            model=model,
            cache=open_frame_cache(spec, device=device),
            schedule=FlowSchedule(),
            backend=backend_named(default_backend(device, dtype)),
            noise=SeededNoise(),
            derived=NoDigests(),
        )
        shape = (1, _BLOCK, config.in_channels, *sizes.side)
        self._tensors: Mapping[str, Tensor] = {
            LATENTS_IN: torch.randn(shape).to(dtype),
            CONDITIONING_EMBEDS: torch.randn(1, sizes.text_len, config.text_dim).to(dtype),
        }
        self._chunk, self._side = 0, sizes.side

    def fill(self) -> None:
        """Until the window is full, and everything was called once."""
        for _ in range(self._window // _BLOCK + 1):
            self._next()

    def timed(self) -> Line:
        """A chunk as a stream makes it, then one whose calls are waited for one by one."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        wait(self._device)
        start_s = time.perf_counter()
        self._next()
        host_s = time.perf_counter() - start_s
        wait(self._device)
        chunk_s = time.perf_counter() - start_s
        ends = [time.perf_counter()]

        def ended(timestep: float, start_token: int, indices: CacheIndices) -> None:
            wait(self._device)
            ends.append(time.perf_counter())

        before, self._generator.observe = self._generator.observe, ended
        self._next()
        self._generator.observe = before
        calls_ms = [(end - start) * 1e3 for start, end in pairwise(ends)]
        line: Line = {"chunk_ms": chunk_s * 1e3, "host_ms": host_s * 1e3, "calls_ms": calls_ms}
        if self._device.type == "cuda":
            line["peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
        return line

    def counted(self) -> Line:
        """Kernels that the host launches for a chunk, and how often it waits for the device."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            self._next()
            wait(self._device)
        counts = {event.key: event.count for event in profile.key_averages()}
        return {
            "launches": sum(counts.get(name, 0) for name in _LAUNCHES),
            "syncs": sum(counts.get(name, 0) for name in _SYNCS) - (self._device.type == "cuda"),
            "copies": counts.get("cudaMemcpyAsync", 0),
            "operators": sum(count for name, count in counts.items() if name.startswith("aten::")),
        }

    def _next(self) -> None:
        height, width = (8 * cells for cells in self._side)
        envelope = lone_envelope(
            self._chunk, STEPS, frames_per_block=_BLOCK, height=height, width=width
        )
        later = {LATENTS_IN: self._tensors[LATENTS_IN]}
        tensors = later if self._chunk else self._tensors
        self._generator.generate(envelope, tensors, lambda: None)
        self._chunk += 1
