"""A detector that is disarmed does nothing, which shows what it is there for.

Each one stands for the functions of `scope_rt.checks.Checks` that are replaced to disarm it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from scope_contracts.call_budget import CallBudget
from scope_contracts.errors import UserInputError
from scope_contracts.lifecycle import Lifecycle
from scope_rt.checks import Checks


class Detector(StrEnum):
    """One detector each."""

    ENV_PARITY = "env_parity"
    """Settings are compared over all ranks before the first model collective."""
    PREFLIGHT = "preflight"
    """Rank0 and the mesh check an envelope by itself."""
    LIFECYCLE = "lifecycle"
    """Every rank checks an envelope against the ones before it."""
    CALL_BUDGET = "call_budget"
    """A generator call that was not planned never starts, and a short count is never committed."""
    ANSWER = "answer"
    """Rank0 checks that a result answers the envelope it sent."""
    EPOCH_DROP = "epoch_drop"
    """A result of an epoch that was cut off is dropped."""
    STATE_DIGEST = "state_digest"
    """Every result tells what was run and where the cache stands."""
    SCALAR_DIGEST = "scalar_digest"
    """Every N chunks the generator ranks compare what they are about to run."""
    INPUT_DIGEST = "input_digest"
    """What arrives on the link is what was sent."""
    FINGERPRINT = "fingerprint"
    """Weights are those of the checkpoint, at load and in rotation."""
    ORACLE = "oracle"
    """A token now and then, in strict all, is computed again by other code."""
    LINEAR_SUMS = "linear_sums"
    """Products of these tokens are held against sums of the weights as they were loaded."""
    CACHED_ROWS = "cached_rows"
    """Rows of that layer lie in the cache as they were given to it."""
    REDUCED_SUMS = "reduced_sums"
    """All-reduces give the sum of what all ranks gave."""
    EDGES = "edges"
    """What enters and leaves the blocks is what was planned, and becomes the latents."""
    NOISE = "noise"
    """A rank's noise is that of seed, epoch, chunk and step."""
    MADE_STATE = "made_state"
    """Text K/V and modulations are right when they are made."""
    CANARY = "canary"
    """A fixed chunk gives the same bits every N chunks, on all ranks."""
    DERIVED = "derived"
    """Text K/V and modulations are what was computed, in rotation."""
    ROWS = "rows"
    """Cached rows are what was written, in rotation and before they are overwritten."""
    REPLICATED = "replicated"
    """After every chunk the generator ranks compare the noise they drew and their latents."""
    NUMERICS = "numerics"
    """The numeric settings of a process are those of its start, and those of the other ranks."""
    VALUES = "values"
    """Latents are what a model can compute."""
    PLANNED = "planned"
    """Rank0 works every plan out twice."""
    KEPT = "kept"
    """Latents, context and embeddings on rank0 are those that were made, wherever they are used."""
    DECODED = "decoded"
    """A second decoder gives the same frames."""
    CODEC = "codec"
    """The codec shows fixed latents as it did at the start."""
    TEXT = "text"
    """The text encoder gives a prompt the same embeddings twice."""
    EMITTED = "emitted"
    """What is handed out is what was decoded, in order and once."""
    HEARTBEAT = "heartbeat"
    """A rank that stops answering is named."""
    SLOW_RANK = "slow_rank"
    """A rank far slower than the others is named (`SCOPE_SLOW_RANK_FACTOR`)."""


def detectors_named(names: Iterable[str]) -> frozenset[Detector]:
    """The detectors of these names.

    Raises:
        UserInputError: there is no detector of that name.
    """
    try:
        return frozenset(Detector(name) for name in names)
    except ValueError as error:
        choices = ", ".join(Detector)
        raise UserInputError(f"SCOPE_DISARM: {error}; choose from {choices}") from None


def checks_without(detectors: Iterable[Detector]) -> Checks:
    """All checks but those of `detectors`."""
    checks = Checks()
    for detector in detectors:
        checks = replace(checks, **_REPLACED[detector])
    return checks


def _nothing(*values: object, **named: object) -> None:
    """No check at all."""


def _never(result_epoch: int, first_epoch: int) -> bool:
    return False


def _count(budget: CallBudget) -> None:
    budget.observed += 1


def _commit(lifecycle: Lifecycle, observed_calls: int) -> Lifecycle:
    return lifecycle.commit(lifecycle.call_budget or 0)


_REPLACED: Mapping[Detector, Mapping[str, Any]] = MappingProxyType(
    {
        Detector.ENV_PARITY: {"settings": _nothing},
        Detector.PREFLIGHT: {"preflight": _nothing},
        Detector.LIFECYCLE: {"enter": Lifecycle.follow},
        Detector.CALL_BUDGET: {"count_call": _count, "commit": _commit},
        Detector.ANSWER: {"answer": _nothing},
        Detector.EPOCH_DROP: {"is_dropped": _never},
        Detector.STATE_DIGEST: {"state": _nothing},
        Detector.SCALAR_DIGEST: {"scalars": _nothing},
        Detector.INPUT_DIGEST: {"input_digests": _nothing},
        Detector.FINGERPRINT: {"loaded_weights": _nothing, "weights": _nothing},
        Detector.ORACLE: {"arithmetic": _nothing},
        Detector.LINEAR_SUMS: {"linear_sums": _nothing},
        Detector.CACHED_ROWS: {"cached_rows": _nothing},
        Detector.REDUCED_SUMS: {"reduced_sums": _nothing},
        Detector.EDGES: {"edges": _nothing},
        Detector.NOISE: {"noise": _nothing},
        Detector.MADE_STATE: {"made": _nothing},
        Detector.CANARY: {"canary": _nothing},
        Detector.DERIVED: {"derived": _nothing},
        Detector.ROWS: {"rows": _nothing},
        Detector.REPLICATED: {"replicated": _nothing},
        Detector.NUMERICS: {"numerics": _nothing, "same_numerics": _nothing},
        Detector.VALUES: {"latents": _nothing},
        Detector.PLANNED: {"planned": _nothing},
        Detector.KEPT: {"kept": _nothing},
        Detector.DECODED: {"decoded": _nothing},
        Detector.CODEC: {"codec": _nothing},
        Detector.TEXT: {"text": _nothing},
        Detector.EMITTED: {"emitted": _nothing},
        Detector.HEARTBEAT: {"heartbeat": _nothing},
        Detector.SLOW_RANK: {"pace": _nothing},
    }
)
