"""The process-wide switches that change what the same code computes."""

import torch


def numeric_settings() -> tuple[str, ...]:
    """`name=value` of each; equal settings give equal texts.

    A thread of another autocast mode or default dtype computes otherwise than its process says, so
    ask on the thread that computes.
    """
    settings: dict[str, object] = {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "default_dtype": torch.get_default_dtype(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast_cpu": torch.is_autocast_enabled("cpu"),
        "onednn": torch.backends.mkldnn.enabled,
    }
    if torch.cuda.is_available():
        settings |= {
            "device": torch.cuda.get_device_name().replace(" ", "-"),
            "autocast_cuda": torch.is_autocast_enabled("cuda"),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "fp16_reduction": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            "bf16_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
        }
    return tuple(f"{name}={value}" for name, value in settings.items())
