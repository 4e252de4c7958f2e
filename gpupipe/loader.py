"""The public face: joins source, order, plan and backend into what a training loop iterates over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gpupipe import backends
from gpupipe.backends.base import Backend, Options
from gpupipe.checks import check_integer
from gpupipe.collating.columns import IGNORED
from gpupipe.collating.kinds import Collate
from gpupipe.errors import ConfigError, StateError
from gpupipe.faults import BadSamples, OnError, Policy
from gpupipe.fields import Fields
from gpupipe.iteration import Iteration
from gpupipe.passes import BatchCost, Pass
from gpupipe.recipe import Recipe
from gpupipe.remote.counters import RemoteStats
from gpupipe.rng import check_seed
from gpupipe.sampling.choose import choose_ordering
from gpupipe.sampling.orders import EpochOrder, mismatch
from gpupipe.sampling.rank import find_ranks
from gpupipe.sampling.samplers import RankRows, Sharding
from gpupipe.sources import open_source
from gpupipe.sources.base import Source
from gpupipe.state import STATE_VERSION, check_identity, check_state
from gpupipe.views import Views

if TYPE_CHECKING:
    import os

# Python integers are several times larger than those of an array, so not all of an epoch's exist at once.
INDICES_A_TIME = 4096
MAX_BATCH_SIZE = 2**31 - 1
# seed + epoch, DistributedSampler's seed, has to fit torch's generators: below 2**64, with a seed below 2**63.
MAX_EPOCH = 2**63 - 1

Config = TypeVar("Config", Sharding, Options)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderStats:
    """What a Loader has done.

    Attributes:
        batches: Delivered in the epoch that was begun last.
        wait_s, longest_wait_s: How long `next` waited for them, added up and at most.
        cache: Of a source in a remote store: what it has counted in this process since it was opened; else None.
    """

    batches: int
    wait_s: float
    longest_wait_s: float
    cache: RemoteStats | None


class Loader:
    """Batches of images from a source, as a recipe makes them: what `torch.utils.data.DataLoader` is to a dataset.

    The same sample gets the same pixels whatever the batch size, number of threads, world size, and after any resume.
    Every `iter()` is a fresh epoch: one that follows an iteration which delivered a batch takes the next epoch,
    unless `set_epoch` or `load_state_dict` was called in between. A new `iter()` ends the older one. Tensors that were
    handed out are never written to again.

    Args:
        source: What `gpupipe.open_source` takes: a folder of class folders, tar shards, an LMDB environment, a list, a
            folder that `gpupipe pack` made, ...; a torch Dataset; or a `Source`.
        recipe: A `Recipe`; a torchvision transform, which is converted (`Recipe.from_torchvision`); or `Views`, several
            recipes for each image.
        batch_size: Samples in a batch on this rank.
        shuffle: A new order each epoch, that of `torch.utils.data.DistributedSampler` with the same seed; or not.
        seed: For the order and the augmentation; in [0, 2**63).
        sampler: What decides the order instead of `shuffle`: indices, a torch `Sampler` or any other iterable of
            indices, `Weighted`, `Repeated`, `CostAware` or `LengthBuckets`. It orders the whole epoch, the same on
            every rank, unless ``Sharding(sampler_scope="rank")``. Its ``set_epoch`` is called if it has one. Where
            torch.distributed runs, the ranks compare their orders at each epoch's beginning, so all of them must call
            `iter()`.
        drop_last: Leave out the last batch of a rank if it is incomplete.
        backend: "auto", "dali", "numba" or "torchvision"; `loader.backend` says which was chosen, and why.
        device: Of the images and labels: a torch device or its name; None: what the backend is best at.
        sharding: How samples are dealt to processes; None: `Sharding()`, which finds the rank itself.
        fields: What a batch holds, in this order: "image", "label", "index", "key", "path", "valid", "affine", any of
            the source's columns, and what `collate` makes of them: "tokens_mask", "boxes_offsets". Boxes and points
            among the columns stay in pixels of the original image, whatever is done to it: `transform_boxes` moves
            them by "affine".
        collate: What becomes of the columns: a `Collate`; None: numbers and arrays of one shape are stacked, anything
            else stays a list. Or any function, as DataLoader's `collate_fn`: it gets a list with one tuple of fields
            for each sample, and what it returns is handed out, with its tensors on the device.
        on_error: What happens to samples that cannot be read or decoded: "raise", "substitute" or "ignore"; or an
            `OnError`, which explains them, and how many are too many. `loader.errors` lists those met.
        options: `Options` of the backend: threads, prefetch.

    Yields:
        A tuple with one entry for each field. "image": (n, 3, height, width) of the recipe's dtype, with `Views` a
        tuple of these; "label": int64, float32 or whatever the source has, stacked, with `Recipe.mix` float32
        (n, num_classes), and zeros in rows that are not to count; "index": int64 (n,); "valid": bool (n,); "key",
        "path": lists;
        "affine": float32 (n, 2, 3), from pixels of the original image to those of "image".

    Raises:
        ConfigError: An argument that cannot work.
        BackendUnavailable: A backend or device that this machine does not have.
        SourceError: A source that cannot be opened; while iterating: `RecordError` or `DecodeError`, which name the
            sample.
    """

    def __init__(  # noqa: PLR0913 - DataLoader's arguments, which people know; the rest is in config objects
        self,
        source: str | os.PathLike[str] | Source,
        recipe: Recipe | Views | object,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        sharding: Sharding | None = None,
        sampler: object = None,
        fields: Sequence[str] = ("image", "label"),
        collate: Collate | Callable[[list[tuple[Any, ...]]], Any] | None = None,
        on_error: Policy | OnError = "raise",
        options: Options | None = None,
    ) -> None:
        self._recipe = recipe if isinstance(recipe, Recipe | Views) else Recipe.from_torchvision(recipe)
        self._batch_size = check_integer("batch_size", batch_size, 1, MAX_BATCH_SIZE)
        self._drop_last = bool(drop_last)
        self._seed = check_seed(seed)
        self._sharding = _check_kind("sharding", sharding, Sharding)
        if self._sharding.pad == "mask" and drop_last:
            raise ConfigError(
                "drop_last=True leaves samples out, but sharding.pad='mask' promises each exactly once: drop one",
                field="drop_last",
                value=True,
                allowed=False,
            )
        self._ranks = find_ranks(self._sharding.rank, self._sharding.world_size)
        self._options = _check_kind("options", options, Options)
        self._choice = backends.choose(backend, device)
        self._source = open_source(source)
        self._opened = self._source is not source  # what was handed in is not closed
        if len(self._source) == 0:
            raise ConfigError(f"{self._source.uri} has no samples", field="source", value=self._source.uri)
        self._fields = Fields(
            fields,
            self._source,
            collate,
            self._choice.device,
            several_views=isinstance(self._recipe, Views),
            num_classes=_num_classes(self._recipe, fields, self._source),
        )
        self._on_error = _check_on_error(on_error, self._fields.names, self._source)
        self._ordering = choose_ordering(
            sampler,
            self._source,
            shuffle=bool(shuffle),
            seed=self._seed,
            sharding=self._sharding,
            ranks=self._ranks,
            batch_size=self._batch_size,
        )
        self._order: EpochOrder | None = None  # of the current epoch, once it is needed
        self._agreed = False  # whether the other ranks have that order, too
        self._backend: Backend | None = None
        self._release: weakref.finalize[[], Loader] | None = None
        self._closed = False
        self._epoch, self._start = 0, 0
        # Whether the current epoch has delivered a batch, or had none left, so that the next iter() moves on.
        self._begun = False
        self._iteration: Iteration | None = None
        self._bad = BadSamples()

    # What a training loop uses

    def __len__(self) -> int:
        """Batches in a full epoch on this rank."""
        return self._count_batches(start=0)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, as the class says."""
        if self._closed:
            raise StateError("this Loader is closed: make a new one", expected="open", actual="closed")
        self._end_iteration()
        if self._begun:
            self._move_to(self._epoch + 1, 0)
        self._bad = BadSamples(self._epoch)
        self._iteration = Iteration(
            Pass(
                source=self._source,
                recipe=self._recipe,
                backend=self._opened_backend(),
                order=self._agreed_order(),
                rows=self._rows(self._start),
                seed=self._seed,
                epoch=self._epoch,
                batch_size=self._batch_size,
                drop_last=self._drop_last,
                prefetch=self._options.prefetch,
                on_error=self._on_error,
                mask=self._sharding.pad == "mask",
                device=self._choice.device,
                bad=self._bad,
            )
        )
        return _Batches(self, self._iteration)

    def set_epoch(self, epoch: int) -> None:
        """Let the next `iter()` take this epoch: its order and its augmentation.

        The restored epoch keeps the restored position; any other starts from its beginning.
        """
        epoch = check_integer("epoch", epoch, 0, MAX_EPOCH)
        if epoch != self._epoch or self._begun:
            self._move_to(epoch, 0)

    def close(self) -> None:
        """Stop all background work and free what the backend holds. Idempotent.

        A source that was opened here, rather than handed in, is closed, too; a later access opens its files again.
        """
        self._closed = True
        self._end_iteration()
        if self._release is not None:
            self._release()
        if self._opened:
            self._source.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Resuming

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in builtin types: what has been *delivered*; batches in flight do not count.

        Saved on one rank, it restores all ranks (but for samplers of each rank's own that have a generator or a state:
        those need each rank's state). After the last batch of an epoch, it is the beginning of the next one.
        """
        epoch, delivered = self._position()
        held = self._order if epoch == self._epoch else None
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "delivered": delivered,
            "order": self._ordering.definition() if held is None else held.definition(),
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on where `state_dict` stood. The next `iter()` delivers what was not delivered; nothing is replayed.

        Batch size, threads, backend and world size may differ: the samples left are the same, each with the same
        pixels; only what pads or drops the tail is worked out anew. With several ranks, all of them load.

        Args:
            state: From `state_dict`.
            strict: False accepts another recipe, at the beginning of an epoch.

        Raises:
            StateError: The state belongs to another data set, order or recipe; the message says what differs.
        """
        epoch, delivered = check_state(state)
        check_identity(state, self._identity(), self._source.uri, strict=strict or delivered > 0)
        order = self._ordering.restore(state["order"], epoch, begun=delivered > 0)
        length = self._ordering.length(epoch) if order is None else order.length
        if length is not None and delivered > length:
            raise mismatch({"delivered": (delivered, f"at most {length}")})
        self._move_to(epoch, delivered)
        self._order = order

    # What one may ask

    @property
    def backend(self) -> backends.Choice:
        """Which backend runs, on which device, and why."""
        return self._choice

    @property
    def options(self) -> Options:
        """How the backend works."""
        return self._options

    @property
    def last_cost(self) -> BatchCost | None:
        """What the batch delivered last took to load; None before the first."""
        return None if self._iteration is None else self._iteration.last_cost

    @property
    def dataset(self) -> Source:
        """The source."""
        return self._source

    @property
    def recipe(self) -> Recipe | Views:
        """What is done to each image."""
        return self._recipe

    @property
    def batch_size(self) -> int:
        """Samples in a batch on this rank."""
        return self._batch_size

    @property
    def global_batch_size(self) -> int:
        """Samples in a batch over all ranks: batch_size x world_size, what the learning rate depends on."""
        return self._batch_size * self._ranks.world_size

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or that the next `iter()` takes if none has begun."""
        return self._epoch

    @property
    def remaining(self) -> int:
        """Batches of this epoch not delivered yet on this rank."""
        if self._begun and self._iteration is not None:
            return self._iteration.batches - self._iteration.delivered_batches
        return self._count_batches(self._start)

    @property
    def stats(self) -> LoaderStats:
        """What the epoch that was begun last has cost so far, and what reading from a remote store has."""
        now = self._iteration
        return LoaderStats(
            batches=0 if now is None else now.delivered_batches,
            wait_s=0.0 if now is None else now.wait_s,
            longest_wait_s=0.0 if now is None else now.longest_wait_s,
            cache=getattr(self._source, "cache_stats", None),
        )

    @property
    def errors(self) -> BadSamples:
        """The bad samples that this rank has met in the epoch that was begun last."""
        return self._bad

    @property
    def sampler(self) -> EpochSampler:
        """For frameworks that look for `loader.sampler.set_epoch`."""
        return EpochSampler(self)

    def __repr__(self) -> str:
        return (
            f"Loader({self._source.uri}: {len(self._source)} samples, {len(self)} batches of {self._batch_size} "
            f"({self.global_batch_size} over all ranks), rank {self._ranks.rank} of {self._ranks.world_size}, "
            f"{self._choice})"
        )

    # Inside

    def _held_order(self) -> EpochOrder:
        """The order of the current epoch, as far as this rank knows it."""
        if self._order is None:
            self._order = self._ordering.draw(self._epoch)
        return self._order

    def _agreed_order(self) -> EpochOrder:
        """The order of the current epoch. All ranks call this together."""
        if not self._agreed:
            self._order = self._ordering.agree(self._held_order, self._ranks)
            self._agreed = True
        return self._held_order()

    def _rows(self, start: int) -> RankRows:
        known = self._ordering.length(self._epoch) if self._order is None else self._order.length
        return RankRows.deal(
            self._held_order().length if known is None else known,
            start=start,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            pad=self._sharding.pad,
            batch_size=self._batch_size,
        )

    def _count_batches(self, start: int) -> int:
        return self._rows(start).batches(self._batch_size, drop_last=self._drop_last)

    def _position(self) -> tuple[int, int]:
        """Epoch, and how much of its global order has been delivered."""
        if not self._begun or self._iteration is None:
            return self._epoch, self._start
        if self._iteration.finished:
            return self._epoch + 1, 0
        return self._epoch, self._iteration.delivered

    def _identity(self) -> dict[str, Any]:
        """What must be the same in the run that a state is loaded into, the order apart."""
        return {
            "seed": self._seed,
            "samples": len(self._source),
            "source": self._source.fingerprint,
            "recipe": self._recipe.fingerprint,
            "recipe_json": self._recipe.to_json(),  # to say what differs
        }

    def _opened_backend(self) -> Backend:
        if self._backend is None:
            self._backend = backends.create(
                self._choice.name,
                self._recipe,
                device=self._choice.device,
                batch_size=self._batch_size,
                options=self._options,
            )
            self._release = weakref.finalize(self, self._backend.close)
            note = getattr(self._backend, "note", "")
            if note:
                self._choice = replace(self._choice, reason=f"{self._choice.reason}; {note}")
        return self._backend

    def _move_to(self, epoch: int, start: int) -> None:
        self._end_iteration()
        self._iteration = None
        self._epoch, self._start, self._begun = epoch, start, False
        self._order, self._agreed = None, False

    def _end_iteration(self) -> None:
        if self._iteration is not None:
            self._iteration.close()

    def _next(self, iteration: Iteration) -> Any:
        if iteration is not self._iteration:
            raise StateError(
                "this iterator was ended by a newer iter() of the same Loader, by set_epoch or by load_state_dict: "
                "make two Loaders to iterate twice at once",
                expected="the newest iterator",
                actual="an older one",
            )
        if iteration.batches == 0:
            self._begun = True
        batch = iteration.next_batch(self._fields)
        self._begun = True
        return batch


class _Batches(Iterator[Any]):
    """What `iter(loader)` returns. Keeps its Loader alive."""

    def __init__(self, loader: Loader, iteration: Iteration) -> None:
        self._loader, self._iteration = loader, iteration

    def __next__(self) -> Any:
        return self._loader._next(self._iteration)

    @property
    def was_ready(self) -> bool:
        """Whether the last batch had been loaded when it was asked for."""
        return self._iteration.last_was_ready

    def __len__(self) -> int:
        return self._iteration.batches


class EpochSampler:
    """The sampler that a Loader shows to frameworks: this rank's indices in the coming epoch's order."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """As `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        return self._loader._rows(0).count

    def __iter__(self) -> Iterator[int]:
        order, rows = self._loader._held_order(), self._loader._rows(0)
        for first in range(0, rows.count, INDICES_A_TIME):
            indices, _ = order.at(rows.positions(first, min(first + INDICES_A_TIME, rows.count)))
            yield from indices.tolist()


def _check_kind(field: str, value: Config | None, kind: type[Config]) -> Config:
    if value is None:
        return kind()
    if isinstance(value, kind):
        return value
    raise ConfigError(
        f"{field}={value!r} is not valid: it must be gpupipe.{kind.__name__}(...) or None",
        field=field,
        value=value,
        allowed=kind,
    )


def _num_classes(recipe: Recipe | Views, fields: Sequence[str], source: Source) -> int | None:
    """Length of the soft labels; None where labels stay as they are."""
    if isinstance(recipe, Views) or recipe.mix is None or "label" not in fields:
        return None
    labels = source.labels
    if labels is not None and (labels.dtype.kind not in "iub" or labels.ndim != 1):
        raise ConfigError(
            f"mix={recipe.mix!r} makes soft labels from one number for each sample, but the labels of {source.uri} are "
            f"{labels.dtype} of shape {labels.shape[1:]}: leave 'label' out of fields, and only images are mixed",
            field="mix",
            value=str(labels.dtype),
            allowed="labels that are integers",
        )
    classes = getattr(source, "classes", None)
    found = recipe.mix.num_classes or (None if classes is None else len(classes))
    if not found:
        raise ConfigError(
            f"{source.uri} does not say how many classes there are, which soft labels need: give Mix(num_classes=...)",
            field="mix.num_classes",
            value=recipe.mix.num_classes,
            allowed="an integer of at least 1",
        )
    return found


def _check_on_error(on_error: Policy | OnError, fields: tuple[str, ...], source: Source) -> OnError:
    found = on_error if isinstance(on_error, OnError) else OnError(on_error)
    if found.policy == "ignore" and "label" in fields and "valid" not in fields:
        labels = source.labels
        if labels is None or labels.dtype.kind not in "iub" or labels.ndim != 1:
            kind = "not known before they are read" if labels is None else f"{labels.dtype} of shape {labels.shape[1:]}"
            raise ConfigError(
                f"on_error='ignore' marks bad samples by the label {IGNORED}, but the labels of {source.uri} are "
                f"{kind}: add 'valid' to fields, which tells them apart, or use on_error='substitute'",
                field="on_error",
                value="ignore",
                allowed=("raise", "substitute", "ignore with 'valid' in fields"),
            )
    return found
