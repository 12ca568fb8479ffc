"""A pytest plugin: kvpress's own tests run over our policies in place of its presses.

`POLICY_MATRIX=sdpa` runs what needs no attention probabilities on the model as kvpress loads it,
`POLICY_MATRIX=eager` what needs them on one that returns them. Not a test itself.
"""

import functools
import importlib
import os
from typing import Any

from transformers import PreTrainedModel

from scope_rt.kv_cache.policy import HeavyHitters, RandomRows, sliding_window
from scope_rt.lm.kvpress_adapter import PolicyPress

SIZES = HeavyHitters(budget=8, num_sink=2, num_recent=4)
WINDOW = sliding_window(num_sink=2, num_recent=12)
CHOICES: dict[str, list[dict[str, Any]]] = {
    "sdpa": [{"policy": WINDOW}, {"policy": RandomRows(sizes=SIZES)}],
    "eager": [{"policy": SIZES}, {"policy": SIZES, "per_head": True}],
}

matrix: Any = importlib.import_module("tests.default_presses")  # of the working folder: kvpress's
chosen = os.environ["POLICY_MATRIX"]
matrix.default_presses[:] = [
    {"cls": PolicyPress, "kwargs": [options | {"compression_ratio": r} for r in (0.2, 0.8)]}
    for options in CHOICES[chosen]
]
load = PreTrainedModel.from_pretrained.__func__


@classmethod  # type: ignore[misc]
@functools.wraps(load)
def loaded(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return load(cls, *args, **({"attn_implementation": chosen} | kwargs))


PreTrainedModel.from_pretrained = loaded
