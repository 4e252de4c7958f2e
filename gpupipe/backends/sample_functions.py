"""Functions of people's own for each image, with draws that are keyed by the sample.

A function may draw from the generator that it is given, and from torch's global one, as torchvision's transforms do:
while it runs, draws that name no generator are handed the sample's. Neither global generator moves, and other threads
notice nothing.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from gpupipe.backends.base import Applied, Backend, Plans
from gpupipe.backends.batch_memory import BatchFuture
from gpupipe.backends.thread_pool import ApplyRow
from gpupipe.errors import BackendError
from gpupipe.functions import SampleFunction
from gpupipe.headers import Header
from gpupipe.recipe import Output, Recipe
from gpupipe.records import Plan, Record

_logger = logging.getLogger(__name__)

# Images whose draws are watched, and images after which the cost is told.
_WATCHED = 8
_TIMED = 64
_REPEATS = 4


def _functions(owner: object, names: str) -> frozenset[Callable[..., Any]]:
    return frozenset(getattr(owner, name) for name in names.split())


# All of torch that takes a generator. The rest (dropout) draws from the global one, which `_watch` sees.
_NEW = _functions(torch, "rand randn randint randperm rand_like randn_like randint_like")
_OF_TENSORS = _functions(torch, "normal bernoulli multinomial poisson binomial _standard_gamma _sample_dirichlet") | (
    _functions(
        torch.Tensor,
        "bernoulli bernoulli_ multinomial normal_ uniform_ random_ exponential_ cauchy_ geometric_ log_normal_",
    )
)


class KeyedDraws(TorchFunctionMode):
    """Hands a generator to every draw of torch, in this thread, that names none.

    Args:
        key: What the numbers depend on.
    """

    def __init__(self, key: int) -> None:
        super().__init__()
        self._key = key
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator(self, device: torch.device) -> torch.Generator:
        """The sample's generator on a device."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._key)
        return self._generators[device]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if given.get("generator") is None and (func in _NEW or func in _OF_TENSORS):
            like = next((value for value in args if isinstance(value, torch.Tensor)), None)
            place = given.get("device")
            if place is None:
                place = torch.get_default_device() if like is None else like.device
            given = {**given, "generator": self.generator(torch.device(place))}
        return func(*args, **given)


class SampleFunctions:
    """The functions of a recipe, ready to be called by several threads.

    Args:
        functions: In order.
        backend: The name of the backend, for messages.
    """

    def __init__(self, functions: tuple[SampleFunction, ...], backend: str) -> None:
        self._functions, self._backend = functions, backend
        self._names = ", ".join(function.name for function in functions)
        self._warned = False
        self._count = itertools.count()
        self._spent_s = 0.0
        self._lock = threading.Lock()

    def __call__(self, image: torch.Tensor, key: int) -> torch.Tensor:
        """What the functions make of one image.

        Args:
            image: float32 (3, height, width); may be written to.
            key: Of the sample: `Plan.function_key`.

        Raises:
            BackendError: A function that fails, or returns something else than such an image.
        """
        number = next(self._count)
        if number < _WATCHED:
            self._watch(image.clone(), key)
        started = time.perf_counter()
        made = self._run(image, key)
        if number < _TIMED:
            self._time(time.perf_counter() - started, number)
        return made

    def _run(self, image: torch.Tensor, key: int) -> torch.Tensor:
        shape = image.shape
        with torch.no_grad(), KeyedDraws(key) as draws:
            for function in self._functions:
                try:
                    image = function.fn(image, draws.generator(image.device))
                except Exception as error:
                    raise self._error(f"{function.name!r} failed: {error!r}") from error
                if not isinstance(image, torch.Tensor) or image.shape != shape or not image.is_floating_point():
                    got = f"{image.dtype} {tuple(image.shape)}" if isinstance(image, torch.Tensor) else repr(image)
                    raise self._error(
                        f"{function.name!r} returned {got}: it must return floats of shape {tuple(shape)}, as it got"
                    )
        return image

    def _watch(self, image: torch.Tensor, key: int) -> None:
        """Warn where the numbers come from elsewhere: the same key, and another result."""
        before = _elsewhere()
        first = self._run(image.clone(), key)
        if _elsewhere() == before:
            return
        if any(not torch.equal(first, self._run(image.clone(), key)) for _ in range(_REPEATS)):
            with self._lock:
                warned, self._warned = self._warned, True
            if not warned:
                _logger.warning(
                    "%s: draws from Python's random, from NumPy's global generator, or from torch's in a way that "
                    "takes no generator; these numbers are neither reproducible nor kept apart by sample. Draw with "
                    "torch.rand and the like, or from the generator that is handed in",
                    self._names,
                )

    def _time(self, seconds: float, number: int) -> None:
        with self._lock:
            self._spent_s += seconds
            if number == _TIMED - 1:
                _logger.warning(
                    "%s: %.2f ms of a thread for each image (mean of the first %d)",
                    self._names,
                    1e3 * self._spent_s / _TIMED,
                    _TIMED,
                )

    def _error(self, what: str) -> BackendError:
        return BackendError(f"the function {what}", backend=self._backend, stage="function")


