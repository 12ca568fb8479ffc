"""Where the parts of a model lie: in a folder of parts, or in what a project's instructions leave.

A folder of parts has `transformer/`, `vae/` and `text_encoder/`. In any other, parts are told by
their tensors (`recognition`), and the family says which of several transformers is streamed.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from scope_contracts.errors import UserInputError
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.family import Family
from scope_rt.models.file_contents import model_files
from scope_rt.models.folder_level import (
    check_level,
    check_not_several,
    check_own,
    folder_around,
    holds_model,
)
from scope_rt.models.found_parts import FoundPart
from scope_rt.models.recipe import RECIPE_NAME, Recipe
from scope_rt.models.recognition import recognised
from scope_rt.models.taken_parts import (
    check_no_lora,
    config_of,
    first_file,
    lora_of,
    transformer_of,
)
from scope_rt.models.told_family import (
    check_folder_agrees,
    family_of_class,
    told_by_config,
    told_by_parts,
    told_family,
)
from scope_rt.models.weight_files import WeightFiles
from scope_rt.tensor_files.listing import listing_of

_PARTS = ("transformer", "vae", "text_encoder", "tokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A model's parts, found and told apart; nothing but headers and JSON has been read."""

    root: Path
    """The folder in which all of them lie."""
    family: Family
    config: CausalWanConfig
    weights: WeightFiles
    state_dict: str
    """The key under which the weights stand in their file; "" where the file is the state dict."""
    lora: FoundPart | None
    """That is merged into the weights."""
    config_path: Path
    """Of the transformer's sizes."""
    vae: Path
    """A folder with a `config.json`, or Wan's own file."""
    text_encoder: Path
    """The same."""
    places: tuple[Path, ...]
    """Files, and folders with all that is in them, that what is computed follows from."""
    looks_like: tuple[str, ...] = ()
    """Families whose projects publish such files, where the family that was asked for is of
    another project."""

    @classmethod
    def of(cls, folder: Path, recipe: str | None) -> Self:
        """Find the parts in `folder`, or around the file that has the transformer.

        Args:
            recipe: the name of a family or its TOML file; where None, files tell it.

        Raises:
            UserInputError: a part is missing or unknown, files tell no family, several, or
                another one than `recipe`, or the model lies in another folder.
        """
        if folder.is_file():
            root = folder_around(folder)
            return cls._of_project(root, recipe, folder.relative_to(root).as_posix())
        if (folder / "transformer").is_dir() or (folder / RECIPE_NAME).exists():
            return cls._of_parts(folder, recipe)
        check_not_several(folder)
        try:
            layout = cls._of_project(folder, recipe)
        except UserInputError:
            check_level(folder)
            raise
        check_own(folder, layout.places)
        inner = Path(os.path.commonpath(layout.places))
        if inner != folder and holds_model(inner):  # and may have its project's configuration
            raise UserInputError(f"the model in {folder} lies in {inner}: give that folder")
        return layout

    @classmethod
    def _of_parts(cls, folder: Path, recipe: str | None) -> Self:
        transformer, own = folder / "transformer", folder / RECIPE_NAME
        check_no_lora(folder)
        config = CausalWanConfig.from_folder(transformer)
        weights = WeightFiles.open(transformer)
        if recipe is not None:
            family = Family.named(recipe).in_folder(folder)
            if family.lora is not None:
                raise UserInputError(
                    f"{folder}: recipe {recipe} merges a LoRA, and none can be told in a folder of "
                    "parts; give the project's own files, or a .toml file without [lora] for "
                    "weights that have it in them"
                )
            check_folder_agrees(family, told_by_parts(folder))
        elif own.exists():
            family = Family(name=RECIPE_NAME, recipe=Recipe.from_folder(folder))
        else:
            family = family_of_class(folder, transformer / "config.json")
        # Whoever has a recipe of his own may have parts of his own, and these files of any name.
        parts = [folder] if own.exists() else [folder / part for part in _PARTS]
        return cls(
            root=folder,
            family=family,
            config=config,
            weights=weights,
            state_dict="",
            lora=None,
            config_path=transformer / "config.json",
            vae=folder / "vae",
            text_encoder=folder / "text_encoder",
            places=tuple(part for part in parts if part.is_dir()),
        )

    @classmethod
    def _of_project(cls, folder: Path, recipe: str | None, only: str | None = None) -> Self:
        listing = listing_of(folder)
        found = recognised(listing, only)
        if recipe is None:
            if found.problems and (listing.unreadable or not found.transformers):
                raise UserInputError(found.problems[0])
            family = told_family(folder, found)
        else:
            family = Family.named(recipe)
        family = family.in_folder(folder)
        transformer, lora = transformer_of(folder, found, family), lora_of(folder, found, family)
        if only is None:  # else the configuration may be of another file
            check_folder_agrees(family, told_by_config(folder), transformers=found.transformers)
        if found.problems:
            raise UserInputError(found.problems[0])
        config_path, config = config_of(listing.root, listing.configs, transformer)
        tokenizer = folder / found.tokenizers[0]
        text_encoder = folder / first_file(found.text_encoders)
        return cls(
            root=folder,
            family=family,
            config=config,
            weights=WeightFiles.of_state_dict(
                [folder / file for file in transformer.files], transformer.key
            ),
            state_dict=transformer.key,
            lora=lora,
            config_path=config_path,
            vae=folder / first_file(found.vaes),
            text_encoder=text_encoder,
            places=(
                *(folder / file for file in transformer.files),
                *(folder / file for file in (lora.files if lora is not None else ())),
                config_path,
                folder / first_file(found.vaes),
                text_encoder,
                tokenizer,
                *family.sources,
            ),
            looks_like=() if family.is_in(found.families) else found.families,
        )

    def with_recipe(self, fingerprint: str) -> str:
        """The fingerprint of the files and of a recipe that is none of them."""
        if not self.family.is_chosen:
            return fingerprint
        return hashlib.sha256(f"{fingerprint} {self.recipe_digest}".encode()).hexdigest()

    @property
    def recipe_digest(self) -> str:
        """SHA-256 over what the family says, wherever that stands."""
        family = self.family
        values = [
            family.lora and asdict(family.lora),
            asdict(family.recipe),
            self.state_dict,
        ]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def weights_by_file(self) -> dict[str, dict[str, str]]:
        """The diffusers name of each weight, by its file and by what it is known by there."""
        key = f"{self.state_dict}/" if self.state_dict else ""
        return {
            path.relative_to(self.root).as_posix(): {
                f"{key}{each.name}": name for name, each in tensors
            }
            for path, tensors in self.weights.by_file()
        }

    def files(self) -> Iterator[Path]:
        """All files that what is computed follows from."""
        for place in self.places:
            yield from [place] if place.is_file() else model_files(place)
