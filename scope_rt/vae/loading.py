"""Codecs from the files that people have: Wan's VAE as diffusers' folder or as the original
Wan2.1_VAE.pth, and TAEHV's file for the same latents."""

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from scope_contracts.errors import UserInputError, mismatch
from scope_rt.optional_packages import need
from scope_rt.part_place import HERE, PartPlace
from scope_rt.tensor_files.fitting import TensorInFile, fill
from scope_rt.tensor_files.folder import tensors_of_folder
from scope_rt.tensor_files.state_dict import SAFETENSORS, TORCH, state_dict_of
from scope_rt.vae.codec import CodecSizes
from scope_rt.vae.small import SmallAutoencoder, SmallVideoCodec
from scope_rt.vae.small_layers import layers_of
from scope_rt.vae.wan import WanVideoCodec
from scope_rt.vae.wan_config import WanVaeConfig
from scope_rt.vae.wan_names import diffusers_name

CLASS_NAME, SMALL_CLASS_NAME = "AutoencoderKLWan", "TAEHV"
ORIGINAL_CHANNELS = 16
"""Of the latents of Wan 2.1, whose mean and std no file states."""
_STEM = "diffusion_pytorch_model"


def wan_codec_sizes(folder: Path) -> CodecSizes:
    """Sizes of the VAE in diffusers' folder, from its `config.json` alone, or of Wan's original
    file, from its headers. Raises UserInputError."""
    if folder.is_file():
        zeros = (0.0,) * ORIGINAL_CHANNELS  # mean and std have no part in sizes
        tensors = state_dict_of(folder)
        return WanVaeConfig.of_original(
            folder, tensors, latents_mean=zeros, latents_std=zeros
        ).sizes
    return WanVaeConfig.read(folder / "config.json").sizes


def check_wan_codec(folder: Path) -> None:
    """Refuse diffusers' folder by its configuration and the headers of its weights; of a file, its
    sizes tell all that its headers do.

    Raises:
        UserInputError: a file cannot be used; names the tensor.
    """
    need("diffusers", purpose="Wan's VAE")
    if folder.is_dir():
        _read_folder(folder)


def load_wan_codec(path: Path, place: PartPlace = HERE) -> WanVideoCodec:
    """Load diffusers' folder (`vae/`) or Wan's original file.

    Raises:
        UserInputError: diffusers is not installed, or a file cannot be used; it names the tensor.
    """
    config, tensors = _read_folder(path) if path.is_dir() else _read_original(path)
    with torch.device("meta"):
        vae = _autoencoder_class()(**constructor_arguments(config))
    fill(vae, tensors, where=f"{path}: the weights are not Wan's VAE", place=place)
    return WanVideoCodec(vae, config)


def small_codec_sizes(folder: Path) -> CodecSizes:
    """Sizes of TAEHV, whatever the folder."""
    return SmallVideoCodec.sizes


def check_small_codec(path: Path) -> None:
    """Refuse what `load_small_codec` would, by headers alone."""
    _small_layers(path)


def load_small_codec(path: Path, place: PartPlace = HERE) -> SmallVideoCodec:
    """Load TAEHV's file for Wan 2.1 (`taew2_1`, .pth or .safetensors), or the folder where it is
    the only one.

    Raises:
        UserInputError: the file cannot be used; names the tensor.
    """
    model, tensors = _small_layers(path)
    fill(model, tensors, where=f"{path}: the weights are not TAEHV's", place=place)
    return SmallVideoCodec(model)


def _small_layers(path: Path) -> tuple[SmallAutoencoder, Mapping[str, TensorInFile]]:
    """Its layers on the meta device, and the tensors that fit them."""
    if path.is_dir():
        files = [each for each in sorted(path.iterdir()) if each.suffix in (SAFETENSORS, *TORCH)]
        if len(files) != 1:
            names = ", ".join(each.name for each in files) or "none"
            want = "taew2_1.pth or taew2_1.safetensors alone"
            raise UserInputError(mismatch(f"{path}: files of weights", got=names, want=want))
        (path,) = files
    tensors = state_dict_of(path)
    with torch.device("meta"):
        return layers_of(path, tensors), tensors


def _read_folder(folder: Path) -> tuple[WanVaeConfig, Mapping[str, TensorInFile]]:
    config = WanVaeConfig.read(folder / "config.json")
    tensors = tensors_of_folder(folder, _STEM)
    for name, size, entry in (
        ("post_quant_conv.weight", config.z_dim, "z_dim"),
        ("encoder.conv_in.weight", config.base_dim, "base_dim"),
    ):
        if name in tensors and tensors[name].shape[:1] != (size,):
            want = f"{list(tensors[name].shape[:1])}, the width of {name} in {tensors[name].path}"
            fix = "copy the folder again, with both from one model"
            raise UserInputError(
                mismatch(f"{folder / 'config.json'}: {entry}", got=size, want=want, fix=fix)
            )
    return config, tensors


def _read_original(path: Path) -> tuple[WanVaeConfig, Mapping[str, TensorInFile]]:
    stored = state_dict_of(path)
    # No file of the original states them; diffusers holds them as defaults.
    defaults = inspect.signature(_autoencoder_class().__init__).parameters
    config = WanVaeConfig.of_original(
        path,
        stored,
        latents_mean=tuple(defaults["latents_mean"].default),
        latents_std=tuple(defaults["latents_std"].default),
    )
    blocks = config.num_res_blocks
    renamed = {diffusers_name(name, num_res_blocks=blocks): each for name, each in stored.items()}
    return config, renamed


def constructor_arguments(config: WanVaeConfig) -> dict[str, object]:
    """What diffusers' class is made with; it wants lists."""
    entries = asdict(config)
    return {name: list(got) if isinstance(got, tuple) else got for name, got in entries.items()}


def _autoencoder_class() -> Any:
    need("diffusers", purpose="Wan's VAE")
    from diffusers import AutoencoderKLWan  # takes seconds, and few ranks decode

    return AutoencoderKLWan
