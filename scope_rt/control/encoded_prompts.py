"""Prompts and their embeddings: each is encoded once for use and, where numbers are verified, again
so that a slip is seen. Then all weights of the encoder are verified, before the prompt is used:
they are gigabytes, and nothing else is made of them.
"""

import threading
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from scope_contracts.errors import UserInputError, shown
from scope_contracts.integrity import IntegrityLevel
from scope_contracts.log_records import MAX_PROMPT_BYTES
from scope_rt.control.inbox import Conditioning
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.integrity.part_digests import part_digests
from scope_rt.tensor_digests import TensorDigests
from scope_rt.tensors import sha256_of
from scope_rt.text.encoder import TextEncoder

_MOST_PROMPTS = 64
"""Prompts whose embeddings are kept: nobody steers a stream by more at a time."""


class EncodedPrompts:
    """Of one stream, on rank0; any thread may ask. `encoder` gives the text encoder when one is
    needed."""

    def __init__(self, encoder: Callable[[], TextEncoder], level: IntegrityLevel) -> None:
        self._encoder, self._level = encoder, level
        self._kept: dict[str, Conditioning] = {}
        self._encoding = threading.RLock()
        """One thread encodes at a time: an encoder may take its weights to a device and back."""

    def of(self, prompt: str, instruments: Instruments) -> Conditioning:
        """`prompt` and its embeddings. A new prompt blocks while another thread encodes, while it
        is encoded twice, and while the encoder's weights are read.

        Raises:
            UserInputError: the text encoder cannot read it, or it is too long to be logged.
            IntegrityError: a weight changed, or the second time gave other embeddings.
        """
        if (kept := self._kept.get(prompt)) is not None:
            return kept
        check_prompt(prompt)
        with self._encoding:
            if (text := self._kept.get(prompt)) is None:
                with instruments.watchdog.section("encoding a prompt"):  # others are not told which
                    text = self._new(prompt, instruments)
                while len(self._kept) >= _MOST_PROMPTS:
                    del self._kept[next(iter(self._kept))]
                self._kept[prompt] = text
            return text

    def first_again(self) -> tuple[str, str] | None:
        """Digests of a prompt's embeddings, encoded now and as they were first; None before any
        prompt."""
        with self._encoding:
            for text in self._kept.values():
                return sha256_of(self._encode(text.prompt)), text.embeds_sha256
        return None

    def clear(self) -> None:
        """Keep no embeddings, and nothing of the encoder."""
        self._kept.clear()
        vars(self).pop("_weights", None)

    @cached_property
    def _weights(self) -> TensorDigests:
        """Right as they are before the first prompt."""
        return part_digests({"text_encoder": self._encoder()})

    def _new(self, prompt: str, instruments: Instruments) -> Conditioning:
        verifies = self._level is not IntegrityLevel.OFF
        weights = self._weights if verifies else None  # before they are used
        embeds = instruments.faults.reach(FaultPoint.ENCODED, -1, self._encode(prompt))
        text = Conditioning(prompt, embeds)
        if weights is None:
            return text
        where, again = f"prompt {shown(prompt)}", sha256_of(self._encode(prompt))
        for name in weights.changed(weights.names):  # first: they are the cause
            instruments.checks.text(where, f"weight {name}", now="another", noted="as it was")
        instruments.checks.text(
            where, "its embeddings, encoded again,", now=again, noted=text.embeds_sha256
        )
        if self._level is IntegrityLevel.STRICT and (first := self.first_again()) is not None:
            now, noted = first  # of another prompt: this one may be wrong twice alike
            instruments.checks.text(where, "embeddings of the first prompt", now=now, noted=noted)
        return text

    def _encode(self, prompt: str) -> Tensor:
        with torch.inference_mode():  # an encoder may be a module with parameters
            return self._encoder()([prompt])


def check_prompt(prompt: str) -> None:
    """Refuse a prompt that no record could hold: without it in its log, no stream is resumed.

    Raises:
        UserInputError: it is too long, or no text that UTF-8 can hold.
    """
    try:
        num_bytes = len(prompt.encode())
    except UnicodeEncodeError:
        raise UserInputError("prompt: got text that UTF-8 cannot hold; write it anew") from None
    if num_bytes > MAX_PROMPT_BYTES:
        raise UserInputError(
            f"prompt: got {num_bytes} bytes, want at most {MAX_PROMPT_BYTES}; shorten it"
        )
