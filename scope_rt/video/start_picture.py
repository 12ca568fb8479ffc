"""A picture file becomes a picture of the stream's size, or is refused in one sentence.

It is turned as its EXIF orientation says, laid on black where it is transparent, cut to the
stream's aspect around its centre, and scaled by Lanczos' filter.
"""

import hashlib
import stat
import warnings
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from scope_contracts.errors import UserInputError
from scope_rt.video.jpeg_scans import lacks_data
from scope_rt.video.png_rows import lacks_rows

_LEAST_SIDE = 16
_MOST_PIXELS = 64 * 2**20
_MOST_BYTES = 64 * 2**20
_BITS_16 = frozenset({"I;16", "I;16B", "I;16L", "I;16N"})
_UNREAD = frozenset({"EPS"})
"""Formats of which Pillow has another program draw the picture."""
_SEVERAL_OF_ONE = frozenset({"MPO"})
"""Formats of cameras, in which the first picture is the one that is meant."""
_JPEG = frozenset({"JPEG", *_SEVERAL_OF_ONE})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartPicture:
    """`rgb_HWC` is of the stream's size, `sha256` of the file's bytes."""

    path: Path
    sha256: str
    rgb_HWC: NDArray[np.uint8]


def read_start_picture(path: Path, *, height: int, width: int) -> StartPicture:
    """The picture in `path`, `height` x `width` pixels; reads the file once.

    Raises:
        UserInputError: it cannot be read, is none, or is too small, too large or one of several.
    """
    data = _bytes_of(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a file may lack and is shown all the same
        whole = _decoded(path, data)
        scaled = whole.resize(
            (width, height),
            Image.Resampling.LANCZOS,
            box=_middle(whole.width, whole.height, aspect=width / height),
        )
    pixels = np.asarray(scaled, dtype=np.uint8).copy()
    return StartPicture(path=path, sha256=hashlib.sha256(data).hexdigest(), rgb_HWC=pixels)


def _bytes_of(path: Path) -> bytes:
    try:
        # Looked at before it is opened: opening a pipe waits for somebody to write to it.
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise _refusal(path, "is no ordinary file; give a file with a picture, such as a PNG")
        if status.st_size > _MOST_BYTES:
            raise _too_large(path)
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # a path may hold a byte that no name has
        why = error.strerror if isinstance(error, OSError) else error
        raise _refusal(
            path, f"cannot be read ({why}); give a file with a picture, such as a PNG"
        ) from error
    if len(data) > _MOST_BYTES:
        raise _too_large(path)
    return data


def _decoded(path: Path, data: bytes) -> Image.Image:
    """Upright, in RGB."""
    Image.init()
    try:
        with Image.open(BytesIO(data), formats=sorted(Image.OPEN.keys() - _UNREAD)) as image:
            _check(path, image)
            image.load()
            if image.format == "PNG" and lacks_rows(data):
                raise _refusal(path, "has fewer rows than its header says; save or copy it again")
            if image.format in _JPEG and lacks_data(data, image):
                raise _refusal(path, "lacks data of its picture; save or copy it again")
            return _rgb(path, ImageOps.exif_transpose(image))
    except UserInputError:
        raise
    except Image.DecompressionBombError as error:
        raise _refusal(path, f"has more than {_MOST_PIXELS:,} pixels; scale it down") from error
    except UnidentifiedImageError as error:
        raise _refusal(
            path, "is no picture that can be read; give one as PNG, JPEG or WebP"
        ) from error
    except Exception as error:  # each of Pillow's decoders has errors of its own
        raise _refusal(
            path, f"is cut short or damaged ({error}); save or copy the picture again"
        ) from error


def _check(path: Path, image: Image.Image) -> None:
    """By its header alone."""
    width, height = image.size
    size = f"has {width}x{height} pixels"
    if min(width, height) < _LEAST_SIDE:
        raise _refusal(path, f"{size}; give one of at least {_LEAST_SIDE}x{_LEAST_SIDE}")
    if width * height > _MOST_PIXELS:
        raise _refusal(path, f"{size}, more than {_MOST_PIXELS:,} in all; scale it down")
    num_pictures = getattr(image, "n_frames", 1)  # of formats that may have several
    if num_pictures > 1 and image.format not in _SEVERAL_OF_ONE:
        raise _refusal(path, f"has {num_pictures} pictures; give a file with one")


def _rgb(path: Path, image: Image.Image) -> Image.Image:
    if image.mode in _BITS_16 or (image.mode == "I" and image.format == "PNG"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise _refusal(path, "has 32 bits a pixel in one channel; save it with 8 bits a channel")
    if image.has_transparency_data:
        opaque = Image.new("RGBA", image.size, (0, 0, 0, 255))
        opaque.alpha_composite(image.convert("RGBA"))
        image = opaque
    return image.convert("RGB")


def _middle(width: int, height: int, *, aspect: float) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the largest part of that aspect around the centre."""
    cut_width, cut_height = min(width, height * aspect), min(height, width / aspect)
    left, top = (width - cut_width) / 2, (height - cut_height) / 2
    return left, top, left + cut_width, top + cut_height


def _too_large(path: Path) -> UserInputError:
    return _refusal(path, f"has more than {_MOST_BYTES // 2**20} MiB; scale the picture down")


def _refusal(path: Path, why: str) -> UserInputError:
    return UserInputError(f"image {path}: {why}")
