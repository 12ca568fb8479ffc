"""A stream continues after any chunk that its log has with latents, as if the later ones had not
been: where planning was there follows from the log alone, worked out again record by record."""

from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from scope_contracts.envelope import PPEnvelope
from scope_contracts.errors import ContractError, UserInputError
from scope_contracts.log_file import LogReader
from scope_contracts.log_records import UNCHANGED, Control
from scope_rt.control.inbox import Conditioning, Directive, ScheduledDirective
from scope_rt.control.planner import PlannedCounts, Planner
from scope_rt.control.position import Position
from scope_rt.control.resume_point import ResumePoint
from scope_rt.control.tail import StreamTail, TailChunk
from scope_rt.instruments import Instruments
from scope_rt.logged_control import LoggedControl
from scope_rt.record.reader import open_log, read_stream
from scope_rt.resumed import AppliedAt, Resumed
from scope_rt.stream_setup import StreamSetup
from scope_rt.tensors import TORCH_DTYPES, sha256_of

_PLANNED = ("chunk_index", "cache_epoch", "current_start_frame", "base_seed")
_planned = attrgetter(*_PLANNED)


class RewoundStream:
    """The stream of one log; reading it changes nothing."""

    def __init__(self, setup: StreamSetup, log: Path, instruments: Instruments) -> None:
        """Raises `UserInputError`: the log cannot be read, or is of another model."""
        self._setup, self._log = setup, log
        self._control = LoggedControl(setup=setup, instruments=instruments, log=log)
        try:
            with open_log(log) as file:
                self._history, self._places = read_stream(LogReader(file, thorough=False))
        except ContractError as error:
            raise UserInputError(f"stream log {log}: cannot be read ({error})") from error
        theirs = self._history.opened.model_fingerprint
        if theirs != setup.model_fingerprint:
            raise UserInputError(
                f"stream log {log}: is of a model with fingerprint {theirs[:12]}, this one has "
                f"{setup.model_fingerprint[:12]}; give the model that made it"
            )

    def check(self, chunk_index: int) -> None:
        """Whether the log leads there, before any rank is met and any prompt encoded.

        Raises:
            UserInputError: it does not, or lacks latents that are needed.
        """
        self._check(chunk_index)
        self._tail(self._continued_at(chunk_index))

    def before(self, chunk_index: int) -> Resumed:
        """The stream before `chunk_index`, which is planned next, by a rebuild of its cache.

        Reads the latents of a few chunks, and encodes the prompts that were in effect.

        Raises:
            UserInputError: the log does not lead there, or lacks latents that are needed.
        """
        history, log = self._history, self._log
        self._check(chunk_index)
        chunk_index = self._continued_at(chunk_index)
        shown = history.shown.between(history.begun_at, chunk_index)
        position = self._position(chunk_index)
        settings = position.planner.settings
        point = ResumePoint(
            counts=position.planner.counts,
            conditioning=position.text,
            transition=position.transition,
            asked_again=self._beginning(chunk_index) if not shown else (),
            first_scheduled=chunk_index,
            later=tuple(
                self._control.directive_of(each)
                for each in history.scheduled
                if each.chunk_index >= chunk_index
            ),
            num_acknowledged=len(shown),
            pending=(),
            tail=self._tail(chunk_index),
            base_seed=settings.base_seed,
            kv_cache_attention_bias=settings.kv_cache_attention_bias,
        )
        applied = {
            name: AppliedAt(
                chunk_index=each.chunk_index,
                cache_epoch=history.envelopes[each.chunk_index].cache_epoch,
            )
            for each in history.controls
            if each.chunk_index < chunk_index
            for name in each.command_ids
        }
        num_bytes = history.num_bytes
        history.forget(chunk_index)
        return Resumed(
            log=log,
            progress=history,
            point=point,
            log_offset=num_bytes,
            is_cut=True,
            applied=applied,
        )

    def _continued_at(self, chunk_index: int) -> int:
        """After the last chunk before that was shown: those in between were dropped by a cut."""
        shown = self._history.shown.between(self._history.begun_at, chunk_index)
        return shown.last[0] + 1 if shown else self._history.begun_at

    def _check(self, chunk_index: int) -> None:
        history = self._history
        if history.start_frame is not None:
            raise UserInputError(
                f"stream log {self._log}: begins with a picture, and such a stream is not rewound "
                "yet; start it anew"
            )
        last = history.shown.last[0]
        if not history.begun_at <= chunk_index <= last + 1:
            raise UserInputError(
                f"chunk {chunk_index} is none of this stream, which has chunks {history.begun_at} "
                f"to {last}; give {history.begun_at} to {last + 1}"
            )

    def _position(self, chunk_index: int) -> Position:
        """Where planning was before `chunk_index`."""
        first = self._epoch_start(chunk_index)
        position = self._before_epoch(first)
        for index in range(first, chunk_index):
            envelope = self._history.envelopes[index]
            planned, position = position.next(self._directive(index, envelope))
            got, want = _planned(planned), _planned(envelope)
            if got != want:
                raise UserInputError(
                    f"stream log {self._log}: chunk {index} was planned with {_PLANNED} {want}, "
                    f"and what was asked for leads to {got}; it cannot be rewound there"
                )
        return position

    def _epoch_start(self, chunk_index: int) -> int:
        """The first chunk of the epoch that is continued; `chunk_index` where none is."""
        envelopes, first = self._history.envelopes, self._history.begun_at
        epochs = (index for index in range(chunk_index - 1, first - 1, -1))
        return next((index for index in epochs if envelopes[index].init_cache), chunk_index)

    def _before_epoch(self, first: int) -> Position:
        """Before a hard cut nothing is under way: what is newest is in effect."""
        opened, setup = self._history.opened, self._setup
        seed, bias = opened.base_seed, opened.kv_cache_attention_bias
        text: Control | None = None
        for each in self._history.controls:
            if each.chunk_index < first:
                seed = seed if each.base_seed == UNCHANGED else each.base_seed
                bias = each.kv_cache_attention_bias or bias
                text = each if each.embeds_sha256 else text
        envelope = self._history.envelopes.get(first)
        assert envelope is not None, "a chunk that was shown was planned"
        counts = PlannedCounts(
            next_call_id=envelope.call_id,
            next_chunk_index=first,
            cache_epoch=envelope.cache_epoch - 1,
        )
        return Position(
            planner=Planner(settings=setup.settings, counts=counts).steered(seed=seed, bias=bias),
            text=None if text is None else self._conditioning(text),
        )

    def _conditioning(self, control: Control) -> Conditioning | None:
        return self._control.directive_of(control).directive.conditioning

    def _directive(self, index: int, envelope: PPEnvelope) -> Directive:
        """What took effect at a chunk; a cut that nobody asked for is one too."""
        directive = Directive(hard_cut=envelope.init_cache)
        for each in self._history.controls:
            if each.chunk_index == index:
                directive = directive.then(self._control.directive_of(each).directive)
        return directive

    def _beginning(self, chunk_index: int) -> tuple[ScheduledDirective, ...]:
        """What the stream began with, to begin it again."""
        directive = self._directive(chunk_index, self._history.envelopes[chunk_index])
        return (ScheduledDirective(chunk_index=chunk_index, directive=directive),)

    def _tail(self, end: int) -> StreamTail:
        first = self._epoch_start(end)
        kept: list[TailChunk] = []
        with open_log(self._log) as file:
            reader = LogReader(file)
            num_frames, index = self._setup.num_tail_frames, end - 1
            while num_frames > 0 and index >= first:
                kept.insert(0, self._tail_chunk(reader, index))
                num_frames -= kept[0].latents.shape[1]
                index -= 1
            sinks = self._sinks(reader, first, end)
        return StreamTail(chunks=tuple(kept), sinks=sinks)

    def _sinks(self, reader: LogReader, first: int, end: int) -> Tensor | None:
        """The epoch's first latent frames, as many as its cache keeps for ever."""
        num_missing, found = self._setup.recipe.sink_frames, list[Tensor]()
        for index in range(first, end):
            if found and num_missing <= 0:
                break
            found.append(self._tail_chunk(reader, index).latents[:, :num_missing])
            num_missing -= found[-1].shape[1]
        return torch.cat(found, dim=1) if found else None

    def _tail_chunk(self, reader: LogReader, index: int) -> TailChunk:
        finished, entry = self._history.finished.get(index), self._places.get(index)
        if finished is None or finished.latents is None or entry is None:
            raise UserInputError(
                f"stream log {self._log}: has no latents of chunk {index}, which are needed there; "
                "record them from the start (record_latents)"
            )
        try:
            raw = bytearray(reader.blob(entry))
        except ContractError as error:
            raise self._damaged(index) from error
        spec = finished.latents
        latents = torch.frombuffer(raw, dtype=TORCH_DTYPES[spec.dtype]).view(spec.shape)[None]
        if sha256_of(latents) != finished.latents_sha256:
            raise self._damaged(index)
        return TailChunk(
            start_frame=self._history.envelopes[index].current_start_frame,
            latents=latents,
            latents_sha256=finished.latents_sha256,
        )

    def _damaged(self, index: int) -> UserInputError:
        return UserInputError(
            f"stream log {self._log}: the latents of chunk {index} are damaged; give another chunk"
        )