def _elsewhere() -> object:
    """The state of the generators that cannot be keyed."""
    numpy_state = np.random.get_state(legacy=False)
    return random.getstate(), repr(numpy_state), torch.default_generator.get_state().numpy().tobytes()


def before_functions(recipe: Recipe) -> Recipe:
    """What a backend does before the functions run: floats of 32 bits, plane by plane."""
    return replace(recipe, output=Output()) if recipe.sample_functions else recipe


def with_functions(apply_row: ApplyRow, recipe: Recipe, backend: str) -> ApplyRow:
    """A function for one row with the recipe's functions behind it.

    Args:
        apply_row: Made for `before_functions(recipe)`.
        recipe: With its functions and output.
        backend: The name of the backend, for messages.
    """
    if not recipe.sample_functions:
        return apply_row
    functions = SampleFunctions(recipe.sample_functions, backend)

    def apply(record: Record, header: Header, plan: Plan, row: int, out: torch.Tensor) -> None:
        image = torch.empty(out.shape, dtype=torch.float32)
        apply_row(record, header, plan, row, image)
        out.copy_(functions(image, _key(plan, row)))

    return apply


def _key(plan: Plan, row: int) -> int:
    assert plan.function_key is not None, "drawn for every recipe with such functions"
    return int(plan.function_key[row])


class WithFunctions:
    """A `Backend` with the recipe's functions behind it, image by image, where its batches are.

    They run when a batch's result is asked for, in the thread and on the stream that asks.

    Args:
        backend: Made for `before_functions(recipe)`; is closed with this one.
        recipe: With its functions and output.
    """

    def __init__(self, backend: Backend, recipe: Recipe) -> None:
        self._backend, self._recipe = backend, recipe
        self._functions = SampleFunctions(recipe.sample_functions, backend.name)

    @property
    def name(self) -> str:
        """See `Backend.name`."""
        return self._backend.name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._backend, name)  # what a backend has to say of itself, such as `note`

    def submit(self, records: Any, headers: Any, plan: Plans) -> BatchFuture:
        """See `Backend.submit`."""
        one = plan if isinstance(plan, Plan) else plan[0]  # several views have a backend each
        return _Later(self._backend.submit(records, headers, plan), self._finished, one)

    def close(self) -> None:
        """See `Backend.close`."""
        self._backend.close()

    def _finished(self, applied: Applied, plan: Plan) -> Applied:
        images = applied.images
        output = self._recipe.output
        layout = torch.channels_last if output.memory_format == "channels_last" else torch.contiguous_format
        found = torch.empty(
            images.shape, dtype=getattr(torch, output.dtype), device=images.device, memory_format=layout
        )
        for row in range(len(images)):
            bad = row in applied.errors
            found[row].copy_(images[row] if bad else self._functions(images[row], _key(plan, row)))
        return Applied(found, applied.errors)


class _Later(BatchFuture):
    """A batch to come, on which more is done when it is asked for."""

    def __init__(self, inner: Any, finish: Callable[[Applied, Plan], Applied], plan: Plan) -> None:
        super().__init__()
        self._inner, self._finish, self._plan = inner, finish, plan
        self._once = threading.Lock()
        self._made: Applied | None = None
        self.add_done_callback(lambda _: inner.cancel() if self.cancelled() else None)
        inner.add_done_callback(self._arrived)

    def _arrived(self, inner: Any) -> None:
        if inner.cancelled():
            self.cancel()
        elif self.set_running_or_notify_cancel():
            error = inner.exception()
            if error is None:
                self.set_result(Applied(torch.empty(0)))  # a mark; `result` asks the other one
            else:
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> Applied:
        super().result(timeout)
        with self._once:
            if self._made is None:
                self._made = self._finish(self._inner.result(), self._plan)
            return self._made
