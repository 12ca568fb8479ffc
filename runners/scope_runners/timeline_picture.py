"""A recording at one look: what was asked for above, what it did to the stream below, on one axis.

The picture's size depends on the number of chunks only up to a bound; where several share a pixel,
the tallest bar of them is seen.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from scope_rt import output_file
from scope_rt.record.reader import StreamHistory
from scope_runners.chunk_lines import (
    SHOWN_STAGES,
    ChunkLine,
    Fate,
    balance,
    headline,
)
from scope_runners.wording import printable

_LEFT_PX, _RIGHT_PX, _GAP_PX = 110, 24, 12
_WIDEST_CHUNK_PX, _NARROWEST_PLOT_PX, _WIDEST_PLOT_PX = 64, 900, 1600
_BAND_PX, _CURVE_PX, _LINE_PX, _TEXT_PX = 22, 72, 16, 12
_MOST_NOTES = 40
_PAPER, _INK, _FAINT, _GRID = (24, 24, 28), (230, 230, 230), (150, 150, 158), (52, 52, 60)
_CUT, _RECOMPUTE, _RESTART = (240, 96, 96), (96, 170, 250), (250, 170, 60)
_DROPPED, _BIAS = (120, 120, 126), (190, 150, 250)
_EPOCHS = ((58, 84, 110), (84, 104, 62))
_PROMPTS = ((38, 92, 92), (104, 70, 40), (84, 56, 104), (46, 76, 124), (112, 52, 68), (74, 90, 40))
_STAGES = ((88, 190, 130), (90, 160, 220), (214, 180, 90))
"""Colours of generate, decode and wait."""


def write_timeline(
    stream: StreamHistory, lines: Sequence[ChunkLine], path: Path, *, title: str
) -> None:
    """Draw the chunks of `stream` into a PNG, whole or not at all.

    Raises:
        UserInputError: `path` cannot be written.
    """
    picture = _Picture(stream, lines).draw(title)
    with output_file.replacing(path, suffixes=(".png",)) as partial:
        picture.save(partial)


class _Picture:
    """Draws from top to bottom; `self._top` is where the next row begins."""

    def __init__(self, stream: StreamHistory, lines: Sequence[ChunkLine]) -> None:
        self._stream, self._lines = stream, lines
        num_chunks = max(1, len(lines))
        most = min(num_chunks * _WIDEST_CHUNK_PX, _WIDEST_PLOT_PX)
        self._chunk_px = max(_NARROWEST_PLOT_PX, most) / num_chunks
        self._plot_px = round(self._chunk_px * num_chunks)
        self._place = {line.chunk_index: number for number, line in enumerate(lines)}
        prompts = [c for c in stream.controls if c.embeds_sha256 and c.chunk_index in self._place]
        self._prompts = sorted(prompts, key=lambda control: control.chunk_index)
        self._notes = self._collect_notes()
        height = 232 + _CURVE_PX * (1 + len(SHOWN_STAGES)) + _GAP_PX * 6
        height += _LINE_PX * (len(self._notes) + 2)
        self._image = Image.new("RGB", (_LEFT_PX + self._plot_px + _RIGHT_PX, height), _PAPER)
        self._pen = ImageDraw.Draw(self._image)
        self._font = ImageFont.load_default(size=_TEXT_PX)
        self._top = _GAP_PX

    def draw(self, title: str) -> Image.Image:
        self._text(
            _GAP_PX, f"{printable(title, most=60)}:  {printable(headline(self._stream.opened))}"
        )
        self._text(_GAP_PX, balance(self._stream, self._lines), _FAINT)
        self._axis("chunk", lambda line: str(line.chunk_index))
        self._axis("video, s", lambda line: f"{line.start_s:.1f}")
        self._epochs()
        self._prompt_band()
        self._marks()
        top_of_curves = self._top
        self._bias()
        for stage, colour in zip(SHOWN_STAGES, _STAGES, strict=True):
            self._stage(stage, colour)
        self._changes(top_of_curves, self._top)
        self._legend()
        return self._image.crop((0, 0, self._image.width, self._top + _GAP_PX))

    def _x(self, number: float) -> float:
        return _LEFT_PX + number * self._chunk_px

    def _text(self, x: float, text: str, colour: tuple[int, int, int] = _INK) -> None:
        """A line of its own."""
        self._pen.text((x, self._top), text, fill=colour, font=self._font)
        self._top += _LINE_PX + 2

    def _label(self, text: str, *, below_px: int = 0) -> None:
        at = (_GAP_PX, self._top + below_px)
        self._pen.text(at, text, fill=_FAINT, font=self._font)

    def _clipped(self, text: str, width_px: float) -> str:
        """As much of `text` as fits."""
        text = printable(text)
        while text and self._pen.textlength(text, font=self._font) > width_px:
            text = text[: len(text) * 3 // 4].rstrip() + "…" if len(text) > 4 else ""
        return text

    def _axis(self, name: str, words: Callable[[ChunkLine], str]) -> None:
        self._label(name)
        every = max(1, round(70 / self._chunk_px))
        for number in range(0, len(self._lines), every):
            text = words(self._lines[number])
            self._pen.text((self._x(number) + 2, self._top), text, fill=_FAINT, font=self._font)
        self._top += _LINE_PX

    def _cell(self, start: float, end: float, colour: tuple[int, int, int]) -> None:
        left, right = self._x(start), self._x(end)
        box = (left, self._top, max(left, right - 2), self._top + _BAND_PX)
        self._pen.rectangle(box, fill=colour)

    def _name(self, start: float, end: float, text: str) -> None:
        left, right = self._x(start), self._x(end)
        fitting = self._clipped(text, right - left - 10)
        self._pen.text((left + 5, self._top + 4), fitting, fill=_INK, font=self._font)

    def _epochs(self) -> None:
        self._label("epoch", below_px=4)
        for epoch, group in groupby(enumerate(self._lines), key=lambda item: item[1].cache_epoch):
            numbers = [number for number, _ in group]
            self._cell(numbers[0], numbers[-1] + 1, _EPOCHS[epoch % len(_EPOCHS)])
            self._name(numbers[0], numbers[-1] + 1, f"epoch {epoch}")
        self._top += _BAND_PX + 4

    def _prompt_band(self) -> None:
        """A colour for each prompt; a transition mixes the two, chunk by chunk."""
        self._label("prompt", below_px=4)
        starts = [self._place[control.chunk_index] for control in self._prompts]
        before = _PAPER
        for number, control in enumerate(self._prompts):
            start, colour = starts[number], _PROMPTS[number % len(_PROMPTS)]
            end = [*starts, len(self._lines)][number + 1]
            self._cell(start, end, colour)
            for step in range(min(control.transition_num_chunks, end - start)):
                share = (step + 1) / control.transition_num_chunks
                self._cell(start + step, start + step + 1, _mixed(before, colour, share))
            self._name(start, end, f"{number + 1}  {control.prompt}")
            before = colour
        self._top += _BAND_PX + 4

    def _marks(self) -> None:
        """One letter for what happened to a chunk."""
        self._label("events", below_px=2)
        place, taken = -1, 0
        for number, letter, colour in self._events():
            taken = taken + 1 if number == place else 0
            place = number
            middle = self._x(number) + min(self._chunk_px / 2, 8) + taken * _TEXT_PX
            at = (middle, self._top + 2)
            self._pen.text(at, letter, fill=colour, font=self._font, anchor="ma")
        self._top += _BAND_PX

    def _events(self) -> Iterator[tuple[int, str, tuple[int, int, int]]]:
        restarts = {restart.chunk_index for restart in self._stream.restarts}
        cuts = {c.chunk_index for c in self._stream.controls if c.hard_cut and c.chunk_index > 0}
        for number, line in enumerate(self._lines):
            if line.fate is not Fate.SHOWN:
                yield number, "x" if line.fate is Fate.DROPPED else "?", _DROPPED
            if line.chunk_index in cuts:
                yield number, "C", _CUT
            if line.chunk_index in restarts:
                yield number, "S", _RESTART
            if line.do_kv_recompute:
                yield number, "R", _RECOMPUTE

    def _changes(self, top: int, bottom: int) -> None:
        """Lines down through the curves where the past was cut off or rebuilt after a loss."""
        for number, letter, colour in self._events():
            if letter in "CS":
                x = self._x(number)
                self._pen.line((x, top, x, bottom - _GAP_PX), fill=colour, width=1)

    def _bias(self) -> None:
        self._frame("bias", low="0", high="1")
        points = []
        for number, line in enumerate(self._lines):
            share = min(1.0, max(0.0, line.kv_cache_attention_bias))
            y = self._top + (1 - share) * _CURVE_PX
            points += [(self._x(number), y), (self._x(number + 1), y)]
        if points:
            self._pen.line(points, fill=_BIAS, width=2)
        self._top += _CURVE_PX + _GAP_PX

    def _stage(self, stage: str, colour: tuple[int, int, int]) -> None:
        times = [max(0.0, line.stage_ms.get(stage, 0.0)) for line in self._lines]
        highest = max(times, default=0.0)
        self._frame(
            f"{stage}, ms", low="0", high=f"{highest:,.0f}" if highest >= 100 else f"{highest:.3g}"
        )
        for number, time in enumerate(times):
            height = time / highest * (_CURVE_PX - 2) if highest else 0
            left, bottom = self._x(number), self._top + _CURVE_PX - 1
            right = max(left, self._x(number + 1) - (2 if self._chunk_px > 4 else 1))
            if height >= 1:
                self._pen.rectangle((left, bottom - height, right, bottom), fill=colour)
        self._top += _CURVE_PX + _GAP_PX

    def _frame(self, name: str, *, low: str, high: str) -> None:
        """The axes of a curve; `low` and `high` label its ends."""
        self._label(name, below_px=_CURVE_PX // 2 - 8)
        bottom = self._top + _CURVE_PX
        for y, text in ((self._top, high), (bottom, low)):
            self._pen.line((_LEFT_PX, y, _LEFT_PX + self._plot_px, y), fill=_GRID)
            shift = 0 if y == self._top else -_LINE_PX
            self._pen.text(
                (_LEFT_PX - 6, y + shift), text, fill=_FAINT, font=self._font, anchor="ra"
            )

    def _legend(self) -> None:
        x = float(_GAP_PX)
        for letter, words, colour in (
            ("C", "hard cut", _CUT),
            ("S", "start after a failure", _RESTART),
            ("R", "recompute", _RECOMPUTE),
            ("x", "dropped", _DROPPED),
            ("?", "never finished", _DROPPED),
        ):
            text = f"{letter} = {words}"
            self._pen.text((x, self._top), text, fill=colour, font=self._font)
            x += self._pen.textlength(text, font=self._font) + 24
        self._top += _LINE_PX + 6
        for note in self._notes:
            self._text(_GAP_PX, self._clipped(note, self._plot_px + _LEFT_PX), _FAINT)

    def _collect_notes(self) -> list[str]:
        """Every event in words, as many as a person would read."""
        notes = [
            f"chunk {line.chunk_index}:  {'; '.join(line.events)}"
            for line in self._lines
            if line.events
        ]
        if len(notes) > _MOST_NOTES:
            left_out = len(notes) - _MOST_NOTES + 1
            notes[_MOST_NOTES - 1 :] = [f"and {left_out} more; the table has them all"]
        return notes


def _mixed(
    start: tuple[int, int, int], end: tuple[int, int, int], share: float
) -> tuple[int, int, int]:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(start, end, strict=True))
    return red, green, blue
