"""What `plan-memory` makes of arguments, short of printing; not a test itself."""

from scope_runners.plan_memory.arguments import add_plan_memory_arguments
from scope_runners.plan_memory.request import MemoryRequest
from scope_runners.plan_memory.serving import ServingDemand
from scope_runners.request import CommandParser


def demanded(arguments: str) -> ServingDemand:
    """The demand of a language model."""
    parser = CommandParser()
    add_plan_memory_arguments(parser)
    demand = MemoryRequest.typed(parser.parse_args(arguments.split())).demand
    assert isinstance(demand, ServingDemand)
    return demand
