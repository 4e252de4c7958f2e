"""The public class: checks what it is given and joins graph, feed and engine."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from functools import cache

import torch

from gpupipe.backends.base import Options
from gpupipe.backends.batch_memory import BatchFuture
from gpupipe.backends.dali.engine import Engine
from gpupipe.backends.dali.errors import INSTALL, NAME, boundary, unavailable
from gpupipe.backends.dali.feed import Feed
from gpupipe.backends.dali.handover import HandOver
from gpupipe.backends.submitted import check_submission
from gpupipe.headers import Header
from gpupipe.parallel import usable_cores
from gpupipe.recipe import Recipe
from gpupipe.records import Plan, Record

# DALI shuts all pipelines down when the interpreter ends. Engines must have ended by then, so their threads are stopped
# by a hook that is registered after DALI's, and therefore runs before it.
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@cache
def _stop_engines_at_exit() -> None:
    atexit.register(_stop_engines)


def _stop_engines() -> None:
    for engine in list(_engines):
        engine.stop()


class DaliBackend:
    """Plans applied by a DALI graph.

    Args:
        recipe: What to do to each image.
        device: A CUDA device: the graph runs there, and the batches are there. A CPU: the same graph on DALI's CPU
            operators, for tests and parity without a GPU, not for speed.
        batch_size: The most rows of a batch.
        options: `threads` are DALI's, and as many more decode what DALI does not; `prefetch` batches are in DALI at a
            time; `decode` counts on a GPU.

    Raises:
        BackendUnavailable: nvidia.dali cannot be imported, or there is no such device.
        BackendError: DALI cannot build the graph.

    Parity:
        Against torchvision, in 1/255 of the range: whole chain 0.05 for jitter factors up to 1.8, bicubic 0.3. On a
        GPU twice that (0.3), for the same decoded pixels; with decode="gpu" JPEGs are decoded slightly differently.
        With precision="uint8" the resize is within 1, as torchvision rounds twice there. Operations: 0.02 on equal
        pixels, in uint8 none; where one decides by a threshold or takes the nearest pixel, but for 0.1 % of the values.
    """

    def __init__(self, recipe: Recipe, *, device: torch.device, batch_size: int, options: Options) -> None:
        self._recipe, self._batch_size = recipe, batch_size
        device_id = _check_device(device)
        try:
            from gpupipe.backends.dali import graph
        except Exception as error:  # a broken library raises anything: OSError, AttributeError, ...
            raise unavailable(
                f"nvidia.dali cannot be imported ({type(error).__name__}: {error})",
                missing="nvidia.dali",
                install=INSTALL,
                cause=error,
            ) from error
        threads = options.threads or usable_cores()
        placement = graph.Placement(
            decode="cpu" if device_id is None else options.decode,
            rest="cpu" if device_id is None else "gpu",
            device_id=device_id,
        )
        self._in_part = placement.decode == "cpu"  # the graph decodes regions there
        with boundary("build"):
            pipeline = graph.build(recipe, placement, batch_size=batch_size, threads=threads)
            pipeline.build()
        self._engine = Engine(
            pipeline,
            HandOver(recipe, device if device_id is None else torch.device("cuda", device_id)),
            prefetch=options.prefetch,
            threads=threads,
            exact=placement.decode == "cpu",
        )
        # Runs at close(), or when an unclosed backend is collected.
        self._release = weakref.finalize(self, self._engine.stop)
        self._release.atexit = False
        _engines.add(self._engine)
        _stop_engines_at_exit()

    @property
    def name(self) -> str:
        """See `Backend.name`."""
        return NAME

    def submit(self, records: Sequence[Record], headers: Sequence[Header], plan: Plan) -> BatchFuture:
        """See `Backend.submit`.

        Raises:
            ConfigError: Not between 1 and batch_size records, or not a header and a plan row for each.
            BackendError: The backend is closed, or was made in another process.
        """
        check_submission(records, headers, plan, self._batch_size)
        return self._engine.submit(Feed(self._recipe, records, headers, plan, in_part=self._in_part))

    def close(self) -> None:
        """See `Backend.close`. Waits for the runs that are in DALI, as it cannot give them up."""
        self._release()


def _check_device(device: torch.device) -> int | None:
    """The number of the GPU; None for the CPU."""
    if device.type == "cpu":
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and count:
        index = torch.cuda.current_device() if device.index is None else device.index
        if index < count:
            return index
    raise unavailable(
        f'device="{device}" is not here: torch sees {count} CUDA devices',
        missing="a CUDA device",
        install='Use a machine with an NVIDIA GPU and a CUDA build of torch, or device="cpu"',
    )
