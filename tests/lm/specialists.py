"""Eight specialists on one pool, requests to them, and what each says alone; not a test itself."""

from collections.abc import Iterable
from typing import Any

import torch

from scope_rt.lm.decode_loop import DecodeLoop
from scope_rt.lm.requests import Completion, Request, Specialist
from tests.lm.eviction_models import tiny_lm
from tests.lm.paged_batch import store_of

NAMES = ("cpp", "python", "rust", "sql", "tests", "docs", "build", "review")
CHANGES: dict[str, Any] = {"num_hidden_layers": 1}


def specialist(name: str, seed: int, *, lora_revision: str = "", **changes: Any) -> Specialist:
    model = tiny_lm("llama", attention="sdpa", **CHANGES, **changes).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.4, generator=generator)
    return Specialist(name, model, lora_revision=lora_revision)


SPECIALISTS = [specialist(name, seed) for seed, name in enumerate(NAMES)]


def loop(
    *,
    num_blocks: int = 200,
    specialists: Iterable[Specialist] = SPECIALISTS,
    max_tokens: int | None = None,
    **sizes: int,
) -> DecodeLoop:
    specialists = list(specialists)
    store = store_of(specialists[0].rows, num_blocks=num_blocks, max_tokens=max_tokens)
    return DecodeLoop(specialists, store, **sizes)


def request(
    name: str, to: str = "cpp", *, prompt: Iterable[int], new: int = 5, **more: Any
) -> Request:
    return Request(name=name, specialist=to, prompt=tuple(prompt), max_new_tokens=new, **more)


def answers(of: DecodeLoop, requests: Iterable[Request]) -> dict[str, Completion]:
    for one in requests:
        of.submit(one)
    return {done.request.name: done for done in of.run()}


def alone(one: Request, specialists: Iterable[Specialist] = SPECIALISTS) -> tuple[int, ...]:
    """What a plain loop without any cache answers."""
    model = next(it.model for it in specialists if it.name == one.specialist)
    tokens = list(one.prompt)
    with torch.no_grad():
        for _ in range(one.max_new_tokens):
            tokens.append(
                int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
    return tuple(tokens[len(one.prompt) :])


def crowd(count: int) -> list[Request]:
    """Ragged requests to all specialists; those to one share the beginning of their prompts."""
    return [
        request(
            f"r{index}",
            NAMES[index % len(NAMES)],
            prompt=[*range(1, 11), *((5 * index + step) % 40 + 1 for step in range(1 + index % 7))],
            new=3 + index % 6,
        )
        for index in range(count)
    ]
