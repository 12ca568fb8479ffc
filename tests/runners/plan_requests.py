"""What `plan-memory` makes of arguments, short of printing; not a test itself."""

from scope_contracts.memory_serving import ServingDemand
from scope_runners.memory_arguments import add_plan_memory_arguments
from scope_runners.memory_request import MemoryRequest
from scope_runners.request import CommandParser


def demanded(arguments: str) -> ServingDemand:
    """The demand of a language model."""
    parser = CommandParser()
    add_plan_memory_arguments(parser)
    demand = MemoryRequest.typed(parser.parse_args(arguments.split())).demand
    assert isinstance(demand, ServingDemand)
    return demand
