"""The two backends that are compared: which, where, and how to run both on the same input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpupipe import backends
from gpupipe.backends.base import Applied, Backend, Options
from gpupipe.errors import BackendError
from gpupipe.headers import Header
from gpupipe.recipe import Recipe
from gpupipe.records import Plan, Record

if TYPE_CHECKING:
    import torch

Sample = tuple[Record, Header]
Sides = tuple[Applied, Applied]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two backends: which, where, and how to make one."""

    name: str
    device: torch.device
    options: Options

    @classmethod
    def of(cls, spec: str, options: Options | None) -> Side:
        name, _, device = spec.partition(":") if isinstance(spec, str) else (spec, "", "")
        choice = backends.choose(name, device or None)
        return cls(choice.name, choice.device, options or Options())

    def create(self, recipe: Recipe, batch_size: int) -> Backend:
        return backends.create(self.name, recipe, device=self.device, batch_size=batch_size, options=self.options)

    @property
    def gpu(self) -> bool:
        """Whether it computes on a GPU; the other backends only copy their batches there."""
        return self.name == "dali" and self.device.type == "cuda"

    @property
    def gpu_decode(self) -> bool:
        return self.gpu and self.options.decode != "cpu"

    def __str__(self) -> str:
        return f"{self.name} ({self.device}{_DECODED[self.options.decode] if self.gpu else ''})"


_DECODED = {"gpu": "", "hardware": ", decode by its JPEG engines", "cpu": ", decode on the CPU"}


@dataclass(frozen=True, slots=True)
class Both:
    """The two backends of one stage."""

    backend: Backend
    reference: Backend

    @classmethod
    @contextlib.contextmanager
    def of(cls, sides: tuple[Side, Side], recipe: Recipe, batch_size: int) -> Iterator[Both]:
        """Both backends for a recipe; closed at the end of the block."""
        with ExitStack() as stack:
            made = []
            for side in sides:
                made.append(side.create(recipe, batch_size))
                stack.callback(made[-1].close)
            yield cls(made[0], made[1])

    def apply(self, samples: list[Sample], plan: Plan) -> Sides:
        records, headers = [record for record, _ in samples], [header for _, header in samples]
        futures = [made.submit(records, headers, plan) for made in (self.backend, self.reference)]
        first, second = (future.result() for future in futures)
        if first.images.shape != second.images.shape:
            raise BackendError(
                f"{self.backend.name} returns images of shape {tuple(first.images.shape)}, "
                f"{self.reference.name} of {tuple(second.images.shape)}; they must be (n, 3, height, width)",
                backend=self.backend.name,
            )
        return first, second
