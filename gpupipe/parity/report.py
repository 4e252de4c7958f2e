"""What a comparison found: rows, verdict, and the ways to show them."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpupipe.errors import GpupipeError
from gpupipe.parity.tally import Sample, Tally
from gpupipe.parity.tolerances import ROUNDING_LSB, Tolerance
from gpupipe.recipe import Recipe

Verdict = Literal["ok", "FAIL", "reported"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One stage, summed up over all samples. All differences in LSB (1/255 before normalisation).

    Attributes:
        stage: "decode", "resize", "jitter", "normalise", "whole chain", ...
        variant: Which samples of that stage, or what they are compared with; "" for all of them.
        samples: Images compared.
        max_lsb, p999_lsb, mean_lsb: Of the absolute differences of all values.
        bias_lsb: Mean of backend - reference.
        excess_lsb: The largest difference beyond what the dtype's rounding explains; this is what is judged.
        beyond_share: The share of values beyond the bound; judged instead where the tolerance allows a share.
        tolerance: The bound.
        worst: The worst samples, worst first.
    """

    stage: str
    variant: str
    samples: int
    max_lsb: float
    p999_lsb: float
    mean_lsb: float
    bias_lsb: float
    excess_lsb: float
    beyond_share: float = 0.0
    tolerance: Tolerance
    worst: tuple[Sample, ...]

    @classmethod
    def of(cls, stage: str, variant: str, tally: Tally, tolerance: Tolerance) -> Row:
        return cls(
            stage=stage,
            variant=variant,
            samples=tally.samples,
            max_lsb=tally.max_lsb,
            p999_lsb=tally.percentile(0.999),
            mean_lsb=tally.mean_lsb,
            bias_lsb=tally.bias_lsb,
            excess_lsb=tally.excess_lsb,
            beyond_share=tally.beyond_share,
            tolerance=tolerance,
            worst=tuple(tally.worst),
        )

    @property
    def name(self) -> str:
        return f"{self.stage} {self.variant}".rstrip()

    @property
    def verdict(self) -> Verdict:
        if self.tolerance.max_lsb is None:
            return "reported"
        if self.tolerance.share:
            # What is no number is beyond any share.
            return "ok" if self.beyond_share <= self.tolerance.share and math.isfinite(self.excess_lsb) else "FAIL"
        return "ok" if self.excess_lsb <= self.tolerance.max_lsb + ROUNDING_LSB else "FAIL"

    @property
    def allowed(self) -> str:
        """The bound, for people."""
        if self.tolerance.max_lsb is None:
            return "not judged"
        exact = "rounding" if self.stage in ("normalise", "erase") else "exact"
        bound = exact if self.tolerance.max_lsb == 0 else f"{self.tolerance.max_lsb:g}"
        if self.tolerance.share:
            bound += f" but for {self.tolerance.share:.1%}"
        if not self.tolerance.relative:
            return bound
        relative = f"{self.tolerance.relative:g} rel."
        return relative if bound in ("exact", "rounding") else f"{bound} + {relative}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "variant": self.variant,
            "samples": self.samples,
            "max_lsb": _json_number(self.max_lsb),
            "p999_lsb": _json_number(self.p999_lsb),
            "mean_lsb": _json_number(self.mean_lsb),
            "bias_lsb": _json_number(self.bias_lsb),
            "excess_lsb": _json_number(self.excess_lsb),
            "beyond_share": self.beyond_share,
            "allowed_lsb": self.tolerance.max_lsb,
            "allowed_share": self.tolerance.share,
            "allowed_relative": self.tolerance.relative,
            "reason": self.tolerance.reason,
            "verdict": self.verdict,
            "worst": [{**sample.to_dict(), "max_lsb": _json_number(sample.max_lsb)} for sample in self.worst],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class BadFile:
    """A file that at least one side could not read.

    Attributes:
        key, index: Which file.
        reasons: Who -> why; "backend" and "reference", or "source" where nobody got as far as decoding.
        agreed: Whether both sides refuse it.
    """

    key: str
    index: int
    reasons: dict[str, str]
    agreed: bool

    @property
    def merged_reasons(self) -> dict[str, str]:
        """`reasons`, with one entry "both" where both sides say the same."""
        why = set(self.reasons.values())
        return {"both": why.pop()} if len(self.reasons) == 2 and len(why) == 1 else self.reasons

    def to_dict(self) -> dict[str, Any]:
        return {"key": self.key, "index": self.index, "reasons": self.reasons, "agreed": self.agreed}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The result of `gpupipe.parity`.

    Attributes:
        backend, reference: What was compared, with devices.
        recipe: What was done to the images.
        source: Where they came from.
        draws: The (seed, epoch) pairs that crops and jitter were drawn for.
        files: How many were looked at.
        rows: One for each stage and variant.
        undecodable: Files that at least one side could not read.
        environment: Versions and machine, for people who compare reports.
        seconds: How long it took.
    """

    backend: str
    reference: str
    recipe: Recipe
    source: str
    draws: tuple[tuple[int, int], ...]
    files: int
    rows: tuple[Row, ...]
    undecodable: tuple[BadFile, ...]
    environment: dict[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether something was compared, every judged row is within its tolerance, and all agree on bad files."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """One sentence for each thing that is wrong."""
        found = []
        for row in self.rows:
            if row.verdict == "FAIL":
                where = f" (worst: {row.worst[0].key})" if row.worst else ""
                beyond = f", {row.beyond_share:.2%} of the values beyond" if row.tolerance.share else ""
                found.append(f"{row.name}: {number(row.max_lsb)} LSB{beyond}, allowed {row.allowed}{where}")
        for file in self.undecodable:
            if not file.agreed:
                who, why = next(iter(file.reasons.items()))
                found.append(f"undecodable: only the {who} refuses {file.key} ({why})")
        if not self.rows:
            found.append(f"nothing was compared: none of {self.files} files could be decoded")
        return tuple(found)

    @property
    def verdict(self) -> str:
        """One line."""
        judged = sum(row.verdict != "reported" for row in self.rows)
        if not self.ok:
            if not self.rows:
                return "FAIL: nothing was compared"
            return f"FAIL: {len(self.failures)} of {judged} judged rows or files are out of tolerance"
        seen = f"{judged} rows within tolerance" + (
            f", {len(self.rows) - judged} reported" if judged < len(self.rows) else ""
        )
        bad = f", {len(self.undecodable)} files undecodable for both" if self.undecodable else ""
        return f"PASS: {seen}{bad}"

    def table(self) -> str:
        """The report as aligned plain text."""
        head = ("stage", "samples", "max", "p99.9", "mean", "allowed", "verdict", "worst file")
        lines = [
            (
                row.name,
                str(row.samples),
                number(row.max_lsb),
                number(row.p999_lsb),
                number(row.mean_lsb),
                row.allowed,
                row.verdict,
                row.worst[0].key if row.worst else "-",
            )
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
        text = [
            f"{self.backend} against {self.reference}, {self.files} files of {self.source}, {self.drawn}",
            "differences in LSB (1/255 before normalisation)",
            "",
            _aligned(head, widths),
            "  ".join("-" * width for width in widths),
            *(_aligned(line, widths) for line in lines),
        ]
        if self.undecodable:
            text += ["", f"undecodable: {len(self.undecodable)} of {self.files} files"]
            text += [f"  {file.key}: {_reasons(file)}" for file in self.undecodable]
        text += ["", self.verdict, *(f"  {failure}" for failure in self.failures)]
        return "\n".join(text)

    @property
    def drawn(self) -> str:
        """Which draws, for people."""
        if self.draws == ((0, 0),):
            return "seed 0, epoch 0"
        seeds, epochs = sorted({seed for seed, _ in self.draws}), sorted({epoch for _, epoch in self.draws})
        return f"seeds {', '.join(map(str, seeds))}, epochs {', '.join(map(str, epochs))}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values: everything but the pixels. Numbers that are not finite are strings."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "failures": list(self.failures),
            "backend": self.backend,
            "reference": self.reference,
            "source": self.source,
            "files": self.files,
            "draws": [{"seed": seed, "epoch": epoch} for seed, epoch in self.draws],
            "rows": [row.to_dict() for row in self.rows],
            "undecodable": [file.to_dict() for file in self.undecodable],
            "recipe": self.recipe.to_dict(),
            "environment": self.environment,
            "seconds": round(self.seconds, 3),
        }

    def to_json(self) -> str:
        """`to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def write_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a page of its own, without scripts or links: table, verdict, worst samples side by side.

        Raises:
            GpupipeError: The file cannot be written.
        """
        from gpupipe.parity.html import page

        target = Path(path)
        try:
            target.write_text(page(self), encoding="utf-8")
        except OSError as error:
            raise GpupipeError(f"cannot write the report to {target}: {error.strerror or error}") from error
        return target


def number(value: float) -> str:
    """Three digits, without exponents for what a reader compares at a glance.

    >>> [number(v) for v in (0.0, 0.00001234, 0.00612, 1.0, 15.98, 254.6)]
    ['0', '1.2e-05', '0.00612', '1.00', '16.0', '255']
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-4:
        return f"{value:.1e}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    left = {0, 5, 6, 7}
    padded = [
        cell.ljust(width) if column in left else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


def _reasons(file: BadFile) -> str:
    return "; ".join(f"{who}: {why}" for who, why in file.merged_reasons.items())


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
