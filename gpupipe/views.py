"""Several recipes for each image: what contrastive and self-supervised training calls views."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpupipe.recipe import Exif, Recipe
from gpupipe.steps.base import fail

MAX_VIEWS = 1 << 16  # the number of a view has 16 bits of a counter


@dataclass(frozen=True, slots=True, init=False)
class Views:
    """Several views of each image, which is read and decoded once: hand it to a Loader as its recipe.

    The field "image" is then a tuple of batches, one for each recipe, and "affine" a tuple of theirs. Each view draws
    numbers of its own, also where two recipes are the same; those of the first are what the recipe draws alone.

    Args:
        recipes: One for each view. Sizes, steps, types and functions may differ; `exif` must not.

    Raises:
        ConfigError: No recipes, recipes that turn images differently, or one that mixes batches.

    >>> crop = Recipe.train(size=224, jitter=(0.8, 0.8, 0.8, 0.2))
    >>> len(Views(crop, crop))
    2
    """

    recipes: tuple[Recipe, ...]

    def __init__(self, *recipes: Recipe) -> None:
        if not 1 <= len(recipes) <= MAX_VIEWS or not all(isinstance(recipe, Recipe) for recipe in recipes):
            raise fail("views", recipes, f"1 to {MAX_VIEWS} recipes, as in Views(recipe, recipe)")
        ways = {recipe.exif for recipe in recipes}
        if len(ways) > 1:
            raise fail("exif", sorted(ways), "the same in all views, because the image is decoded once")
        if any(recipe.mix is not None for recipe in recipes):
            raise fail("mix", [recipe.mix for recipe in recipes], "None in each view: there is one label for them all")
        object.__setattr__(self, "recipes", recipes)

    def __len__(self) -> int:
        return len(self.recipes)

    @property
    def exif(self) -> Exif:
        """That of all views."""
        return self.recipes[0].exif

    def to_json(self) -> str:
        """The views as JSON; `from_json` reads it back to equal ones."""
        return json.dumps({"version": 1, "views": [recipe.to_dict() for recipe in self.recipes]}, indent=2)

    @classmethod
    def from_json(cls, text: str, *, functions: Mapping[str, Callable[..., Any]] | None = None) -> Views:
        """Read what `to_json` wrote.

        Args:
            text: The JSON.
            functions: See `Recipe.from_json`.

        Raises:
            ConfigError: Text that is none, or a recipe in it that `Recipe.from_json` refuses.
        """
        try:
            found = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise fail("text", str(text)[:80], "the JSON that Views.to_json wrote") from error
        if not isinstance(found, Mapping) or found.get("version") != 1 or not isinstance(found.get("views"), list):
            raise fail("text", text[:80], 'an object with "version": 1 and "views", as Views.to_json writes it')
        return cls(*(Recipe.from_json(json.dumps(recipe), functions=functions) for recipe in found["views"]))

    @property
    def fingerprint(self) -> str:
        """64 hex digits that are equal for equal views; see `Recipe.fingerprint`."""
        return hashlib.sha256("".join(recipe.fingerprint for recipe in self.recipes).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return "Views(" + ", ".join(map(repr, self.recipes)) + ")"


def recipes_of(recipe: Recipe | Views) -> tuple[Recipe, ...]:
    """One for each view."""
    return recipe.recipes if isinstance(recipe, Views) else (recipe,)
