"""What the device gives at best: copies, products of matrices, attention by each backend."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from scope_contracts.errors import UserInputError
from scope_lab.gpu_bench.sizes import Sizes
from scope_rt.attention.backend import BACKENDS, backend_named
from scope_rt.attention.key_bias import key_bias
from scope_rt.attention.reference import DenseReference

Line = dict[str, object]
_BLOCK = 3


def median_ms(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of `repeats` calls, each waited for, after one that warms up."""
    call()
    took = []
    for _ in range(repeats):
        wait(device)
        start_s = time.perf_counter()
        call()
        wait(device)
        took.append((time.perf_counter() - start_s) * 1e3)
    return sorted(took)[len(took) // 2]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(sizes: Sizes, device: torch.device) -> Iterator[Line]:
    """What this is."""
    line: Line = {
        "torch": str(torch.__version__),
        "device": str(device),
        "cuda": torch.version.cuda,
    }
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        line |= {"name": about.name, "memory_bytes": about.total_memory}
        line |= {"capability": f"{about.major}.{about.minor}", "sms": about.multi_processor_count}
    yield line


def ceilings(sizes: Sizes, device: torch.device) -> Iterator[Line]:
    """Bytes a second of a copy, and operations a second of products in each format."""
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took_ms = median_ms(partial(target.copy_, source), device, sizes.repeats)
    yield {"what": "copy", "ms": took_ms, "gb_s": 2 * sizes.copy_bytes / took_ms / 1e6}
    n = sizes.matrix
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        took_ms = median_ms(partial(torch.matmul, a, b), device, sizes.repeats)
        tflop_s = 2 * n**3 / took_ms / 1e9
        yield {"what": f"product {dtype}", "n": n, "ms": took_ms, "tflop_s": tflop_s}
    yield _fp8(n, device, sizes.repeats)


def _fp8(n: int, device: torch.device, repeats: int) -> Line:
    """As `torch._scaled_mm` has it, where the device does."""
    line: Line = {"what": "product float8_e4m3fn", "n": n}
    try:
        a = torch.randn(n, n, device=device).to(torch.float8_e4m3fn)
        b = torch.randn(n, n, device=device).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)

        def multiply() -> object:
            return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        took_ms = median_ms(multiply, device, repeats)
    except (RuntimeError, NotImplementedError) as error:
        return line | {"skipped": str(error).partition("\n")[0][:120]}
    return line | {"ms": took_ms, "tflop_s": 2 * n**3 / took_ms / 1e9}


def attention(sizes: Sizes, device: torch.device) -> Iterator[Line]:
    """One layer's attention of a chunk to each window, by each backend, with and without bias."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for model, config in sizes.models.items():
        heads, dim = config.num_attention_heads, config.attention_head_dim
        for window in sizes.windows:
            shape = (1, _BLOCK * sizes.frame_tokens, heads, dim)
            q = torch.randn(shape, device=device, dtype=dtype)
            k, v = (
                torch.randn(1, window * sizes.frame_tokens, heads, dim, device=device, dtype=dtype)
                for _ in range(2)
            )
            operations = 4 * heads * dim * q.shape[1] * k.shape[1]
            for name in BACKENDS.keys() - {DenseReference.name}:  # it holds all scores
                for bias in (1.0, 0.5):
                    line: Line = {"model": model, "window": window, "backend": name, "bias": bias}
                    runs = key_bias(
                        range(window),
                        num_current=_BLOCK,
                        frame_tokens=sizes.frame_tokens,
                        bias=bias,
                    )
                    try:
                        backend = backend_named(name)
                        attend = partial(backend.attend, q, k, v, runs)
                        took_ms = median_ms(attend, device, sizes.repeats)
                    except (UserInputError, RuntimeError, ImportError) as error:
                        yield line | {"skipped": str(error).partition("\n")[0][:120]}
                        continue
                    yield line | {"ms": took_ms, "tflop_s": operations / took_ms / 1e9}
