"""A result is shown only if it answers the envelope it should, and from the cache it should."""

from scope_contracts.envelope import PPEnvelope, PPResult
from scope_contracts.errors import CallCountError, OrderError, ParityError


def check_answer(envelope: PPEnvelope, result: PPResult) -> None:
    """Refuse an answer to another question, or one that took another number of calls.

    Raises:
        OrderError, CallCountError: naming what was answered and what was asked.
    """
    asked = (envelope.call_id, envelope.chunk_index, envelope.cache_epoch)
    answered = (result.call_id, result.chunk_index, result.cache_epoch)
    if answered != asked:
        raise OrderError(f"result: got call, chunk, epoch {answered}, want {asked}")
    if result.observed_generator_calls != envelope.expected_generator_calls:
        raise CallCountError(
            f"chunk {envelope.chunk_index}: {result.observed_generator_calls} generator calls, "
            f"planned {envelope.expected_generator_calls}"
        )


def check_state(envelope: PPEnvelope, *, ran: bytes, planned: bytes) -> None:
    """Refuse a chunk made from other scalars, or on another cache, than rank0 planned.

    Raises:
        ParityError: naming the chunk.
    """
    if ran != planned:
        raise ParityError(
            f"chunk {envelope.chunk_index}: the state digest of the generator is {ran.hex()}, "
            f"rank0 planned {planned.hex()}; its scalars or its cache are not those of the plan"
        )
