"""What a log says was asked for becomes what can be asked for again: with the same embeddings."""

from dataclasses import dataclass
from pathlib import Path

from scope_contracts.errors import UserInputError
from scope_contracts.log_records import Control, Scheduled
from scope_rt.control.inbox import Directive, ScheduledDirective
from scope_rt.control.log_entries import recorded_bias, recorded_seed, recorded_transition
from scope_rt.instruments import Instruments
from scope_rt.stream_setup import StreamSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedControl:
    """Reads the records of one `log`; prompts are encoded by this setup."""

    setup: StreamSetup
    instruments: Instruments
    log: Path

    def directive_of(self, event: Scheduled | Control) -> ScheduledDirective:
        """What a record asks for: of the schedule, or of what took effect.

        Raises:
            UserInputError: a prompt has other embeddings than it had.
        """
        if isinstance(event, Scheduled):
            directive = self._asked(event, event.prompt)
        else:
            directive = self._taken(event)
        return ScheduledDirective(chunk_index=event.chunk_index, directive=directive)

    def _taken(self, event: Control) -> Directive:
        asked = self._asked(event, event.prompt if event.embeds_sha256 else None)
        text = asked.conditioning
        if text is not None and text.embeds_sha256 != event.embeds_sha256:
            raise UserInputError(
                f"the prompt of chunk {event.chunk_index} has other embeddings than when its "
                f"chunks were made, so that the stream cannot be resumed there; to start "
                f"anew, delete {self.setup.config.recovery.snapshot} and {self.log}"
            )
        return Directive(
            conditioning=text,
            transition=asked.transition,
            hard_cut=event.hard_cut,
            drop_in_flight=event.drop_in_flight,
            recompute=event.recompute,
            bias=recorded_bias(event),
            seed=recorded_seed(event),
            command_ids=event.command_ids,
        )

    def _asked(self, event: Scheduled | Control, prompt: str | None) -> Directive:
        setup = self.setup
        return Directive(
            conditioning=None if prompt is None else setup.conditioning(prompt, self.instruments),
            transition=recorded_transition(event),
            hard_cut=event.hard_cut,
            recompute=event.recompute,
        )
