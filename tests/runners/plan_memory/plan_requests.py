"""What `plan-memory` makes of arguments, short of printing; not a test itself."""

from scope_runners.command_parser import CommandParser
from scope_runners.plan_memory.arguments import add_plan_memory_arguments
from scope_runners.plan_memory.request import MemoryRequest
from scope_runners.plan_memory.serving import ServingRequirement


def required(arguments: str) -> ServingRequirement:
    """The requirement of a language model."""
    parser = CommandParser()
    add_plan_memory_arguments(parser)
    requirement = MemoryRequest.from_arguments(parser.parse_args(arguments.split())).requirement
    assert isinstance(requirement, ServingRequirement)
    return requirement
