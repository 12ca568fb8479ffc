"""Prompts to token ids by a `tokenizer.json`, which alone says what the original code did.

Libraries that rebuild a tokenizer from its class give other ids for what is not in the vocabulary.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from scope_contracts.errors import UserInputError, shown
from scope_rt.optional_packages import need
from scope_rt.text.cleaning import cleaned

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXT_LEN = 512
END = 1
"""The id of `</s>`, which ends every prompt, one that was cut too."""
_LOG = logging.getLogger(__name__)


class PromptIds:
    """The ids of prompts, at most `TEXT_LEN`, the end included; one that is longer is cut."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._cut = set[int]()
        """Prompts of which a warning has told."""

    @classmethod
    def from_file(cls, path: Path, *, num_rows: int) -> "PromptIds":
        """Read a `tokenizer.json`.

        Args:
            num_rows: of the embedding, which must have one for every id.

        Raises:
            UserInputError: tokenizers is not installed, or the file cannot be used.
        """
        need("tokenizers", purpose="Wan's text encoder")
        from tokenizers import Tokenizer

        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserInputError(
                f"cannot read {path}: {error}; copy the tokenizer again"
            ) from error
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # it raises nothing more special
            what = str(error).splitlines()[0][:200]
            raise UserInputError(f"cannot read {path}: {what}; copy the tokenizer again") from error
        tokenizer.no_padding()
        tokenizer.enable_truncation(TEXT_LEN)
        if (ids := tokenizer.encode("").ids) != [END]:
            raise UserInputError(
                f"{path} gives {ids} for an empty prompt, want [{END}]; copy umT5's tokenizer"
            )
        if (num_ids := tokenizer.get_vocab_size()) > num_rows:
            raise UserInputError(
                f"{path} has {num_ids} ids, and the text encoder's embedding {num_rows} rows; copy "
                "both from one model"
            )
        return cls(tokenizer)

    def __call__(self, prompt: str) -> list[int]:
        """The ids of one prompt, cleaned before. Warns once of a prompt that is cut."""
        encoding = self._tokenizer.encode(cleaned(prompt))
        if encoding.overflowing and hash(prompt) not in self._cut:
            self._cut.add(hash(prompt))
            _LOG.warning(
                "prompt %s has more than %d tokens; what comes after them is not seen by the model",
                shown(prompt),
                TEXT_LEN,
            )
        return list(encoding.ids)
