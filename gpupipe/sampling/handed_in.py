"""Orders that the user hands in: a sequence of indices, or any sampler that yields them.

A sampler is asked once an epoch, and what it yields is held as an array. It must yield the same again after a resume:
it is told the epoch if it has ``set_epoch``, and its ``generator`` (a torch.Generator) or else its own ``state_dict``
goes into the Loader's state as it was before the epoch. A hash of the order shows whether that was enough.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gpupipe.errors import ConfigError, StateError
from gpupipe.sampling import peers
from gpupipe.sampling.orders import I64, ArrayOrder, Definition, EpochOrder, check_same, digest
from gpupipe.sampling.rank import Ranks
from gpupipe.sampling.samplers import Scope, agree_on

if TYPE_CHECKING:
    import torch

_REMEDY = (
    "A sampler resumes if it has set_epoch(epoch), a generator= of its own, or state_dict and load_state_dict, and "
    "draws from nothing else (RandomSampler(...) without generator= draws from torch's global one); or hand in the "
    "indices themselves"
)


class HandedOrder(ArrayOrder):
    """An order that a sampler yielded.

    Args:
        indices: int64 (n,): the whole epoch's; or, with `of_rank`, this rank's own.
        made_from: Its definition, but for the entry "order", the hash.
    """

    def __init__(self, indices: I64, made_from: Definition) -> None:
        super().__init__(indices, length=len(indices), made_from=made_from, repeats=True)

    def definition(self) -> dict[str, Any]:
        """See `EpochOrder.definition`."""
        return dict(self._made_from) | {"order": self.hash}


class RankOrder(HandedOrder):
    """A rank's own part of an order, of which the other parts are not known.

    Rows are interleaved with those of the other ranks, as if they had been dealt. A rank cannot count what came on the
    others, so it counts its own and keeps clear of theirs: occurrence = earlier ones on this rank x world_size + rank.
    """

    def __init__(self, indices: I64, made_from: Definition, ranks: Ranks) -> None:
        super().__init__(indices, made_from)
        self._ranks = ranks
        self.expected: Definition | None = None  # of the saved order that this must be

    @property
    def length(self) -> int:
        """See `EpochOrder.length`."""
        return self._length * self._ranks.world_size

    def at(self, positions: I64) -> tuple[I64, I64]:
        """See `EpochOrder.at`; positions are of this rank's rows only."""
        indices, occurrences = super().at((positions - self._ranks.rank) // self._ranks.world_size)
        return indices, occurrences * self._ranks.world_size + self._ranks.rank


class HandedOrdering:
    """The orders of what was handed in.

    Args:
        sampler: Indices, or an object that yields them each time it is iterated over.
        samples: In the data set.
        scope: Whose they are: the whole epoch's, or this rank's.
        ranks: This process.
    """

    def __init__(self, sampler: object, samples: int, *, scope: Scope, ranks: Ranks) -> None:
        if not isinstance(sampler, Iterable):
            raise _refused(sampler, f"{type(sampler).__name__} cannot be iterated over")
        if isinstance(sampler, Iterator):  # not by iter(sampler), which may draw from a generator
            raise _refused(
                sampler, "an iterator is spent after one epoch: hand in a list, or an object with __iter__ and __len__"
            )
        _check_rank(sampler, scope, ranks)
        self._sampler, self._samples, self._scope, self._ranks = sampler, samples, scope, ranks
        self._fixed = _array(sampler)
        if self._fixed is not None:
            self._check(self._fixed)

    def length(self, epoch: int) -> int | None:
        """See `Ordering.length`."""
        del epoch
        try:
            own = len(self._sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None
        return own * (self._ranks.world_size if self._scope == "rank" else 1)

    def draw(self, epoch: int) -> HandedOrder:
        """See `Ordering.draw`."""
        made_from = self._definition()
        if self._fixed is not None:
            indices = self._fixed
        else:
            set_epoch = getattr(self._sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            indices = self._ask()
        return RankOrder(indices, made_from, self._ranks) if self._scope == "rank" else HandedOrder(indices, made_from)

    def agree(self, held: Callable[[], EpochOrder], ranks: Ranks) -> EpochOrder:
        """See `Ordering.agree`. A rank's own part becomes the whole order where the ranks can talk to each other."""
        if self._scope == "global":
            return agree_on("the order that the sampler yields", held, ranks)
        own = cast("RankOrder", held() if not peers.connected(ranks) else _own_of_all(held, ranks))
        whole = self._whole(own, ranks) if ranks.world_size == 1 or peers.connected(ranks) else own
        if own.expected is not None:
            _check_again(own.expected, whole.definition())
        return whole

    def definition(self) -> dict[str, Any]:
        """See `Ordering.definition`."""
        return self._definition() | {"order": None if self._fixed is None else digest(self._fixed)}

    def restore(self, saved: Definition, epoch: int, *, begun: bool) -> EpochOrder | None:
        """See `Ordering.restore`."""
        mine = self.definition()
        free = {"before", "counted", "rank"}
        if self._fixed is None:
            free.add("order")
        if self._scope == "rank" and saved.get("scope") == "rank":
            free |= {"world_size", "order"}
            if begun and saved.get("world_size") != mine["world_size"]:
                raise StateError(
                    f"the state was saved in the middle of an epoch of {saved.get('world_size')} processes, each with "
                    f"a sampler of its own, and here are {mine['world_size']}: those samplers cannot yield the rest. "
                    "Go on with as many processes, or load a state saved at the end of an epoch; a sampler that "
                    "yields the order of all ranks (sampler_scope='global') resumes with any number",
                    expected=mine["world_size"],
                    actual=saved.get("world_size"),
                )
        check_same(saved, mine, ignore=frozenset(free))
        self._restore_sampler(saved)
        if not begun:
            return None
        order = self.draw(epoch)
        if isinstance(order, RankOrder):
            order.expected = saved  # what the other ranks have is known in `agree` only
        elif order.hash != saved.get("order"):
            raise _not_again(saved.get("order"), order.hash)
        return order

    # Inside

    def _definition(self) -> dict[str, Any]:
        found: dict[str, Any] = {"kind": "sampler" if self._fixed is None else "indices", "scope": self._scope}
        if self._scope == "rank":
            found |= {"world_size": self._ranks.world_size, "counted": "rank", "rank": self._ranks.rank}
        return found | {"before": self._before()}

    def _before(self) -> dict[str, Any]:
        """What the sampler goes by, besides the epoch."""
        if self._fixed is not None:
            return {}
        generator = _generator(self._sampler)
        if generator is not None:
            return {"generator": generator.get_state().numpy().tobytes().hex()}
        own = getattr(self._sampler, "state_dict", None)
        # One that knows epochs is told the epoch; its state is about how far an iterator got (torchdata's samplers).
        if callable(own) and not hasattr(self._sampler, "set_epoch"):
            return {"state": copy.deepcopy(own())}
        return {}

    def _restore_sampler(self, saved: Definition) -> None:
        before = saved.get("before")
        if not before:
            return
        if self._scope == "rank" and saved.get("rank") != self._ranks.rank:
            raise StateError(
                f"the state holds the sampler of rank {saved.get('rank')}, and this is rank {self._ranks.rank}: each "
                "rank's sampler has a generator or state of its own, so save a state on every rank, and load each "
                "rank's own",
                expected=self._ranks.rank,
                actual=saved.get("rank"),
            )
        generator = _generator(self._sampler)
        load = getattr(self._sampler, "load_state_dict", None)
        if "generator" in before and generator is not None:
            import torch

            generator.set_state(torch.frombuffer(bytearray.fromhex(before["generator"]), dtype=torch.uint8))
        elif "state" in before and callable(load):
            load(copy.deepcopy(before["state"]))
        else:
            had = "a generator" if "generator" in before else "a state_dict"
            raise StateError(
                f"the sampler of the saved run had {had} of its own, and this one has not: hand in such a sampler",
                expected=had,
                actual=None,
            )

    def _ask(self) -> I64:
        assert isinstance(self._sampler, Iterable)
        try:
            indices = np.fromiter(map(operator.index, self._sampler), np.int64)
        except TypeError as error:
            raise _refused(
                self._sampler,
                f"it must yield one integer at a time ({error}). A sampler of batches has a sampler inside: hand in "
                "that one, and batch_size",
            ) from error
        except OverflowError as error:
            raise _refused(self._sampler, "it yields indices beyond 2**63") from error
        self._check(indices)
        promised = self.length(0)
        if promised is not None and self._scope == "rank":
            promised //= self._ranks.world_size
        if promised is not None and promised != len(indices):
            raise _refused(
                self._sampler,
                f"it yielded {len(indices)} indices, but its len() is {promised}, so that len(loader) would be wrong",
            )
        return indices

    def _check(self, indices: I64) -> None:
        if not len(indices):
            raise _refused(
                self._sampler,
                "it yields no indices (torchvision's RASampler rounds down to multiples of 256 samples)",
            )
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= self._samples:
            wrong = low if low < 0 else high
            raise _refused(
                self._sampler,
                f"it yields index {wrong}, but the data set has {self._samples} samples, numbered from 0",
            )

    def _whole(self, order: RankOrder, ranks: Ranks) -> HandedOrder:
        """The order of all ranks, row by row."""
        own = cast("I64", order.indices)
        whole = own if ranks.world_size == 1 else peers.all_rows(own, ranks).T.ravel()
        return HandedOrder(whole, order.definition() | {"counted": "global"})


def _own_of_all(held: Callable[[], EpochOrder], ranks: Ranks) -> EpochOrder:
    """The part of this rank, or ConfigError on every rank unless all ranks have parts of one length."""
    with peers.telling_of_errors(ranks):
        own = held()
    counts = peers.compare([own.length, 0], ranks)[:, 0] // ranks.world_size
    if (counts != counts[0]).any():
        raise ConfigError(
            f"the samplers of the {ranks.world_size} ranks yield {counts.tolist()} indices: they must yield equally "
            "many, or one rank waits for the others for ever. Pad or drop in the sampler, as DistributedSampler does",
            field="sampler",
            value=counts.tolist(),
            allowed="equally many on every rank",
        )
    return own


def _check_rank(sampler: object, scope: Scope, ranks: Ranks) -> None:
    """Raise ConfigError for a sampler that says, as DistributedSampler does, that it is another rank's."""
    count, rank = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
    if not isinstance(count, int) or not isinstance(rank, int):
        return
    if scope == "global" and count > 1:
        raise _refused(
            sampler,
            f"it yields the part of rank {rank} of {count} only (num_replicas={count}), but is taken for the order of "
            "all ranks: pass Sharding(sampler_scope='rank')",
        )
    if scope == "rank" and (rank, count) != (ranks.rank, ranks.world_size):
        raise _refused(
            sampler,
            f"it yields the part of rank {rank} of {count}, but this is rank {ranks.rank} of {ranks.world_size} (from "
            f"{ranks.found})",
        )


def _array(sampler: object) -> I64 | None:
    """A sequence of indices as a copy; None for a sampler."""
    array_like = hasattr(sampler, "__array__")
    if not array_like and not isinstance(sampler, Sequence):
        return None
    found = np.asarray(sampler)
    if found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
        raise _refused(sampler, f"indices must be one row of integers, not {found.dtype} of shape {found.shape}")
    return found.astype(np.int64)


def _generator(sampler: object) -> torch.Generator | None:
    import torch

    found = getattr(sampler, "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _refused(sampler: object, why: str) -> ConfigError:
    return ConfigError(
        f"sampler={_short(sampler)} is not valid: {why}",
        field="sampler",
        value=sampler,
        allowed="indices, an iterable of indices, gpupipe.Weighted or gpupipe.CostAware",
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_again(saved: Definition, mine: Definition) -> None:
    """Raise StateError unless a rank-scoped order is the saved one, as far as this rank can tell."""
    counted = saved.get("counted")
    if counted != mine["counted"]:
        raise StateError(
            "the state was saved "
            + ("with" if counted == "global" else "without")
            + " torch.distributed running, which decides how repeated samples are counted over the ranks (and so "
            "their crops): do the same here, before the first iter()",
            expected=mine["counted"],
            actual=counted,
        )
    if saved.get("order") != mine["order"] and (counted == "global" or saved.get("rank") == mine["rank"]):
        raise _not_again(saved.get("order"), mine["order"])


def _not_again(saved: object, here: str) -> StateError:
    return StateError(
        "the state was saved in the middle of an epoch whose order this sampler does not yield again, so the samples "
        f"that are left are not known. {_REMEDY}",
        expected=here,
        actual=saved,
    )
