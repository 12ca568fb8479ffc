"""Whatever file is given as a first picture: the picture that is meant, or one sentence."""

import os
import struct
import zlib
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from scope_contracts.errors import UserInputError
from scope_rt.video import start_picture
from scope_rt.video.png_rows import lacks_rows
from scope_rt.video.start_picture import read_start_picture

HEIGHT, WIDTH = 32, 64


def read(path: Path) -> NDArray[np.uint8]:
    picture = read_start_picture(path, height=HEIGHT, width=WIDTH)
    assert picture.rgb_HWC.shape == (HEIGHT, WIDTH, 3)
    return picture.rgb_HWC


def refusal(path: Path) -> str:
    with pytest.raises(UserInputError) as refused:
        read_start_picture(path, height=HEIGHT, width=WIDTH)
    said = str(refused.value)
    assert said.startswith(f"image {path}: ")
    assert "\n" not in said
    return said.removeprefix(f"image {path}: ")


def quarters(width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """Red, green, blue and white: where each is tells how the picture was turned and cut."""
    rgb = np.zeros((height, width, 3), dtype=np.uint8)
    rgb[: height // 2, : width // 2, 0] = rgb[: height // 2, width // 2 :, 1] = 255
    rgb[height // 2 :, : width // 2, 2] = rgb[height // 2 :, width // 2 :] = 255
    return Image.fromarray(rgb)


def corners(rgb_HWC: NDArray[np.uint8]) -> list[list[int]]:
    """Of the pictures in them, the colours: 1 where one is bright."""
    return [list(map(int, rgb_HWC[row, column] > 127)) for row in (2, -3) for column in (2, -3)]


RED, GREEN, BLUE, WHITE = [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "tiff", "gif", "ppm"])
def test_a_picture_of_any_format_is_what_it_shows(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    quarters().save(path)
    assert corners(read(path)) == [RED, GREEN, BLUE, WHITE]


def test_a_picture_of_the_stream_s_size_is_taken_as_it_is(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    assert (read(tmp_path / "a.png") == noise).all()


@pytest.mark.parametrize(("width", "height"), [(640, 120), (90, 300), (1001, 333)])
def test_what_is_cut_is_as_much_on_either_side(tmp_path: Path, width: int, height: int) -> None:
    """The four quarters still meet in the middle, and nothing is squeezed."""
    quarters(width, height).save(tmp_path / "a.png")
    assert corners(read(tmp_path / "a.png")) == [RED, GREEN, BLUE, WHITE]
    radius = min(width, height) // 4
    grid = np.hypot(*np.ogrid[-height / 2 : height / 2, -width / 2 : width / 2])
    circle = Image.fromarray((255 * (grid < radius)).astype(np.uint8))
    circle.save(tmp_path / "circle.png")
    seen = read(tmp_path / "circle.png")[..., 0] > 127
    rows, columns = (np.flatnonzero(seen.any(axis)) for axis in (1, 0))
    assert abs(int(rows[0] + rows[-1]) - (HEIGHT - 1)) <= 1
    assert abs(int(columns[0] + columns[-1]) - (WIDTH - 1)) <= 1
    assert abs(int(seen.any(0).sum()) - int(seen.any(1).sum())) <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_camera_s_picture_is_upright(tmp_path: Path, orientation: int) -> None:
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    image = quarters()
    if orientation in undo:
        image = image.transpose(undo[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a.jpg", exif=exif, quality=95)
    assert corners(read(tmp_path / "a.jpg")) == [RED, GREEN, BLUE, WHITE]


def test_what_is_transparent_is_black_whatever_colour_it_hides(tmp_path: Path) -> None:
    image = quarters().convert("RGBA")
    image.putalpha(
        Image.fromarray(np.repeat([[0], [255]], HEIGHT // 2, 0).repeat(WIDTH, 1).astype(np.uint8))
    )
    image.save(tmp_path / "a.png")
    assert corners(read(tmp_path / "a.png")) == [[0] * 3, [0] * 3, BLUE, WHITE]
    palette = quarters().quantize(8)
    red = palette.getpixel((2, 2))
    palette.save(tmp_path / "p.png", transparency=red)
    assert corners(read(tmp_path / "p.png")) == [[0] * 3, GREEN, BLUE, WHITE]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK", "I;16"])
def test_a_picture_of_other_channels_is_shown_as_bright_as_it_is(tmp_path: Path, mode: str) -> None:
    ramp = np.tile(np.linspace(0, 255, WIDTH), (HEIGHT, 1))
    image = Image.fromarray(ramp.astype(np.uint8))
    if mode == "I;16":
        image = Image.fromarray((ramp * 257).astype(np.uint16))
    elif mode == "1":
        ramp = np.where(ramp > 127, 255.0, 0.0)
        image = Image.fromarray(ramp.astype(np.uint8)).convert("1")
    else:
        image = image.convert("RGB").convert(mode) if mode == "CMYK" else image.convert(mode)
    path = tmp_path / ("a.tiff" if mode == "CMYK" else "a.png")
    image.save(path)
    assert abs(read(path).astype(float) - ramp[..., None]).max() <= 2


def test_the_digest_is_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    quarters().save(path)
    first = read_start_picture(path, height=HEIGHT, width=WIDTH)
    quarters().save(path, compress_level=0)
    again = read_start_picture(path, height=HEIGHT, width=WIDTH)
    assert (first.rgb_HWC == again.rgb_HWC).all()
    assert first.sha256 != again.sha256


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.png").startswith("cannot be read (No such file or directory)")
    assert refusal(tmp_path).startswith("is no ordinary file")
    os.mkfifo(tmp_path / "pipe.png")
    assert refusal(tmp_path / "pipe.png").startswith("is no ordinary file")
    assert refusal(Path("/dev/zero")).startswith("is no ordinary file")


def test_a_path_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"cannot be read \(embedded null byte"):
        read_start_picture(Path("a\0b"), height=32, width=32)


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    for data in (b"", b"hello", b"\x89PNG\r\n\x1a\n", bytes(range(256)) * 20):
        path.write_bytes(data)
        said = refusal(path)
        assert said.startswith(("is no picture that can be read", "is cut short or damaged"))
    path.write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n"
    )
    assert refusal(path).startswith("is no picture that can be read"), "no program draws it"


def test_a_video_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=16)
        stream.width, stream.height = WIDTH, HEIGHT
        for frame in range(4):
            picture = np.full((HEIGHT, WIDTH, 3), frame, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        container.mux(stream.encode())
    assert refusal(path).startswith("is no picture that can be read")
    pictures = [quarters(), quarters().rotate(180)]
    pictures[0].save(tmp_path / "a.gif", save_all=True, append_images=pictures[1:])
    assert refusal(tmp_path / "a.gif") == "has 2 pictures; give a file with one"


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff", "gif", "bmp"])
def test_a_picture_that_is_cut_short_is_refused(tmp_path: Path, suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(noise).save(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert refusal(path).startswith(("is cut short or damaged", "is no picture that can be read"))


def png(
    width: int, height: int, pixels: bytes, *, depth: int = 8, colour: int = 2, interlace: int = 0
) -> bytes:
    """With a header of its own, whatever the pixels are."""
    header = struct.pack(">2I5B", width, height, depth, colour, 0, 0, interlace)
    half = len(packed := zlib.compress(pixels)) // 2
    pieces = ((b"IHDR", header), *((b"IDAT", part) for part in (packed[:half], packed[half:])))
    chunks = (
        struct.pack(">I", len(d)) + kind + d + struct.pack(">I", zlib.crc32(kind + d))
        for kind, d in (*pieces, (b"IEND", b""))
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("width", "num_bytes", "last_row", "form"),
    [
        (30, 20 * (1 + 3 * 30), 1 + 3 * 30, {}),
        (30, 20 * (1 + 2 * 4 * 30), 1 + 2 * 4 * 30, {"depth": 16, "colour": 6}),
        (30, 20 * (1 + 2 * 30), 1 + 2 * 30, {"colour": 4}),
        (30, 20 * (1 + 4), 1 + 4, {"depth": 1, "colour": 0}),
        (
            16,
            2 * 3 * 3 + 2 * 5 + 5 * 5 + 5 * 9 + 10 * 9 + 10 * 17,
            17,
            {"colour": 0, "interlace": 1},
        ),
    ],
)
def test_a_png_without_its_last_row_is_refused(
    tmp_path: Path, width: int, num_bytes: int, last_row: int, form: dict[str, int]
) -> None:
    """Pillow would show it black."""
    path = tmp_path / "a.png"
    path.write_bytes(png(width, 20, bytes(num_bytes), **form))
    read(path)
    path.write_bytes(png(width, 20, bytes(num_bytes - last_row), **form))
    assert refusal(path) == "has fewer rows than its header says; save or copy it again"


def test_what_lies_behind_the_last_row_of_a_png_is_not_decompressed() -> None:
    """It may be gigabytes; here it could not be."""
    whole = png(4, 4, bytes(4 * (1 + 3 * 4)))
    at, deflate = whole.index(b"IDAT"), zlib.compressobj()
    rows = deflate.compress(bytes(4 * (1 + 3 * 4))) + deflate.flush(zlib.Z_SYNC_FLUSH)
    pieces = (struct.pack(">I4s", len(data), b"IDAT") + data + bytes(4) for data in (rows, b"\xff"))
    assert not lacks_rows(whole[: at - 4] + b"".join(pieces))


@pytest.mark.parametrize(
    "form",
    [{}, {"quality": 40}, {"progressive": True}, {"restart_marker_blocks": 4}, {"format": "MPO"}],
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_that_lacks_data_and_ends_in_order_is_refused(
    tmp_path: Path, form: dict[str, Any], mode: str
) -> None:
    """Pillow would show what is lacking grey."""
    noise = np.random.default_rng(0).integers(0, 256, (41, 67, 3), dtype=np.uint8)
    path = tmp_path / "a.jpg"
    if form.get("format") == "MPO":
        form = form | {"save_all": True, "append_images": [quarters()]}
    Image.fromarray(noise).convert(mode).save(path, **form)
    read(path)
    data = path.read_bytes()
    scan = data.index(b"\xff\xda") + 20
    end = data.index(b"\xff\xd9", scan)
    first, middle = data[: scan + (end - scan) // 4], scan + (end - scan) // 2
    for lacking in (first + data[end:], first + data[middle:], first + bytes(end - len(first))):
        path.write_bytes(lacking)
        said = refusal(path)
        assert said.startswith(("lacks data of its picture; save", "is cut short or damaged"))


def test_a_picture_too_small_or_too_large_is_refused_by_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (1, 1)).save(path)
    assert refusal(path) == "has 1x1 pixels; give one of at least 16x16"
    path.write_bytes(png(12_000, 12_000, b""))
    assert refusal(path).startswith("has 12000x12000 pixels, more than 67,108,864 in all")
    path.write_bytes(png(60_000, 60_000, b""))
    assert refusal(path) == "has more than 67,108,864 pixels; scale it down"
    monkeypatch.setattr(start_picture, "_MOST_BYTES", 1000)
    path.write_bytes(bytes(1001))
    assert refusal(path).startswith("has more than ")


@pytest.mark.parametrize("suffix", ["png", "jpeg", "webp", "gif", "tiff", "ppm"])
def test_a_damaged_file_is_a_picture_or_a_sentence(tmp_path: Path, suffix: str) -> None:
    random = np.random.default_rng(1)
    whole = BytesIO()
    quarters().save(whole, format=suffix)
    path = tmp_path / f"a.{suffix}"
    for _ in range(150):
        data = np.frombuffer(whole.getvalue(), dtype=np.uint8).copy()
        places = random.integers(0, len(data), 3)
        data[places] = random.integers(0, 256, 3)
        path.write_bytes(data.tobytes())
        with suppress(UserInputError):
            read(path)
