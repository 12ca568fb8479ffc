"""Which loader reads a codec or a text encoder: the one registered for its class.

`vae/config.json` and `text_encoder/config.json` name a class. A process knows those of the embedded
model and of Wan; others are registered before a session is made, on every rank, because every rank
reads the sizes of parts that only some of them load.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from scope_contracts.errors import UserInputError, mismatch
from scope_rt.part_place import HERE, PartPlace
from scope_rt.tensor_files.config_file import read_config
from scope_rt.text.encoder import TextEncoder, TextSizes
from scope_rt.text.loading import CLASS_NAME as UMT5
from scope_rt.text.loading import check_umt5, load_umt5, umt5_text_sizes
from scope_rt.text.words import WordTextEncoder
from scope_rt.vae.codec import CodecSizes, VideoCodec
from scope_rt.vae.loading import CLASS_NAME as WAN_VAE
from scope_rt.vae.loading import SMALL_CLASS_NAME as TAEHV
from scope_rt.vae.loading import (
    check_small_codec,
    check_wan_codec,
    load_small_codec,
    load_wan_codec,
    small_codec_sizes,
    wan_codec_sizes,
)
from scope_rt.vae.tiny import TinyVideoCodec

P = TypeVar("P")
S = TypeVar("S", bound=CodecSizes | TextSizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader(Generic[P, S]):
    """How one class is loaded from its folder, and its sizes without loading it."""

    load: Callable[[Path, PartPlace], P]
    sizes: Callable[[Path], S]
    check: Callable[[Path], object] | None
    """Refuses, by headers alone, what `load` would; None for a part that is as small as they."""


class Registry(Generic[P, S]):
    """The loaders of one kind of part; a name is given once and for all."""

    def __init__(self, part: str, sizes: type[S], *, of_file: str = "") -> None:
        """`of_file` is the class of a part that is a file, which names none."""
        self._part, self._sizes, self._of_file = part, sizes, of_file
        self._loaders: dict[str, Loader[P, S]] = {}

    def register(
        self,
        name: str,
        load: Callable[[Path, PartPlace], P],
        sizes: Callable[[Path], S] | None = None,
        *,
        check: Callable[[Path], object] | None,
    ) -> None:
        """Let `load` read folders whose class is `name`; `check` is as `Loader` says.

        Raises:
            UserInputError: the name is taken.
        """
        if name in self._loaders:
            raise UserInputError(
                f"{self._part} {name!r} is registered already; choose another _class_name"
            )
        sizes = sizes or self._sizes_in_config
        self._loaders[name] = Loader(load=load, sizes=sizes, check=check)

    def load(self, folder: Path, place: PartPlace) -> P:
        """The part of a model that lies in `folder`, or is that file of Wan's own, to compute at
        `place`.

        Raises:
            UserInputError: no loader is registered for it, it cannot be loaded, or what was loaded
                has other sizes than every rank was told.
        """
        loader = self._loader(folder)
        sizes, loaded = loader.sizes(folder), loader.load(folder, place)
        for field in fields(sizes):
            got, want = getattr(loaded, field.name, "nothing"), getattr(sizes, field.name)
            if got != want:
                fix = f"let the {self._part} and its config.json say the same"
                raise UserInputError(
                    mismatch(f"{folder}: {field.name}", got=got, want=want, fix=fix)
                )
        return loaded

    def is_small(self, folder: Path) -> bool:
        """Whether it may be loaded by who only starts ranks; raises as `load` does."""
        return self._loader(folder).check is None

    def check(self, folder: Path) -> None:
        """Refuse, without reading weights, what `load` would; a part that is small is loaded.

        Raises:
            UserInputError: as `load`.
        """
        check = self._loader(folder).check
        if check is None:
            self.load(folder, HERE)
        else:
            self.sizes(folder)
            check(folder)

    def sizes(self, folder: Path) -> S:
        """Its sizes, from its configuration alone; raises as `load` does."""
        return self._loader(folder).sizes(folder)

    def class_of(self, folder: Path) -> str:
        """The class that `folder` names, or that of a file; raises as `load` does."""
        if folder.is_file():
            return self._of_file
        path, raw = _config(folder)
        if (name := _class_name(raw)) is None:
            raise UserInputError(
                f"{path} has no _class_name; add one under which a {self._part} is registered: "
                f"{', '.join(self._loaders)}, or one of your own"
            )
        if name not in self._loaders:
            raise UserInputError(
                f"{path}: no loader for class {name!r}, only for {', '.join(self._loaders)}; "
                f"register it with register_{self._part.replace(' ', '_')}, for a command in a "
                "module that you name with --parts"
            )
        return str(name)

    def _loader(self, folder: Path) -> Loader[P, S]:
        return self._loaders[self.class_of(folder)]

    def _sizes_in_config(self, folder: Path) -> S:
        """Sizes that stand in `config.json` under their own names."""
        path, raw = _config(folder)
        names = [field.name for field in fields(self._sizes)]
        for name in names:
            least = 0 if name == "decoder_context_frames" else 1
            if type(raw.get(name)) is not int or raw[name] < least:
                fix = "add it, or register the loader with a function for its sizes"
                want = f"a whole number, at least {least}"
                raise UserInputError(
                    mismatch(f"{path}: {name}", got=raw.get(name), want=want, fix=fix)
                )
        return self._sizes(**{name: raw[name] for name in names})


def _config(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / "config.json"
    return path, read_config(path, fix="point to a model folder")


def _class_name(raw: Mapping[str, Any]) -> object:
    """Diffusers and this package name a class; transformers lists one."""
    match raw:
        case {"_class_name": name}:
            return name
        case {"architectures": [name]}:
            return name
    return None


CODECS = Registry[VideoCodec, CodecSizes]("codec", CodecSizes, of_file=WAN_VAE)
TEXT_ENCODERS = Registry[TextEncoder, TextSizes]("text encoder", TextSizes, of_file=UMT5)
CODECS.register(
    TinyVideoCodec.__name__,
    lambda folder, place: TinyVideoCodec.from_pretrained(folder),
    TinyVideoCodec.sizes,
    check=None,
)
CODECS.register(WAN_VAE, load_wan_codec, wan_codec_sizes, check=check_wan_codec)
CODECS.register(TAEHV, load_small_codec, small_codec_sizes, check=check_small_codec)
TEXT_ENCODERS.register(
    WordTextEncoder.__name__,
    lambda folder, place: WordTextEncoder.from_pretrained(folder),
    check=None,
)
TEXT_ENCODERS.register(
    UMT5,
    lambda folder, place: load_umt5(folder, place=place),
    umt5_text_sizes,
    check=check_umt5,
)


def _by_sizes_alone(folder: Path) -> None:
    """A part of a user's own may be of any size: who only starts ranks does not load it."""


