"""Scenes and prompts translate into each other without loss."""

import torch

from scope_lab.tiny.prompts import describe, parse_prompt, random_prompt, random_scene


def test_parsing_a_description_gives_the_scene_back() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        scene = random_scene(generator)
        assert parse_prompt(describe(scene)) == scene


def test_random_prompts_are_known_and_vary_in_wording() -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [random_prompt(generator) for _ in range(200)]
    scenes = [parse_prompt(prompt) for prompt in prompts]
    in_plain_words = [describe(scene) for scene in scenes]
    assert sum(a != b for a, b in zip(prompts, in_plain_words, strict=True)) > 100


def test_objects_of_one_scene_differ_in_colour() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        colours = [thing.colour for thing in random_scene(generator).objects]
        assert len(set(colours)) == len(colours)
