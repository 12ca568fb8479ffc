"""Prompts for scenes: parsing a description gives its scene back, whatever the wording."""

import torch

from scope_rt.text.words import Background, Colour, SceneObject, SceneSpec, Shape, Speed
from scope_rt.text.words import parse as parse_prompt

__all__ = ["describe", "parse_prompt", "random_prompt", "random_scene"]

_TWO_OBJECTS_PROBABILITY = 0.65


def describe(scene: SceneSpec) -> str:
    """The plain wording: "a red circle and a blue square, fast, on navy"."""
    objects = " and ".join(f"a {thing}" for thing in scene.objects)
    return f"{objects}, {scene.speed}, on {scene.background}"


def random_scene(generator: torch.Generator) -> SceneSpec:
    """Draw one or two objects of different colours, a speed and a background."""

    def pick(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    two = float(torch.rand((), generator=generator)) < _TWO_OBJECTS_PROBABILITY
    colours = torch.randperm(len(Colour), generator=generator)[: 1 + two].tolist()
    return SceneSpec(
        objects=tuple(SceneObject(list(Colour)[i], list(Shape)[pick(len(Shape))]) for i in colours),
        speed=list(Speed)[pick(len(Speed))],
        background=list(Background)[pick(len(Background))],
    )


def random_prompt(generator: torch.Generator) -> str:
    """A random scene in a random wording: phrases shuffled, some in capitals."""
    scene = random_scene(generator)
    phrases = [f"a {thing}" for thing in scene.objects]
    phrases += [str(scene.speed), f"on {scene.background}"]
    order = torch.randperm(len(phrases), generator=generator).tolist()
    prompt = ", ".join(phrases[i] for i in order)
    return prompt.upper() if float(torch.rand((), generator=generator)) < 0.1 else prompt