def register_codec(
    name: str,
    load: Callable[[Path], VideoCodec],
    sizes: Callable[[Path], CodecSizes] | None = None,
) -> None:
    """Let model folders hold a codec of your own. Call it on every rank, before any session.

    Args:
        name: what `vae/config.json` gives as its `_class_name`.
        load: called with the path of `vae/`, on ranks that decode. Where it computes is its own
            affair. It raises `UserInputError` for
            files that it cannot use.
        sizes: called with the same path, on every rank; it must not load weights. Where not given,
            `vae/config.json` holds each field of `CodecSizes` under its name.

    Raises:
        UserInputError: the name is taken.
    """
    CODECS.register(name, lambda folder, place: load(folder), sizes, check=_by_sizes_alone)


def register_text_encoder(
    name: str,
    load: Callable[[Path], TextEncoder],
    sizes: Callable[[Path], TextSizes] | None = None,
) -> None:
    """Let model folders hold a text encoder of your own. Call it on every rank, before any session.

    Args:
        name: what `text_encoder/config.json` gives as its `_class_name`.
        load: called with the path of `text_encoder/`, on rank0. Where it computes is its own
            affair. It raises `UserInputError` for
            files that it cannot use.
        sizes: called with the same path, on every rank; it must not load weights. Where not given,
            `text_encoder/config.json` holds `text_len` and `text_dim`.

    Raises:
        UserInputError: the name is taken.
    """
    TEXT_ENCODERS.register(name, lambda folder, place: load(folder), sizes, check=_by_sizes_alone)
