"""What is asked of the decode loop, and what it answers, are values."""

import operator
from dataclasses import dataclass, replace
from typing import Any

from scope_contracts.errors import UserInputError, mismatch
from scope_rt.lm.model_rows import ModelRows, model_rows


class Specialist:
    """One model behind the loop. Its name and LoRA revision are its cache domain."""

    def __init__(self, name: str, model: Any, *, lora_revision: str = "") -> None:
        self.name, self.model, self.lora_revision = name, model, lora_revision
        self.rows: ModelRows = model_rows(model)
        self.vocab_size: int = model.config.vocab_size
        self.num_heads: int = model.config.num_attention_heads
        self.max_tokens: int | None = model.config.to_dict().get("max_position_embeddings")
        """Positions it was made for; None where its config names no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Continue `prompt` greedily by up to `max_new_tokens` tokens."""

    name: str
    specialist: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    salt: str = ""
    """Requests share a prefix only with those of the same salt."""
    stop_tokens: frozenset[int] = frozenset()
    """Any of these ends the answer, and is part of it."""

    def normalised(self) -> "Request":
        """The same with plain integers: tokens often come as numpy's or as tensors without dims.

        Raises:
            UserInputError: a token or a count is no integer, or the salt is no text.
        """
        salt: object = self.salt
        if not isinstance(salt, str):
            raise UserInputError(mismatch(f"{self.name}: salt", got=salt, want="a string"))
        try:
            return replace(
                self,
                prompt=tuple(map(operator.index, self.prompt)),
                max_new_tokens=operator.index(self.max_new_tokens),
                stop_tokens=frozenset(map(operator.index, self.stop_tokens)),
            )
        except TypeError as error:
            raise UserInputError(
                f"{self.name}: prompt, max_new_tokens and stop_tokens are integers: {error}; "
                "tokenize the text first"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to one request."""

    request: Request
    """As it was submitted, in plain integers."""
    tokens: tuple[int, ...]
    """The new ones."""
    tokens_reused: int
    """Prompt tokens that were found computed, at the first start."""
    preemptions: int
    """How often it had to give its blocks to an older request and start again."""


@dataclass(slots=True, kw_only=True)
class LoopCounters:
    """What a loop did since it was made: exact, and never switched off."""

    tokens_prefilled: int = 0
    """Tokens of prompts that were computed, again after a preemption."""
    tokens_reused: int = 0
    """Tokens that were found computed instead."""
    tokens_decoded: int = 0
    """Tokens of answers that were computed, again after a preemption; the last one never is."""
    forwards: int = 0
    preemptions: int = 0
