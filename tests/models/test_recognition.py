"""What a folder is follows from names, shapes and dtypes; what is missing is said."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scope_rt.models.found_parts import Kind, Naming
from scope_rt.models.original_names import unwrapped
from scope_rt.models.recognition import Recognised, recognised
from scope_rt.tensor_files.listing import Listing, StateForm, TensorForm, listing_of
from tests.real_checkpoints import CHECKPOINTS, FASTVIDEO, SELF_FORCING

BLOCK = "blocks.0.self_attn.q.weight"
WAN_FOLDER = "wan_models/Wan2.1-T2V-1.3B"
TOKENIZER = f"{WAN_FOLDER}/google/umt5-xxl/tokenizer.json"
FAMILY_OF_FOLDER = {
    "self-forcing": ("self-forcing-1.3b",),
    "longlive": ("longlive-1.3b",),
    "krea-14b": ("krea-14b",),
    "fastvideo-diffusers": ("fastvideo-1.3b",),
}


def state(file: str, key: str, shapes: dict[str, tuple[int, ...]]) -> StateForm:
    """A state dict of float32 tensors."""
    forms = {n: TensorForm(shape=shape, dtype=torch.float32) for n, shape in shapes.items()}
    return StateForm(file=file, key=key, tensors=forms)


def transformer(
    file: str, key: str = "", *, prefix: str = "model.", channels: int = 16, text: int = 64
) -> StateForm:
    shapes = {
        "patch_embedding.weight": (96, channels, 1, 2, 2),
        "text_embedding.0.weight": (96, text),
        "blocks.0.self_attn.q.weight": (96, 96),
        "blocks.1.self_attn.q.weight": (96, 96),
    }
    return state(file, key, {prefix + name: shape for name, shape in shapes.items()})


def lora(file: str, key: str = "generator_lora") -> StateForm:
    return state(file, key, {"base_model.model.blocks.0.self_attn.q.lora_A.weight": (8, 96)})


BASE = transformer(f"{WAN_FOLDER}/diffusion_pytorch_model.safetensors", prefix="")
VAE = state(
    f"{WAN_FOLDER}/Wan2.1_VAE.pth",
    "",
    {"conv2.weight": (16, 16, 1, 1, 1), "decoder.conv1.weight": (16, 16, 3, 3, 3)},
)
TEXT = state(
    f"{WAN_FOLDER}/models_t5_umt5-xxl-enc-bf16.pth",
    "",
    {"token_embedding.weight": (576, 64), "blocks.0.pos_embedding.embedding.weight": (32, 4)},
)


def among(*states: StateForm, others: tuple[str, ...] = (TOKENIZER,)) -> Recognised:
    """What a folder of these files is."""
    names = sorted({*(each.file for each in states), *others})
    found = Listing(root=Path("M"), names=tuple(names), states=states, configs={}, unreadable={})
    return recognised(found)


@pytest.mark.parametrize(
    ("states", "families"),
    [
        ([transformer("a.pt", "generator_ema")], ("self-forcing-1.3b",)),
        ([transformer("a.pt", "generator"), lora("lora.pt")], ("longlive-1.3b",)),
        (
            [transformer("a.pt", "generator_ema", prefix="model._fsdp_wrapped_module.")],
            ("causal-forcing-1.3b",),
        ),
        (
            [transformer("a.pt", "generator")],
            ("causal-forcing-1.3b", "causal-forcing-chunk-1.3b", "causvid-1.3b"),
        ),
        ([transformer("a.safetensors")], ("krea-14b",)),
        ([transformer("a.pt", "model", prefix="net.")], ()),
        (
            [transformer("a.pt", "generator"), transformer("a.pt", "generator_ema")],
            (
                "causal-forcing-1.3b",
                "causal-forcing-chunk-1.3b",
                "causvid-1.3b",
                "self-forcing-1.3b",
            ),
        ),
    ],
)
def test_families_are_those_whose_projects_publish_such_a_file(
    states: list[StateForm], families: tuple[str, ...]
) -> None:
    found = among(*states, BASE, VAE, TEXT)
    assert found.families == families
    assert found.problems == ()
    assert BASE.file not in {part.files[0] for part in found.transformers}


def test_a_part_is_told_with_its_sizes() -> None:
    (part,) = among(transformer("a.pt", "generator_ema")).transformers
    assert (part.kind, part.naming, str(part)) == (
        Kind.TRANSFORMER,
        Naming.ORIGINAL,
        "a.pt: generator_ema",
    )
    assert (part.width, part.num_blocks) == (96, 2)
    assert (part.latent_channels, part.text_width) == (16, 64)
    assert part.dtypes == {torch.float32}


def test_a_critic_is_no_model_and_no_lora() -> None:
    ema, critic = transformer("a.pt", "generator_ema"), transformer("a.pt", "critic")
    found = among(ema, critic, lora("lora.pt", "critic_lora"), VAE, TEXT)
    assert [part.key for part in found.transformers] == ["generator_ema"]
    assert found.loras == ()


@pytest.mark.parametrize(
    ("states", "others", "problem"),
    [
        (
            [TEXT, transformer("a.pt", "generator")],
            (TOKENIZER,),
            "M: no VAE; add vae/ as diffusers",
        ),
        ([VAE, transformer("a.pt", "generator")], (TOKENIZER,), "M: no text encoder; add text_enc"),
        (
            [VAE, TEXT, transformer("a.pt", "generator")],
            (),
            "M: no tokenizer; add umT5's tokenizer",
        ),
        (
            [VAE, TEXT, BASE],
            (TOKENIZER,),
            f"M: no causal transformer, only Wan's own in {BASE.file}; add the file of the project",
        ),
        (
            [VAE, TEXT, transformer("a.pt", "state_dict")],
            (TOKENIZER,),
            "M: no transformer (there is 'state_dict' in a.pt); add transformer/ as diffusers "
            "writes it, or a project's own file, which has it under one of 'generator_ema', 'gene",
        ),
        (
            [VAE, TEXT, transformer("a.pt", "generator", text=4096)],
            (TOKENIZER,),
            f"{TEXT.file}: this text encoder is 64 wide by its token_embedding.weight, and a.pt: ",
        ),
        (
            [VAE, TEXT, transformer("a.pt", "generator", channels=36)],
            (TOKENIZER,),
            f"{VAE.file}: this VAE is 16 wide by its conv2.weight, and a.pt: generator takes 36;",
        ),
    ],
)
def test_what_is_missing_or_does_not_fit_is_one_sentence(
    states: list[StateForm], others: tuple[str, ...], problem: str
) -> None:
    (said,) = among(*states, others=others).problems
    assert said.startswith(problem)


@pytest.mark.parametrize(
    "folder",
    sorted(path for path in CHECKPOINTS.iterdir() if path.name in FAMILY_OF_FOLDER),
    ids=lambda folder: folder.name,
)
def test_the_checkpoints_are_recognised(folder: Path) -> None:
    found = recognised(listing_of(folder))
    assert {part.width for part in found.vaes} == {16}
    assert {part.width for part in found.text_encoders} == {64}
    assert [Path(name).name for name in found.tokenizers] == ["tokenizer.json"]
    if found.transformers:
        assert found.families == FAMILY_OF_FOLDER[folder.name]
        assert found.problems == ()
    else:
        assert [problem.partition(";")[0] for problem in found.problems] == [
            f"{folder}: no transformer"
        ]


def test_shards_are_one_part() -> None:
    (text,) = recognised(listing_of(FASTVIDEO)).text_encoders
    assert [Path(name).name[:11] for name in text.files] == ["model-00001", "model-00002"]
    assert (text.naming, text.num_blocks) == (Naming.DIFFUSERS, 2)


def write_int32(folder: Path) -> None:
    weights = {"post_quant_conv.weight": torch.ones(16, 16, 1, 1, 1, dtype=torch.int32)}
    weights["decoder.conv_in.weight"] = torch.ones(1)
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (write_int32, "diffusion_pytorch_model.safetensors: post_quant_conv.weight is torch.int32"),
        (lambda folder: (folder / "a.pt").write_bytes(b"PK"), "a.pt is cut off, or holds code"),
        (
            lambda folder: (folder / "b.safetensors").write_bytes(b"PK"),
            "cannot read .*b.safetensors: .*; copy",
        ),
        (lambda folder: (folder / "config.json").write_text("["), "cannot read .*config.json"),
        (lambda folder: torch.save({"generator": {"a": 1}}, folder / "c.pt"), "c.pt: 'a' is int"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_problem_and_the_rest_is_told(
    tmp_path: Path, spoil: Callable[[Path], object], problem: str
) -> None:
    folder = shutil.copytree(SELF_FORCING / "wan_models", tmp_path / "wan_models")
    spoil(folder)
    found = recognised(listing_of(folder))
    assert any(re.search(problem, each) for each in found.problems), found.problems
    assert found.text_encoders


def test_one_file_is_told_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    weights = {name: torch.ones(form.shape) for name, form in transformer("").tensors.items()}
    torch.save({"generator_ema": weights, "optimizer": {"state": {0: 1}}}, path)
    found = recognised(listing_of(path))
    assert found.families == ("self-forcing-1.3b",)
    assert len(found.problems) == 3


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "model.",
        "generator.model.",
        "model._fsdp_wrapped_module.",
        "_orig_mod.",
        "net.",
        "transformer.",
        "model.diffusion_model.",
        "module.model._orig_mod.",
    ],
)
def test_a_name_is_the_same_whatever_the_model_was_wrapped_in(prefix: str) -> None:
    assert unwrapped(prefix + BLOCK) == BLOCK
    inside = BLOCK.replace("self_attn", "_fsdp_wrapped_module.self_attn._checkpoint_wrapped_module")
    assert unwrapped(prefix + inside) == BLOCK
