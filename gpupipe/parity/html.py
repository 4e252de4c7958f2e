"""The report as one HTML file: verdict and table on top, the worst samples side by side below. No scripts, no links."""

from __future__ import annotations

import base64
import io
import math
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpupipe.parity.report import Report, Row, number
from gpupipe.parity.tally import F32, Sample
from gpupipe.parity.tolerances import ROUNDING_LSB

if TYPE_CHECKING:
    from collections.abc import Iterable

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5c6678; --line: #dfe3ea; --paper: #f6f7f9; --card: #fff;
  --ok: #14773b; --ok-bg: #dff3e5; --bad: #b3261e; --bad-bg: #fbe0de; --note: #51607a; --note-bg: #e8ecf3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa5b8; --line: #333b48; --paper: #14181f;
  --card: #1c222b; --ok: #7fd89f; --ok-bg: #173824; --bad: #ff9d94; --bad-bg: #481c1a; --note: #b3bed1;
  --note-bg: #2a3240; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, Helvetica,
  Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; font-weight: 650; }
h2 { font-size: 18px; margin: 40px 0 4px; font-weight: 650; }
p { margin: 0 0 8px; }
.soft { color: var(--soft); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.verdict { display: block; margin: 20px 0; padding: 14px 18px; border-radius: 10px; font-weight: 600; }
.verdict ul { margin: 6px 0 0; padding-left: 20px; font-weight: 400; overflow-wrap: anywhere; }
.is-ok { color: var(--ok); background: var(--ok-bg); }
.is-FAIL { color: var(--bad); background: var(--bad-bg); }
.is-reported { color: var(--note); background: var(--note-bg); }
.pill { display: inline-block; padding: 1px 9px; border-radius: 99px; font-size: 13px; font-weight: 600; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 14px; }
th, td { padding: 8px 12px; text-align: left; border-top: 1px solid var(--line); vertical-align: top; }
th:first-child { min-width: 260px; }
thead th { border-top: 0; color: var(--soft); font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.file { font-family: ui-monospace, Consolas, monospace; font-size: 12.5px; overflow-wrap: anywhere;
  min-width: 190px; }
td .why { display: block; color: var(--soft); font-size: 12.5px; }
td a { color: inherit; text-decoration-color: var(--soft); }
.made-with { display: flex; flex-wrap: wrap; gap: 0 18px; font-size: 13px; color: var(--soft); }
.made-with b { font-weight: 500; color: var(--ink); }
pre { margin: 0; padding: 14px 18px; font-size: 12.5px; overflow-x: auto; }
.sample { margin: 14px 0 0; padding: 14px 18px 18px; }
.sample header { display: flex; flex-wrap: wrap; gap: 2px 16px; margin-bottom: 10px; font-size: 13.5px; }
.sample header b { font-family: ui-monospace, Consolas, monospace; overflow-wrap: anywhere; }
.triple { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 14px; }
figure { margin: 0; }
figure img { display: block; width: 100%; height: auto; background: #000; border-radius: 6px;
  image-rendering: pixelated; }
figcaption { margin-top: 5px; font-size: 13px; color: var(--soft); }
"""


def page(report: Report) -> str:
    """The whole document."""
    title = f"Parity: {report.backend} against {report.reference}"
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="soft">{report.files} files of {escape(report.source)}, {escape(report.drawn)}, '
            f"in {report.seconds:.0f} s. Differences in LSB: 1/255 of a pixel's range before normalisation.</p>",
            _environment(report),
            _verdict(report),
            _table(report.rows),
            _undecodable(report),
            "<h2>Recipe</h2>",
            f'<pre class="card">{escape(repr(report.recipe))}</pre>',
            *(_gallery(number_, row, report) for number_, row in enumerate(report.rows)),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _verdict(report: Report) -> str:
    failures = "".join(f"<li>{escape(failure)}</li>" for failure in report.failures)
    listed = f"<ul>{failures}</ul>" if failures else ""
    return f'<div class="verdict is-{"ok" if report.ok else "FAIL"}">{escape(report.verdict)}{listed}</div>'


def _table(rows: Iterable[Row]) -> str:
    lines = []
    for position, row in enumerate(rows):
        name = f'<a href="#row-{position}">{escape(row.name)}</a>' if _shown(row) else escape(row.name)
        numbers = (str(row.samples), *map(number, (row.max_lsb, row.p999_lsb, row.mean_lsb, row.bias_lsb)))
        lines.append(
            f'<tr><td>{name}<span class="why">{escape(row.tolerance.reason)}</span></td>'
            + "".join(f'<td class="number">{escape(value)}</td>' for value in numbers)
            + f'<td class="number">{escape(row.allowed)}</td>'
            f'<td><span class="pill is-{row.verdict}">{row.verdict}</span></td>'
            f'<td class="file">{escape(row.worst[0].key) if row.worst else "–"}</td></tr>'
        )
    numeric = ("images", "max", "p99.9", "mean", "bias", "allowed")
    head = "<th>stage</th>" + "".join(f'<th class="number">{name}</th>' for name in numeric)
    return (
        f'<div class="card scroll"><table><thead><tr>{head}<th>verdict</th><th>worst file</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _undecodable(report: Report) -> str:
    if not report.undecodable:
        return ""
    lines = []
    for file in report.undecodable:
        reasons = "".join(
            f'<span class="why">{escape(who)}: {escape(why)}</span>' for who, why in file.merged_reasons.items()
        )
        verdict = "ok" if file.agreed else "FAIL"
        agreed = "both refuse it" if file.agreed else "they disagree"
        lines.append(
            f'<tr><td class="file">{escape(file.key)}</td><td>{reasons}</td>'
            f'<td><span class="pill is-{verdict}">{agreed}</span></td></tr>'
        )
    return (
        f"<h2>Undecodable: {len(report.undecodable)} of {report.files} files</h2>"
        '<div class="card scroll"><table><thead><tr><th>file</th><th>why</th><th>verdict</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _environment(report: Report) -> str:
    entries = "".join(
        f"<span>{escape(name)} <b>{escape(value)}</b></span>" for name, value in report.environment.items()
    )
    return f'<p class="made-with">{entries}</p>'


def _shown(row: Row) -> bool:
    """Whether its pictures would show anything."""
    return bool(row.worst) and row.max_lsb > ROUNDING_LSB


def _gallery(position: int, row: Row, report: Report) -> str:
    if not _shown(row):
        return ""
    reference = (
        f"torchvision on {row.variant.split()[1].rstrip(',')}, as today"
        if row.variant.startswith("vs ")
        else report.reference
    )
    samples = "".join(_sample(sample, report.backend, reference) for sample in row.worst)
    return (
        f'<h2 id="row-{position}">{escape(row.name)} <span class="pill is-{row.verdict}">{row.verdict}</span></h2>'
        f'<p class="soft">The worst of {row.samples} images: largest difference {number(row.max_lsb)} LSB, allowed '
        f"{escape(row.allowed)}.</p>{samples}"
    )


def _sample(sample: Sample, backend: str, reference: str) -> str:
    amplification = amplify(sample.max_lsb)
    difference = np.abs(sample.backend - sample.reference)
    facts = [f"max {number(sample.max_lsb)} LSB", f"index {sample.index}"]
    if sample.seed is not None:
        facts.append(f"seed {sample.seed}, epoch {sample.epoch}")
    if sample.corner != (0, 0):
        facts.append(f"part from row {sample.corner[0]}, column {sample.corner[1]}")
    figures = (
        (sample.backend, backend),
        (sample.reference, reference),
        (difference * amplification, f"absolute difference × {amplification:,}"),
    )
    return (
        f'<div class="sample card"><header><b>{escape(sample.key)}</b>'
        + "".join(f'<span class="soft">{fact}</span>' for fact in facts)
        + '</header><div class="triple">'
        + "".join(
            f'<figure><img alt="{escape(caption)}" src="{_png(pixels)}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
            for pixels, caption in figures
        )
        + "</div></div>"
    )


def amplify(max_lsb: float) -> int:
    """The roundest factor (1, 2 or 5 times a power of ten) that keeps the largest difference within 255.

    >>> [amplify(value) for value in (300.0, 16.0, 0.006)]
    [1, 10, 20000]
    """
    if not 0 < max_lsb < 255:
        return 1
    power = 10 ** math.floor(math.log10(255 / max_lsb))
    return int(max(power * step for step in (1, 2, 5) if power * step * max_lsb <= 255))


def _png(pixels: F32) -> str:
    from PIL import Image

    clean: npt.NDArray[np.uint8] = np.clip(np.rint(np.nan_to_num(pixels, nan=255.0)), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(clean).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
