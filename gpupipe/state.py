"""Whether a saved state fits the Loader that is to go on from it; and if not, what differs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpupipe.errors import StateError
from gpupipe.sampling.orders import mismatch

STATE_VERSION = 1

_ENTRIES: dict[str, type] = {
    "epoch": int,
    "delivered": int,
    "order": Mapping,
    "seed": int,
    "samples": int,
    "source": str,
    "recipe": str,
    "recipe_json": str,
}


def check_state(state: object) -> tuple[int, int]:
    """Epoch and delivered rows of a state, or StateError if it is none."""
    found = state.get("version") if isinstance(state, Mapping) else type(state).__name__
    if not isinstance(state, Mapping) or found != STATE_VERSION:
        raise StateError(
            f"not a Loader state of version {STATE_VERSION}: found {found!r}. Give what Loader.state_dict() returned",
            expected=STATE_VERSION,
            actual=found,
        )
    for name, kind in _ENTRIES.items():
        value = state.get(name)
        if not isinstance(value, kind) or (isinstance(value, int) and not 0 <= value < 1 << 63):
            raise StateError(
                f"the state has {name}={value!r}, which Loader.state_dict() never returns: it is damaged, or of "
                "another program",
                expected=kind.__name__,
                actual=value,
            )
    return int(state["epoch"]), int(state["delivered"])


def check_identity(saved: Mapping[str, Any], mine: Mapping[str, Any], uri: str, *, strict: bool) -> None:
    """Raise StateError if a state belongs to another data set, seed or recipe.

    Args:
        saved: The state.
        mine: "seed", "samples", "source", "recipe" and "recipe_json" of the Loader.
        uri: Of its source, for the message.
        strict: Whether the recipe must be the same.
    """
    if (saved["samples"], saved["source"]) != (mine["samples"], mine["source"]):
        counts = f"{saved['samples']} samples there, {mine['samples']} here"
        raise StateError(
            f"the state was saved with another data set than {uri}: {counts}"
            + (", with other names or labels, or in another order" if saved["samples"] == mine["samples"] else "")
            + ". Open the data set of the saved run; it may have been moved, but must hold the same files and labels",
            expected={"samples": mine["samples"], "source": mine["source"]},
            actual={"samples": saved["samples"], "source": saved["source"]},
        )
    if saved["seed"] != mine["seed"]:
        raise mismatch({"seed": (saved["seed"], mine["seed"])})
    if strict and saved["recipe"] != mine["recipe"]:
        raise StateError(
            f"the state was saved with another recipe ({_recipe_difference(saved['recipe_json'], mine['recipe_json'])})"
            ", so the rest of the epoch would not match its beginning: use that recipe; or, for a state saved at the "
            "end of an epoch, pass strict=False",
            expected=mine["recipe"],
            actual=saved["recipe"],
        )


def _recipe_difference(saved: str, mine: str) -> str:
    """The entries in which two recipes differ, such as "steps[0].scale was [0.08, 1.0] and is [0.5, 1.0] here"."""
    try:
        before, here = (_flat(json.loads(text)) for text in (saved, mine))
    except ValueError:
        return "the saved text of it is damaged"
    different = [name for name in {**before, **here} if before.get(name) != here.get(name) and name[:5] != "notes"]
    return "; ".join(f"{name} was {before.get(name)!r} and is {here.get(name)!r} here" for name in different)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested dictionaries, and lists of them, as one dictionary with dotted names."""
    if isinstance(value, dict):
        parts = {f"{name}.{key}" if name else key: part for key, part in value.items()}
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        parts = {f"{name}[{position}]": part for position, part in enumerate(value)}
    else:
        return {name: value}
    return {inner: part for key, each in parts.items() for inner, part in _flat(each, key).items()}
