"""Tensors inside the containers that batches are made of."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch with each tensor changed.

    Goes through dicts, lists, tuples, named tuples, dataclasses, and torch's packed sequences, whose batch sizes stay
    on the host. Anything else comes back as it is. Containers without tensors are copied all the same; nothing is
    changed in place.

    Args:
        tree: The batch.
        change: From a tensor to the one that takes its place.

    >>> map_tensors({"a": torch.ones(1), "b": [torch.ones(1), "c"]}, lambda tensor: tensor + 1)
    {'a': tensor([2.]), 'b': [tensor([2.]), 'c']}
    """
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, PackedSequence):
        indices = [None if part is None else change(part) for part in (tree.sorted_indices, tree.unsorted_indices)]
        return PackedSequence(change(tree.data), tree.batch_sizes, *indices)
    if isinstance(tree, Mapping):
        changed = {key: map_tensors(value, change) for key, value in tree.items()}
        if isinstance(tree, MutableMapping) and type(tree) is not dict:
            same_type = copy.copy(tree)
            same_type.update(changed)
            return same_type
        return changed
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, change) for value in tree))
    if isinstance(tree, list | tuple):
        found = [map_tensors(value, change) for value in tree]
        return found if isinstance(tree, list) else tuple(found)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        same = copy.copy(tree)
        for field in dataclasses.fields(tree):
            # A frozen one refuses assignment, and replace() would run __post_init__ again.
            object.__setattr__(same, field.name, map_tensors(getattr(tree, field.name), change))
        return same
    return tree
