"""A checkpoint family is a TOML file: a recipe, and where its weights stand in the files.

Those that come with the package lie in `assets/recipes`; a user's own has the same form.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any, Self, TypeVar

from scope_contracts.errors import UserInputError, mismatch
from scope_rt.config_values import read_toml, unknown_name
from scope_rt.models.project_config import (
    ENTRIES,
    adapter_entries,
    read_project_config,
    recipe_entries,
)
from scope_rt.models.recipe import RECIPE_NAME, Recipe

SUFFIX = ".toml"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPlace:
    """Where the generator stands in a project's own file."""

    state_dicts: tuple[str, ...] = ("",)
    """The key in a .pt that has several, or the keys of several that the project publishes, each in
    a file of its own; "" where the file is the state dict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPlace:
    """A LoRA that is merged at load, and what its file does not say."""

    state_dict: str
    rank: int | None = None
    """Of a file that `alpha` fits; None for whatever rank its factors have."""
    alpha: float
    all_blocks: bool = True
    """Whether a layer that it changes in one block is changed in every block; a file that lacks
    some is then half a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectConfig:
    """The project's own configuration, whose values come before those of the recipe."""

    files: tuple[str, ...]
    """Relative to the model's folder, merged in order; those that are not there are left out."""
    takes: tuple[str, ...]
    """Entries that count; the project's code reads them, and no others of those that we know.
    Where there are none, the last file still tells whose folder it is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of checkpoints."""

    name: str
    recipe: Recipe
    weights: WeightsPlace = WeightsPlace()
    lora: LoraPlace | None = None
    project: ProjectConfig | None = None
    sources: tuple[Path, ...] = ()
    """Files of the model's folder that gave values."""

    @property
    def is_chosen(self) -> bool:
        """Whether it is no part of the model's folder."""
        return self.name != RECIPE_NAME

    def is_in(self, names: Collection[str]) -> bool:
        """Whether one of `names` is of its project, or nothing can be told of that."""
        if not names or self.name not in family_names():
            return True
        return _project(self.name) in map(_project, names)

    @classmethod
    def named(cls, name: str) -> Self:
        """One of the package's own, or the TOML file that `name` is the path of.

        Raises:
            UserInputError: there is none, or its file cannot be used.
        """
        if name in family_names():
            return cls.read(_folder() / f"{name}{SUFFIX}", name=name)
        if not name.endswith(SUFFIX):
            hint = unknown_name(name, family_names(), "recipe")
            raise UserInputError(f"--recipe: no {SUFFIX} file, and {hint}")
        return cls.read(Path(name), name=name)

    @classmethod
    def read(cls, path: Path, *, name: str) -> Self:
        """The family that a TOML file states.

        Raises:
            UserInputError: it cannot be read, or lacks or misstates an entry.
        """
        tables = read_toml(path)
        known = {"recipe", *_TABLES}
        for table, entries in tables.items():
            if table not in known:
                raise UserInputError(f"{path}: {unknown_name(table, known, 'table')}")
            if not isinstance(entries, dict):
                raise UserInputError(
                    f"{path}: {table} is a table; write [{table}] above its entries"
                )
        if "recipe" not in tables:
            raise UserInputError(f"{path} has no table recipe; add [recipe] with its entries")
        others: dict[str, Any] = {
            table: _table(kind, tables[table], where=f"{path}: [{table}]")
            for table, kind in _TABLES.items()
            if table in tables
        }
        for entry in others["project"].takes if "project" in others else ():
            if entry not in ENTRIES:
                raise UserInputError(
                    f"{path}: [project] takes: {unknown_name(entry, ENTRIES, 'entry')}"
                )
        recipe = Recipe.of_entries(tables["recipe"], where=f"{path}: [recipe]")
        return cls(name=name, recipe=recipe, **others)

    def to_toml(self) -> str:
        """The text that `read` takes, without the project's configuration: its values are in it."""
        tables: dict[str, Any] = {"recipe": self.recipe, "weights": self.weights, "lora": self.lora}
        lines = [
            line
            for table, entries in tables.items()
            if entries is not None
            for line in [f"[{table}]", *_lines(asdict(entries))]
        ]
        return "\n".join(lines) + "\n"

    def in_folder(self, folder: Path) -> Self:
        """With what the project's own configuration in `folder` says.

        Raises:
            UserInputError: it cannot be read, or no stream could follow it.
        """
        if self.project is None or not self.project.takes:
            return self
        given = read_project_config(folder / file for file in self.project.files)
        return self.with_project(given)

    def uncounted(self, folder: Path) -> list[Path]:
        """Files of the project's own configuration in `folder` that gave no value."""
        paths = [folder / file for file in self.project.files] if self.project else []
        return [path for path in paths if path.is_file() and path not in self.sources]

    def with_project(self, given: Mapping[str, tuple[Path, Any]]) -> Self:
        """With the entries of a project's configuration, each with the file it is from."""
        assert self.project is not None, "asked for by who knows the project"
        entries = recipe_entries(given, self.project.takes)
        recipe, lora = self.recipe.with_entries(entries), self.lora
        if lora is not None and "adapter" in self.project.takes:
            lora = replace(lora, **adapter_entries(given))
        taken = {given[name][0] for name in self.project.takes if name in given}
        return replace(self, recipe=recipe, lora=lora, sources=tuple(sorted(taken)))


@cache
def family_names() -> tuple[str, ...]:
    """Those that come with the package."""
    return tuple(sorted(path.stem for path in _folder().glob(f"*{SUFFIX}")))


def _project(name: str) -> str:
    """The shortest name that begins as that of its variant (longlive-infinity-1.3b)."""
    names = sorted(family_names(), key=len)
    return next(each for each in names if name.startswith(f"{each.rpartition('-')[0]}-"))


def _folder() -> Path:
    return Path(str(files("scope_rt") / "assets" / "recipes"))


def _lines(entries: Mapping[str, Any]) -> Iterator[str]:
    """Of a table; JSON's values are TOML's too, but for null, which is a missing entry."""
    for name, value in entries.items():
        if value is not None:
            yield f"{name} = {json.dumps(value)}"


_TABLES: Mapping[str, type] = {"weights": WeightsPlace, "lora": LoraPlace, "project": ProjectConfig}


def _table(kind: type[T], entries: Mapping[str, Any], *, where: str) -> T:
    """Entries as the fields of `kind`, each of its type."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for name in entries:
        if name not in known:
            raise UserInputError(f"{where} {unknown_name(name, known, 'entry')}")
    values = {}
    for name, value in entries.items():
        wanted, fits = _FORMS[known[name].type]
        if not fits(value):
            raise UserInputError(mismatch(f"{where} {name}", got=value, want=wanted))
        values[name] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**values)
    except TypeError as error:
        raise UserInputError(f"{where}: {error}; add what is missing") from error


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is str for each in value)


_FORMS: Mapping[Any, tuple[str, Any]] = {
    str: ("a text", lambda value: type(value) is str),
    int | None: ("a whole number from 1", lambda value: type(value) is int and value > 0),
    bool: ("true or false", lambda value: type(value) is bool),
    float: ("a number above 0", lambda value: type(value) in (int, float) and 0 < value < inf),
    tuple[str, ...]: ("a list of texts", _are_texts),
}
