"""What becomes of each column of a batch: frozen definitions, checked when they are made. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gpupipe.errors import ConfigError

if TYPE_CHECKING:
    import torch

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)
DType = str
Missing = Literal["raise", "empty"]
TooLong = Literal["raise", "keep_first", "keep_last"]

MASK, LENGTHS, OFFSETS = "mask", "lengths", "offsets"


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """A column that stays a list, whatever its values are: captions, names, metadata.

    Args:
        column: The column that it is made of, if that has another name; behind a colon the way to a value inside it:
            "json:annotation.caption". A number is a place in a list: "json:captions.0".
    """

    column: str | None = None

    def __post_init__(self) -> None:
        _check_path(self.column)

    def parts(self, name: str) -> tuple[str, ...]:
        """The names of what comes out of a column of this name."""
        return (name,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A column of numbers, or of arrays, tensors or lists of one shape: one tensor (n, ...).

    Args:
        dtype: Of the tensor. None: int64, float32 or bool for Python's numbers, and that of arrays and tensors, which
            then must all have the same.
        column: See `Keep`.
    """

    dtype: DType | torch.dtype | None = None
    column: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        _check_path(self.column)

    def parts(self, name: str) -> tuple[str, ...]:
        """See `Keep.parts`."""
        return (name,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pad:
    """A column of sequences of different lengths: one tensor (n, width, ...), filled up with a value.

    Sequences are lists, arrays or tensors that differ in their first dimension only; bytes are uint8. Beside a column
    "tokens" there are "tokens_mask", bool (n, width), True where a value is a real one, and "tokens_lengths", int64
    (n,).

    Args:
        value: What fills up; it must exist in the dtype.
        to: Width: "longest", that of the batch's longest sequence; or a number, the same for every batch.
        multiple: The width is rounded up to a multiple of this: tensor cores like 8, compiled models few widths.
        limit: No sequence may be longer than this, before rounding; None: no limit, or `to` where that is a number.
        too_long: What happens to longer ones: "raise", or only their beginning or their end is kept.
        side: Where the filling is.
        mask, lengths: Whether those are made.
        dtype: See `Stack`.
        item: Shape of one item, (4,) for boxes. None: found in the batch; say it where all sequences of a batch may be
            empty lists.
        missing: What a None is: an error, or an empty sequence.
        column: See `Keep`.

    Source: torch.nn.utils.rnn.pad_sequence with batch_first=True gives the same tensor for to="longest".
    """

    value: float = 0
    to: Literal["longest"] | int = "longest"
    multiple: int = 1
    limit: int | None = None
    too_long: TooLong = "raise"
    side: Literal["right", "left"] = "right"
    mask: bool = True
    lengths: bool = True
    dtype: DType | torch.dtype | None = None
    item: Sequence[int] | None = None
    missing: Missing = "raise"
    column: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        object.__setattr__(self, "item", _shape(self.item))
        _check_path(self.column)
        if isinstance(self.value, str) or not isinstance(self.value, bool | int | float):
            raise _invalid("value", self.value, "a number")
        _check_whole("multiple", self.multiple, 1)
        if self.to != "longest":
            _check_whole("to", self.to, 1, "'longest' or ")
            if self.to % self.multiple:
                raise _invalid("to", self.to, f"a multiple of multiple={self.multiple}")
        if self.limit is not None:
            _check_whole("limit", self.limit, 1, "None or ")
            if self.to != "longest" and self.limit > self.to:
                raise _invalid("limit", self.limit, f"at most to={self.to}")
        _check_choice("too_long", self.too_long, ("raise", "keep_first", "keep_last"))
        _check_choice("side", self.side, ("right", "left"))
        _check_choice("missing", self.missing, ("raise", "empty"))
        if self.too_long != "raise" and self.most is None:
            raise _invalid("too_long", self.too_long, "'raise' where neither limit nor to says what too long is")

    @property
    def most(self) -> int | None:
        """The longest sequence that is not too long; None: any length goes."""
        if self.limit is not None:
            return self.limit
        return None if self.to == "longest" else int(self.to)

    def parts(self, name: str) -> tuple[str, ...]:
        """See `Keep.parts`."""
        made = [name]
        if self.mask:
            made.append(f"{name}_{MASK}")
        if self.lengths:
            made.append(f"{name}_{LENGTHS}")
        return tuple(made)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ragged:
    """A column of sequences of different lengths, without padding.

    With layout="offsets" a column "boxes" is all sequences one after another, (total, ...), and "boxes_offsets" says
    where each begins: int64 (n + 1,); sequence i is ``boxes[offsets[i] : offsets[i + 1]]``. With layout="nested" it is
    one nested tensor of torch (layout torch.jagged), and nothing beside it.

    Args:
        layout: "offsets" or "nested".
        dtype, item, missing, column: See `Pad`.
    """

    layout: Literal["offsets", "nested"] = "offsets"
    dtype: DType | torch.dtype | None = None
    item: Sequence[int] | None = None
    missing: Missing = "raise"
    column: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        object.__setattr__(self, "item", _shape(self.item))
        _check_path(self.column)
        _check_choice("layout", self.layout, ("offsets", "nested"))
        _check_choice("missing", self.missing, ("raise", "empty"))

    def parts(self, name: str) -> tuple[str, ...]:
        """See `Keep.parts`."""
        return (name, f"{name}_{OFFSETS}") if self.layout == "offsets" else (name,)


Kind = Keep | Stack | Pad | Ragged
Default = Kind | Literal["infer", "drop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collate:
    """How records become a batch: hand it to a `Loader` as ``collate=``, or to a torch DataLoader as ``collate_fn=``.

    Called with samples, it does what `gpupipe.collate` does.

    Args:
        columns: Name -> what becomes of that column.
        default: What becomes of columns that are not named. "infer": numbers become a tensor (int64, float32, bool),
            and so do arrays and tensors of one shape; everything else stays a list. "drop": they are left out (of
            what `collate` returns; a Loader's `fields` say what it returns).
        names: Of the entries of samples that are tuples, in their order. Without them, such samples become a tuple
            with one entry for each of theirs, all of the default kind.

    >>> import gpupipe as gp
    >>> pad = gp.Collate(columns={"tokens": gp.Pad(multiple=4)})
    >>> batch = pad([{"tokens": [5, 6, 7], "text": "a cat"}, {"tokens": [8], "text": "a"}])
    >>> batch["tokens"].tolist(), batch["tokens_lengths"].tolist(), batch["text"]
    ([[5, 6, 7, 0], [8, 0, 0, 0]], [3, 1], ['a cat', 'a'])
    """

    columns: Mapping[str, Kind]
    default: Default = "infer"
    names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.columns, Mapping) or not all(
            isinstance(name, str) and isinstance(kind, Kind) for name, kind in self.columns.items()
        ):
            raise _invalid("columns", self.columns, "a dict from names to Stack, Pad, Ragged or Keep")
        object.__setattr__(self, "columns", dict(self.columns))
        if not isinstance(self.default, Kind):
            _check_choice("default", self.default, ("infer", "drop"), "Stack, Pad, Ragged, Keep, ")
            if not self.columns and self.default == "drop":
                raise _invalid("default", self.default, "'infer' or a kind where no columns are named")
        elif self.default.column is not None:
            raise _invalid("default", self.default, "a kind without column=, as it is for several")
        if self.names is not None:
            if isinstance(self.names, str) or not all(isinstance(name, str) for name in self.names):
                raise _invalid("names", self.names, "a sequence of strings")
            object.__setattr__(self, "names", tuple(self.names))
        check_parts(self.columns)

    def __call__(self, samples: Sequence[Any]) -> Any:
        """`gpupipe.collate` with this specification."""
        from gpupipe.collating.samples import collate

        return collate(samples, self)


def check_parts(columns: Mapping[str, Kind], others: Sequence[str] = ()) -> dict[str, str]:
    """Which column each name of the result comes from.

    Args:
        columns: Name -> kind.
        others: Names that are taken.

    Raises:
        ConfigError: Two of them would give the same name.
    """
    owners: dict[str, str] = {name: name for name in others if name not in columns}
    for name, kind in columns.items():
        for part in kind.parts(name):
            if part in owners:
                raise ConfigError(
                    f"collate: both {owners[part]!r} and {name!r} would give a {part!r}. Rename one of them: "
                    f"columns={{'another': {type(kind).__name__}(column={kind.column or name!r})}}",
                    field="collate.columns",
                    value=part,
                    allowed="names that differ",
                )
            owners[part] = name
    return owners


def path_of(name: str, kind: Kind) -> tuple[str, tuple[str, ...]]:
    """The column that `name` is made of, and the way inside its values.

    >>> path_of("boxes", Ragged(column="json:annotation.boxes"))
    ('json', ('annotation', 'boxes'))
    """
    column, _, inside = (kind.column or name).partition(":") if kind.column else (name, "", "")
    return column, tuple(inside.split(".")) if inside else ()


def _invalid(field: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(
        f"{field}={value!r} is not valid: it must be {allowed}", field=field, value=value, allowed=allowed
    )


def _check_whole(field: str, value: object, least: int, also: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _invalid(field, value, f"{also}an integer of at least {least}")


def _check_choice(field: str, value: object, allowed: tuple[str, ...], also: str = "") -> None:
    if value not in allowed:
        raise _invalid(field, value, also + ", ".join(map(repr, allowed)))


def _check_path(column: object) -> None:
    if column is not None and (not isinstance(column, str) or not column.partition(":")[0]):
        raise _invalid("column", column, "None, a column, or a column and a path such as 'json:boxes'")


def _dtype_name(dtype: object) -> str | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise _invalid("dtype", dtype, f"None or one of {', '.join(DTYPES)}")
    return name


def _shape(item: Sequence[int] | None) -> tuple[int, ...] | None:
    if item is None:
        return None
    if not isinstance(item, Sequence) or isinstance(item, str):
        raise _invalid("item", item, "None or a shape such as (4,)")
    for side in item:
        _check_whole("item", side, 0)
    return tuple(item)
