"""A file that is one state dict, in either format that weights are kept in."""

from collections.abc import Mapping
from pathlib import Path

from scope_rt.tensor_files.fitting import TensorInFile
from scope_rt.tensor_files.safetensors_file import tensors_of
from scope_rt.tensor_files.torch_file import TorchFile

SAFETENSORS, TORCH = ".safetensors", (".pt", ".pth", ".ckpt", ".bin")
"""Ends of their names."""


def state_dict_of(path: Path) -> Mapping[str, TensorInFile]:
    """Its tensors by their names there; only headers are read. Raises UserInputError."""
    if path.suffix == SAFETENSORS:
        return {tensor.name: tensor for tensor in tensors_of(path)}
    return TorchFile.open(path).tensors()
