"""A backend with a fault: torchvision's, wrapped, with one line wrong in one stage."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import pytest
import torch

from gpupipe import backends
from gpupipe.backends.base import Applied
from gpupipe.headers import Header
from gpupipe.recipe import Recipe
from gpupipe.records import Plan
from gpupipe.steps import Normalize


@dataclass
class Call:
    """One `submit`, for faults to look at and to change."""

    recipe: Recipe
    headers: list[Header]
    plan: Plan
    applied: Applied | None = None


class Faulty:
    """What `backends.create("faulty", ...)` makes. A fault changes what goes into the wrapped backend or comes out.

    Attributes:
        recipe: recipe -> the recipe that is really done.
        plan: Call -> the plan that is really done.
        result: Call -> what is handed out.
    """

    name = "faulty"

    def __init__(self, recipe, inner, faults):
        self.asked, self.inner, self.faults = recipe, inner, faults

    def submit(self, records, headers, plan):
        call = Call(self.asked, headers, plan)
        done = self.faults["plan"](call) if "plan" in self.faults else plan
        call.applied = self.inner.submit(records, headers, done).result()
        future: Future[Applied] = Future()
        future.set_result(self.faults["result"](call) if "result" in self.faults else call.applied)
        return future

    def close(self):
        self.inner.close()


@pytest.fixture
def faults(monkeypatch) -> dict[str, Callable]:
    """Put a fault in here, and the backend "faulty" has it; empty, it is torchvision's."""
    found: dict[str, Callable] = {}
    choose, create = backends.choose, backends.create

    def choose_any(name, device=None):
        choice = choose("torchvision" if name == "faulty" else name, device)
        return replace(choice, name="faulty") if name == "faulty" else choice

    def create_any(name, recipe, **arguments):
        if name != "faulty":
            return create(name, recipe, **arguments)
        done = found["recipe"](recipe) if "recipe" in found else recipe
        return Faulty(recipe, create("torchvision", done, **arguments), found)

    monkeypatch.setattr(backends, "choose", choose_any)
    monkeypatch.setattr(backends, "create", create_any)
    return found


def has(recipe: Recipe, *stages: str) -> bool:
    return all(any(step.STAGE == stage for step in recipe.steps) for stage in stages)


# One fault for each stage, each of one line.


def decode_off_by_one(call):
    """A decoder that gets one pixel of each JPEG wrong by one."""
    found = call.applied.images
    jpegs = torch.tensor([header.format == "JPEG" for header in call.headers])
    found[jpegs, :, found.shape[2] // 2, found.shape[3] // 2] += 1 / 255 / torch.tensor(call.recipe.normalize.std)
    return call.applied


def crop_one_pixel_up(call):
    """A crop that begins one pixel too high."""
    box = call.plan.box.copy()
    box[:, 0] = (box[:, 0] - 1).clip(0)
    return replace(call.plan, box=box) if has(call.recipe, "crop") else call.plan


def jitter_backwards(call):
    """Jitter steps in the wrong order."""
    colour = tuple(replace(step, order=step.order[:, ::-1].copy()) for step in call.plan.colour)
    return replace(call.plan, colour=colour)


def std_of_another_channel(recipe):
    """A red channel that is divided by green's std."""
    steps = tuple(
        Normalize(step.mean, (step.std[1], *step.std[1:])) if isinstance(step, Normalize) else step
        for step in recipe.steps
    )
    return replace(recipe, steps=steps)


def rounded_in_between(call):
    """A chain that rounds to 8 bits where its parts do not."""
    if not has(call.recipe, "crop", "normalize"):
        return call.applied
    mean, std = (torch.tensor(x)[:, None, None] for x in (call.recipe.normalize.mean, call.recipe.normalize.std))
    return replace(call.applied, images=((((call.applied.images * std + mean) * 255).round() / 255) - mean) / std)


FAULTS = {
    "decode": ("result", decode_off_by_one),
    "resize": ("plan", crop_one_pixel_up),
    "jitter": ("plan", jitter_backwards),
    "normalise": ("recipe", std_of_another_channel),
    "whole chain": ("result", rounded_in_between),
}
