"""What `plan-memory` makes of arguments, short of printing; not a test itself."""

from scope_runners.command_parser import CommandParser
from scope_runners.plan_memory.arguments import add_plan_memory_arguments
from scope_runners.plan_memory.request import MemoryRequest
from scope_runners.plan_memory.serving import ServingRequirement
from scope_runners.plan_memory.video import VideoRequirement


def required(arguments: str) -> ServingRequirement:
    """The requirement of a language model."""
    requirement = _requested(arguments).requirement
    assert isinstance(requirement, ServingRequirement)
    return requirement


def required_of_video(arguments: str) -> VideoRequirement:
    """The requirement of a stream."""
    requirement = _requested(arguments).requirement
    assert isinstance(requirement, VideoRequirement)
    return requirement


def _requested(arguments: str) -> MemoryRequest:
    parser = CommandParser()
    add_plan_memory_arguments(parser)
    return MemoryRequest.from_arguments(parser.parse_args(arguments.split()))
