"""What every backend is: something that takes encoded records and a plan, and hands back a batch later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from gpupipe.errors import ConfigError, DecodeError
from gpupipe.headers import Header
from gpupipe.records import Plan, Record

if TYPE_CHECKING:
    import torch


Decode = Literal["gpu", "hardware", "cpu"]
DECODE: tuple[Decode, ...] = get_args(Decode)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a backend works; never what comes out of it (`decode` on a GPU excepted, as documented there).

    Args:
        threads: Worker threads of the backend; None: one for each core this process may use.
        prefetch: Batches in work or waiting ahead of the one handed out.
        decode: On a GPU: "gpu" decodes JPEGs there (pixels differ slightly from a CPU's); "hardware" gives those that
            they take to its JPEG engines, where it has them (A100, H100 and later; again slightly other pixels), and
            the rest to "gpu"; "cpu" decodes on the host, bit-exact, and does the rest on the GPU.

    Host memory in flight is that of prefetch + 1 batches, whatever the length of the epoch: their encoded files and
    their finished images. Decoded pixels come on top: of the one image that each thread is at, up to 18 bytes a pixel
    with "torchvision" and 10 with the others; with "dali" also those of the crops of these batches, 6 bytes a pixel,
    and for `Views` that are decoded on the host the whole images of these batches, 3 bytes a pixel.
    DALI keeps the memory that its largest batch took until the process ends, and uses it again.
    """

    threads: int | None = None
    prefetch: int = 2
    decode: Decode = "gpu"

    def __post_init__(self) -> None:
        for name, value, allowed in (("threads", self.threads, "None or "), ("prefetch", self.prefetch, "")):
            if value is None and allowed:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"options.{name}={value!r} is not valid: it must be {allowed}an integer of at least 1",
                    field=f"options.{name}",
                    value=value,
                    allowed=f"{allowed}an integer >= 1",
                )
        if self.decode not in DECODE:
            raise ConfigError(
                f"options.decode={self.decode!r} is not valid: it must be 'gpu', 'hardware' or 'cpu'",
                field="options.decode",
                value=self.decode,
                allowed=DECODE,
            )


@dataclass(frozen=True, slots=True)
class Applied:
    """A finished batch.

    Attributes:
        images: (n, 3, height, width) of the recipe's dtype and memory format, on the backend's device. It belongs to
            whoever holds it: no later batch writes into it.
        errors: Row -> why that record could not be decoded; its image is all zeros.
        more: Those of the second and further views, if there are several.
    """

    images: torch.Tensor
    errors: Mapping[int, DecodeError] = field(default_factory=dict)
    more: tuple[torch.Tensor, ...] = ()

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """The images of each view."""
        return self.images, *self.more


Plans = Plan | tuple[Plan, ...]
"""A plan; or one for each view, of the same samples."""


class Backend(Protocol):
    """Applies plans of one recipe, or of `Views`.

    A backend knows nothing of sources, samplers or epochs, and draws no random numbers. The same record and plan row
    give the same pixels whatever else is in the batch.
    """

    @property
    def name(self) -> str:
        """The name it is asked for by: "torchvision", "dali", ..."""

    def submit(self, records: Sequence[Record], headers: Sequence[Header], plan: Plans) -> Future[Applied]:
        """Begin a batch and return at once. Batches may be finished in any order.

        Args:
            records: n encoded images, 1 <= n <= the batch size the backend was made for.
            headers: What `gpupipe.headers.scan` said of each.
            plan: n rows, made for the sizes in those headers; a tuple of as many plans as there are views, where the
                backend was made for `Views`.

        Returns:
            The batch to come. An undecodable record is no exception: it is in `Applied.errors`. The future's
            exception is a BackendError, when the backend itself fails.
        """

    def close(self) -> None:
        """Stop the work, drop what is unfinished (its futures are cancelled), and free everything. Idempotent."""
