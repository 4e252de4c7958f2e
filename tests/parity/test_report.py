"""What a report says, as text, JSON and page."""

import base64
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

import gpupipe as gp
from gpupipe.errors import GpupipeError
from gpupipe.parity.html import page
from gpupipe.parity.report import BadFile, Report, Row
from gpupipe.parity.tally import Sample
from gpupipe.parity.tolerances import Tolerance

NASTY = 'n01/<script>alert("1")</script> & more.jpg'


def sample(key=NASTY, max_lsb=0.5):
    reference = np.full((8, 8, 3), 100, np.float32)
    backend = reference.copy()
    backend[2, 3] += max_lsb
    return Sample(
        key=key, index=7, seed=1, epoch=2, max_lsb=max_lsb, backend=backend, reference=reference, corner=(0, 0)
    )


def row(stage="resize", max_lsb=0.5, bound=0.02, relative=0.0, variant="", excess_lsb=None):
    return Row(
        stage=stage,
        variant=variant,
        samples=3,
        max_lsb=max_lsb,
        p999_lsb=max_lsb / 2,
        mean_lsb=max_lsb / 10,
        bias_lsb=0.0,
        excess_lsb=max_lsb if excess_lsb is None else excess_lsb,
        tolerance=Tolerance(max_lsb=bound, relative=relative, reason="because of <b>"),
        worst=(sample(max_lsb=max_lsb),) if max_lsb else (),
    )


def report(*rows, undecodable=()):
    return Report(
        backend="dali (cpu)",
        reference="torchvision (cpu)",
        recipe=gp.Recipe.train(),
        source="/data/<set>",
        draws=((0, 0),),
        files=3,
        rows=rows,
        undecodable=tuple(undecodable),
        environment={"torch": "2.14"},
        seconds=1.5,
    )


@pytest.mark.parametrize(
    ("found", "bound", "verdict"),
    [
        (0.0, 0, "ok"),
        (1e-4, 0, "ok"),
        (1e-3, 0, "FAIL"),
        (0.02, 0.02, "ok"),
        (0.021, 0.02, "FAIL"),
        (99.0, None, "reported"),
        (float("inf"), 20, "FAIL"),
        (float("nan"), 20, "FAIL"),
    ],
)
def test_row_verdict(found, bound, verdict):
    assert row(max_lsb=found, bound=bound).verdict == verdict


def test_row_is_judged_without_what_the_dtype_explains():
    assert row(max_lsb=0.5, excess_lsb=0.01, relative=1e-3).verdict == "ok"
    assert row(max_lsb=0.5, excess_lsb=0.01, relative=1e-3).allowed == "0.02 + 0.001 rel."


def test_report_ok_only_if_rows_and_files_are():
    good, bad = row(max_lsb=0.01), row(max_lsb=0.5)
    assert report(good).ok
    assert not report(good, bad).ok
    assert not report().ok
    agreed = BadFile(key="a", index=0, reasons={"backend": "x", "reference": "x"}, agreed=True)
    assert report(good, undecodable=[agreed]).ok
    disagreed = BadFile(key="a", index=0, reasons={"backend": "x"}, agreed=False)
    assert not report(good, undecodable=[disagreed]).ok
    assert report(good, undecodable=[disagreed]).failures == ("undecodable: only the backend refuses a (x)",)


def test_report_table_is_aligned_and_names_the_worst_file():
    text = report(row(max_lsb=0.01), row("whole chain", 15.98, None, variant="vs PIL today")).table()
    lines = text.splitlines()
    head = next(line for line in lines if line.startswith("stage"))
    for line in lines:
        if line.startswith(("resize", "whole chain")):
            assert line[head.index("worst file") :] == NASTY
            assert line[head.index("verdict") - 1] == " "
    assert "16.0" in text
    assert "not judged" in text
    assert "PASS: 1 rows within tolerance, 1 reported" in text


def test_report_json_is_strict_and_has_every_number():
    text = report(row(max_lsb=float("inf"))).to_json()

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(text, parse_constant=refuse)
    assert found["ok"] is False
    assert found["rows"][0]["max_lsb"] == "inf"
    assert found["rows"][0]["allowed_lsb"] == 0.02
    assert found["rows"][0]["worst"][0]["key"] == NASTY
    assert gp.Recipe.from_json(json.dumps(found["recipe"])) == gp.Recipe.train()


class Tags(HTMLParser):
    """Every tag and attribute of a page, and whether tags are closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.sources, self.text = [], set(), [], ""

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_page_is_whole_escaped_and_without_scripts_or_links():
    bad = BadFile(key=NASTY, index=0, reasons={"backend": "<why>"}, agreed=False)
    text = page(report(row(), row("jitter", 0.01, 0.05), undecodable=[bad]))
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "script" not in tags.seen
    assert all(source.startswith(("data:image/png;base64,", "#row-")) for source in tags.sources)
    assert NASTY in tags.text
    assert "<why>" in tags.text
    assert "2.14" in tags.text
    assert "FAIL: 2 of 2 judged rows or files are out of tolerance" in tags.text


def test_page_shows_the_amplified_difference():
    text = page(report(row(max_lsb=0.5)))
    assert "absolute difference × 500" in text
    shown = [base64.b64decode(found) for found in re.findall(r"base64,([^\"]+)", text)]
    backend, reference, difference = (np.asarray(Image.open(io.BytesIO(png))) for png in shown)
    assert (difference[2, 3] == 250).all()
    assert difference.sum() == 3 * 250
    assert backend.shape == reference.shape == (8, 8, 3)


def test_page_leaves_out_pictures_that_show_nothing():
    assert "<img" not in page(report(row(max_lsb=0.0), row(max_lsb=1e-5)))


def test_page_survives_values_that_are_no_numbers():
    broken = sample()
    broken.backend[0, 0] = np.nan
    broken = replace(broken, max_lsb=float("inf"))
    assert "<img" in page(report(replace(row(max_lsb=float("inf")), worst=(broken,))))


def test_write_html_to_no_folder_says_so(tmp_path):
    with pytest.raises(GpupipeError, match="cannot write"):
        report(row()).write_html(tmp_path / "no" / "page.html")
