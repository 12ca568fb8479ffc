"""Any thread may ask for embeddings, and each is given those of its own prompt."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from scope_contracts.integrity import IntegrityLevel
from scope_rt.control.encoded_prompts import _MOST_PROMPTS, EncodedPrompts
from scope_rt.instruments import Instruments


class CarriedEncoder:
    """Its weights are on the device while it encodes, and nowhere that another call could use."""

    text_len, text_dim = 1, 1

    def __init__(self) -> None:
        self._is_on_device = False

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        assert not self._is_on_device, "another thread is encoding"
        self._is_on_device = True
        time.sleep(1e-4)
        self._is_on_device = False
        return torch.tensor([[[float(prompt)]] for prompt in prompts])


def test_threads_that_ask_for_many_prompts_at_once_each_get_their_own() -> None:
    """One of them is the loop, which encodes a prompt again to verify its encoder."""
    encoder = CarriedEncoder()
    prompts = EncodedPrompts(lambda: encoder, IntegrityLevel.DEFAULT)

    def ask(number: int) -> float:
        prompts.first_again()
        return prompts.of(str(number), Instruments()).embeds.item()

    numbers = range(3 * _MOST_PROMPTS)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, numbers)) == [float(number) for number in numbers]
