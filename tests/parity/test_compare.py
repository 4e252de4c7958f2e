"""The comparison: clean where nothing is wrong, and each fault is found in its own stage."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import gpupipe as gp
from gpupipe import backends
from gpupipe.backends.base import Applied
from gpupipe.errors import BackendError, ConfigError, DecodeError
from gpupipe.parity import compare, stages
from gpupipe.parity.report import Report
from gpupipe.records import JitterRows, Operation, OperationRows
from tests import images
from tests.parity.conftest import FAULTS

SIZE = 48
JITTER = gp.Recipe.train(size=SIZE, jitter=(0.4, 0.4, 0.4, 0.1))
# One of each kind: border, container, operations that decide and others, jitter and flip behind them, erasing.
OPERATIONS = gp.Recipe(
    steps=(
        gp.Resize((44, 44)),
        gp.RandomCrop(SIZE, padding=4, fill=0.5),
        gp.RandomApply([gp.ColorJitter(0.4, hue=0.1)], p=0.8),
        gp.GaussianBlur(3),
        gp.TrivialAugmentWide(),
        gp.ColorJitter(0.4, contrast=0.4),
        gp.RandomHorizontalFlip(),
        gp.GaussianBlur(5),
        gp.Normalize(),
        gp.RandomErasing(p=1.0),
    )
)


def failing(report: Report) -> set[str]:
    """Stages with a failing row, rows against today's pipeline apart."""
    return {row.stage for row in report.rows if row.verdict == "FAIL" and not row.variant.startswith("vs ")}


def named(report: Report) -> dict[str, compare.Row]:
    return {row.name: row for row in report.rows}


@pytest.mark.parametrize(
    "recipe",
    [
        JITTER,
        gp.Recipe.eval(size=SIZE, resize=56),
        gp.Recipe.train(size=SIZE, interpolation="bicubic", hflip=0),
        gp.Recipe.train(size=SIZE, precision="uint8", jitter=(0.4, 0.4, 0.4, 0.1)),
        gp.Recipe.train(size=SIZE, output=gp.Output(dtype="float16", memory_format="channels_last")),
        gp.Recipe.train(size=SIZE, output=gp.Output(dtype="bfloat16"), exif="apply"),
        gp.Recipe(steps=(gp.CenterCrop(SIZE),)),
        gp.Recipe(steps=(gp.Resize((SIZE, 40)), gp.RandomVerticalFlip(), gp.Grayscale())),
        OPERATIONS,
        replace(OPERATIONS, precision="uint8", output=gp.Output(dtype="float16")),
    ],
    ids=[
        "jitter",
        "eval",
        "bicubic",
        "uint8",
        "float16",
        "bfloat16 exif",
        "crop only",
        "grey only",
        "ops",
        "uint8 ops",
    ],
)
def test_parity_torchvision_against_itself_passes(image_folder, recipe):
    report = gp.check_parity(image_folder, recipe, backend="torchvision", seeds=(0, 1))
    assert report.ok, report.table()
    assert all(row.max_lsb == 0 for row in report.rows if not row.variant.startswith("vs "))
    draws = 2 if any("Random" in type(step).__name__ for step in recipe.steps) else 1
    chain = [row.samples for row in report.rows if row.stage == "whole chain" and not row.variant.startswith("vs ")]
    assert sum(chain) == 15 * draws
    assert sum(row.samples for row in report.rows if row.stage == "decode") == 15


@pytest.mark.parametrize("stage", FAULTS)
def test_parity_fault_in_one_stage_fails_there_and_in_the_whole_chain(image_folder, faults, stage):
    point, fault = FAULTS[stage]
    faults[point] = fault
    report = gp.check_parity(image_folder, JITTER, backend="faulty")
    assert not report.ok
    assert failing(report) == {stage, "whole chain"}
    assert any(failure.startswith(stage) for failure in report.failures)
    assert stage in report.table()


def wrong_parameter(call, kind, change):
    """Another parameter for one kind of operation."""
    steps = []
    for step in call.plan.operations:
        if isinstance(step, OperationRows):
            which = (step.operation == kind)[:, None]
            step = replace(step, parameters=np.where(which, change(step.parameters), step.parameters))
        steps.append(step)
    return replace(call.plan, operations=tuple(steps))


FEW_OPERATIONS = gp.Recipe(steps=(gp.CenterCrop(SIZE), gp.TrivialAugmentWide(), gp.GaussianBlur(3)))
OPERATION_FAULTS = {
    "sigma": ({"GaussianBlur"}, Operation.BLUR, lambda values: values * 1.02),
    "brightness": ({"TrivialAugmentWide"}, Operation.BRIGHTNESS, lambda values: values + 0.002),
    "threshold": ({"TrivialAugmentWide"}, Operation.SOLARIZE, lambda values: np.maximum(values - 2 / 255, 0)),
    "angle": ({"TrivialAugmentWide"}, Operation.ROTATE, lambda values: values * [1.05, *[1] * 7]),
}


@pytest.mark.parametrize("name", OPERATION_FAULTS)
def test_parity_fault_in_an_operation_fails_there_and_in_the_whole_chain(image_folder, faults, name):
    stages_with_it, kind, change = OPERATION_FAULTS[name]
    faults["plan"] = lambda call: wrong_parameter(call, kind, change)
    report = gp.check_parity(image_folder, FEW_OPERATIONS, backend="faulty", limit=6, seeds=range(5))
    assert failing(report) == {*stages_with_it, "whole chain"}, report.table()


def test_parity_fault_in_jitter_among_operations_fails_there(image_folder, faults):
    def backwards(call):
        steps = tuple(
            replace(step, order=step.order[:, ::-1].copy()) if isinstance(step, JitterRows) else step
            for step in call.plan.operations
        )
        return replace(call.plan, operations=steps)

    faults["plan"] = backwards
    report = gp.check_parity(image_folder, OPERATIONS, backend="faulty", limit=4)
    assert failing(report) == {"RandomApply(ColorJitter)", "ColorJitter", "whole chain"}, report.table()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_parity_fault_in_erasing_fails_there_and_in_the_whole_chain(image_folder, faults, dtype):
    def one_pixel_lower(call):
        erasing = tuple(replace(step, box=step.box + np.array([1, 0, 0, 0], np.int32)) for step in call.plan.erasing)
        return replace(call.plan, erasing=erasing)

    faults["plan"] = one_pixel_lower
    report = gp.check_parity(
        image_folder, replace(OPERATIONS, output=gp.Output(dtype=dtype)), backend="faulty", limit=4
    )
    assert failing(report) == {"erase", "whole chain"}, report.table()


def test_parity_operations_with_a_threshold_have_rows_of_their_own(image_folder):
    report = gp.check_parity(image_folder, FEW_OPERATIONS, backend="torchvision", limit=6, seeds=range(5))
    rows = [row for row in report.rows if row.stage == "TrivialAugmentWide"]
    assert {"", "affine", "rotate", "posterize", "solarize"} <= {row.variant for row in rows}
    assert sum(row.samples for row in rows) == 30
    assert all(bool(row.tolerance.share) == (row.variant not in ("", "factor > 1.8")) for row in rows)


def test_parity_share_beyond_the_bound_is_judged_and_shown(image_folder, faults):
    """0.1 % of the values may be anything where an operation has a threshold; a few more fail, and NaN always."""
    recipe = gp.Recipe(steps=(gp.CenterCrop(40), gp.RandomPosterize(4, p=1.0)))

    def wrong_pixels(call, count=0, value=1.0):
        flat = call.applied.images.flatten(1)
        flat[:, :count] = value - flat[:, :count].round()  # 0 becomes 1, and 1 becomes 0
        return call.applied

    def posterized(count, value=1.0):
        faults["result"] = lambda call: wrong_pixels(call, count, value)
        report = gp.check_parity(image_folder, recipe, backend="faulty")
        return report, named(report)["RandomPosterize posterize"]

    _, row = posterized(4)
    assert row.verdict == "ok"
    assert row.beyond_share == pytest.approx(4 / 4800)
    assert row.max_lsb > 100
    report, row = posterized(6)
    assert row.verdict == "FAIL"
    assert any("0.12% of the values beyond" in failure for failure in report.failures), report.failures
    assert "0.02 but for 0.1%" in report.table()
    assert posterized(1, float("nan"))[1].verdict == "FAIL"


def test_parity_own_functions_and_mixing_are_left_out(image_folder):
    recipe = OPERATIONS.then(lambda images: images * 0, name="black")
    report = gp.check_parity(
        image_folder,
        replace(recipe, mix=gp.Mix(choices=(gp.MixUp(0.2),), num_classes=3)),
        backend="torchvision",
        limit=2,
    )
    assert report.ok, report.table()
    assert report.recipe.functions


def test_parity_wrapped_backend_without_a_fault_passes(image_folder, faults):
    assert not faults
    report = gp.check_parity(image_folder, JITTER, backend="faulty")
    assert report.ok, report.table()
    assert report.backend == "faulty (cpu)"


def test_parity_fault_of_one_pixel_is_measured_exactly(image_folder, faults):
    faults["result"] = FAULTS["decode"][1]
    rows = [row for row in gp.check_parity(image_folder, JITTER, backend="faulty").rows if row.stage == "decode"]
    for row in rows:
        assert row.max_lsb == (0 if row.variant == "PNG" else 1)
    jpegs = [row for row in rows if row.variant.startswith("JPEG")]
    assert {row.variant for row in jpegs} == {"JPEG 4:2:0", "JPEG 4:4:4", "JPEG 4:2:2", "JPEG grey", "JPEG 4:4:0"}
    # One pixel of three channels in each picture, and always upwards.
    source = gp.open_source(image_folder)
    pixels = {h.height * h.width for h in (stages.scan(source[i].data) for i in range(len(source)))}
    assert 1 / max(pixels) <= jpegs[0].mean_lsb <= 1 / min(pixels)
    assert jpegs[0].bias_lsb == jpegs[0].mean_lsb


def test_parity_difference_of_one_lsb_is_one_in_every_stage(image_folder, faults):
    def off_by_one(call):
        std = torch.tensor(call.recipe.normalize.std)
        size = call.applied.images.shape
        call.applied.images[:, :, size[2] // 2, size[3] // 2] += 1 / 255 / std
        return call.applied

    faults["result"] = off_by_one
    rows = [
        row for row in gp.check_parity(image_folder, JITTER, backend="faulty").rows if not row.variant.startswith("vs ")
    ]
    assert {row.stage for row in rows} == {"decode", "resize", "jitter", "normalise", "whole chain"}
    for row in rows:
        assert row.max_lsb == pytest.approx(1, abs=1e-4), row.name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parity_dtype_allows_its_rounding_and_no_more(image_folder, faults, dtype):
    def off_by_three(call):
        if call.applied.images.dtype != torch.float32:
            call.applied.images[:, :, 5, 5] += 3 / 255 / 0.225
        return call.applied

    recipe = gp.Recipe.eval(size=SIZE, output=gp.Output(dtype=dtype))
    assert gp.check_parity(image_folder, recipe, backend="faulty").ok
    faults["result"] = off_by_three
    assert failing(gp.check_parity(image_folder, recipe, backend="faulty")) == {"normalise", "whole chain"}


def test_parity_not_a_number_fails(image_folder, faults):
    def broken(call):
        call.applied.images[0, 0] = float("nan")
        return call.applied

    faults["result"] = broken
    report = gp.check_parity(image_folder, JITTER, backend="faulty", limit=2)
    assert failing(report) == {"decode", "resize", "jitter", "normalise", "whole chain"}
    assert '"max_lsb": "inf"' in report.to_json()


def test_parity_strong_jitter_is_judged_in_rows_of_its_own(image_folder):
    recipe = gp.Recipe.train(size=SIZE, jitter=(1.5, 1.5, 1.5, 0.1))
    rows = named(gp.check_parity(image_folder, recipe, backend="torchvision", seeds=range(3)))
    weak, strong = rows["jitter"], rows["jitter factor > 1.8"]
    assert weak.samples + strong.samples == 45
    assert min(weak.samples, strong.samples) > 0
    assert strong.tolerance.max_lsb > weak.tolerance.max_lsb
    assert rows["whole chain vs PIL today, factor > 1.8"].verdict == "reported"


def test_parity_against_today_sees_8_bit_rounding(image_folder):
    rows = named(gp.check_parity(image_folder, gp.Recipe.train(size=SIZE), backend="torchvision", seeds=range(4)))
    for name in ("whole chain vs PIL today", "whole chain vs uint8 today"):
        assert 0.3 < rows[name].max_lsb <= rows[name].tolerance.max_lsb
        assert abs(rows[name].bias_lsb) < 0.1


def test_parity_uint8_precision_equals_stock_torchvision_on_uint8(image_folder):
    recipe = gp.Recipe.train(size=SIZE, jitter=(0.4, 0.4, 0.4, 0.1), precision="uint8")
    row = named(gp.check_parity(image_folder, recipe, backend="torchvision", seeds=range(3)))[
        "whole chain vs uint8 today"
    ]
    assert row.tolerance.max_lsb == 0
    assert row.verdict == "ok"


@pytest.fixture
def bad_folder(tmp_path):
    """Two good files, and broken ones of several kinds."""
    target = tmp_path / "set" / "class"
    target.mkdir(parents=True)
    (target / "a.jpg").write_bytes(images.jpeg(images.photo(60, 80)))
    (target / "b.png").write_bytes(images.encode(images.photo(50, 40), "PNG"))
    broken = images.broken()
    (target / "cut.jpg").write_bytes(broken["JPEG cut in half"])
    (target / "empty.jpg").write_bytes(b"")
    (target / "text <&>.jpg").write_bytes(b"no image at all")
    return target.parent


def test_parity_files_that_nobody_reads_are_listed_and_pass(bad_folder):
    report = gp.check_parity(bad_folder, JITTER, backend="torchvision")
    assert report.ok, report.table()
    assert [file.key for file in report.undecodable] == ["class/cut.jpg", "class/empty.jpg", "class/text <&>.jpg"]
    assert all(file.agreed for file in report.undecodable)
    assert "undecodable: 3 of 5 files" in report.table()
    assert named(report)["whole chain"].samples == 2


def test_parity_backends_that_disagree_on_a_bad_file_fail(bad_folder, faults):
    def reads_all(call):
        return Applied(call.applied.images, {})

    faults["result"] = reads_all
    report = gp.check_parity(bad_folder, JITTER, backend="faulty")
    assert not report.ok
    assert [file.key for file in report.undecodable if not file.agreed] == ["class/cut.jpg"]
    assert any("only the reference refuses class/cut.jpg" in failure for failure in report.failures)


def test_parity_file_refused_only_by_the_whole_chain_fails(image_folder, faults):
    def refuses_first(call):
        whole = call.recipe == JITTER and call.headers[0].format == "JPEG"
        return Applied(call.applied.images, {0: DecodeError("no")} if whole else call.applied.errors)

    faults["result"] = refuses_first
    report = gp.check_parity(image_folder, JITTER, backend="faulty", limit=3)
    assert any("only the backend refuses" in failure for failure in report.failures)


def test_parity_nothing_decodable_fails(tmp_path):
    (tmp_path / "set" / "class").mkdir(parents=True)
    (tmp_path / "set" / "class" / "a.jpg").write_bytes(b"nothing")
    report = gp.check_parity(tmp_path / "set", JITTER, backend="torchvision")
    assert not report.ok
    assert report.verdict == "FAIL: nothing was compared"
    assert report.failures == ("nothing was compared: none of 1 files could be decoded",)


def test_parity_lossless_file_refused_is_a_backend_error(image_folder, faults):
    def refuses_bmp(call):
        refused = {0: DecodeError("no BMP here")} if call.headers[0].format == "BMP" else {}
        return Applied(call.applied.images, refused)

    faults["result"] = refuses_bmp
    with pytest.raises(BackendError, match="BMP"):
        gp.check_parity(image_folder, JITTER, backend="faulty")


def test_parity_other_shape_is_a_backend_error(image_folder, faults):
    faults["result"] = lambda call: Applied(call.applied.images[:, :, :-1], call.applied.errors)
    with pytest.raises(BackendError, match="shape"):
        gp.check_parity(image_folder, JITTER, backend="faulty")


@pytest.mark.parametrize(
    "arguments",
    [{"seeds": ()}, {"seeds": 3}, {"epochs": ()}, {"limit": 0}, {"limit": True}, {"seeds": (-1,)}, {"backend": "fast"}],
)
def test_parity_bad_argument_is_a_config_error(image_folder, arguments):
    with pytest.raises(ConfigError):
        gp.check_parity(image_folder, JITTER, **({"backend": "torchvision"} | arguments))


def test_parity_limit_takes_files_evenly(image_folder):
    report = gp.check_parity(image_folder, gp.Recipe.eval(size=SIZE), backend="torchvision", limit=4)
    assert report.files == 4
    assert compare._chosen(15, 4) == [0, 3, 7, 11]
    assert compare._chosen(3, 10) == [0, 1, 2]


def test_parity_closes_every_backend(image_folder, monkeypatch):
    opened, create = [], backends.create

    def counting(*arguments, **keywords):
        made = create(*arguments, **keywords)
        opened.append(made)
        close = made.close
        monkeypatch.setattr(made, "close", lambda: (opened.remove(made), close())[1], raising=False)
        return made

    monkeypatch.setattr(backends, "create", counting)
    gp.check_parity(image_folder, JITTER, backend="torchvision", limit=3)
    assert opened == []


def test_parity_worst_samples_can_be_replayed(image_folder, faults):
    faults["plan"] = FAULTS["resize"][1]
    report = gp.check_parity(image_folder, JITTER, backend="faulty", seeds=(3, 4), epochs=(0, 7))
    worst = named(report)["resize"].worst[0]
    assert (worst.seed, worst.epoch) in {(3, 0), (3, 7), (4, 0), (4, 7)}
    again = gp.check_parity(image_folder, JITTER, backend="faulty", seeds=(worst.seed,), epochs=(worst.epoch,))
    replayed = named(again)["resize"].worst[0]
    assert (replayed.key, replayed.max_lsb) == (worst.key, worst.max_lsb)
    assert np.array_equal(replayed.backend, worst.backend)


def test_parity_exif_apply_compares_upright_pictures(tmp_path, faults):
    target = tmp_path / "set" / "class"
    target.mkdir(parents=True)
    for orientation in range(1, 9):
        data = images.jpeg(images.photo(40, 70, seed=orientation), orientation=orientation)
        (target / f"{orientation}.jpg").write_bytes(data)
    sizes = []

    def look(call):
        if call.headers[0].format == "JPEG":
            sizes.append(call.plan.box[:, 2:].max(axis=0).tolist())
        return call.plan

    faults["plan"] = look
    report = gp.check_parity(tmp_path / "set", gp.Recipe.train(size=SIZE, exif="apply"), backend="faulty")
    assert report.ok, report.table()
    assert sizes[0] == [70, 70]  # 40 x 70 stands upright as 70 x 40


def test_lossless_record_decodes_to_the_same_pixels():
    pixels = images.photo(37, 53)
    source = gp.Record(data=b"", label=1, index=5, key="k")
    record, header = stages.lossless(source, pixels)
    assert (header.height, header.width, header.orientation) == (37, 53, 1)
    assert (record.index, record.key, record.label) == (5, "k", 1)
    with images.Image.open(images.io.BytesIO(record.data)) as image:
        assert np.array_equal(np.asarray(image), pixels)


@pytest.mark.parametrize(("side", "canvas"), [(1, 256), (256, 256), (257, 512), (4096, 4096), (4097, 5120)])
def test_canvas_size_holds_the_picture(side, canvas):
    assert stages.canvas_size(side, side) == (canvas, canvas)


def test_numpy_takes_any_dtype_and_layout():
    batch = torch.rand(2, 3, 4, 5).to(torch.bfloat16, memory_format=torch.channels_last)
    found = compare._numpy(batch)
    assert found.shape == (2, 4, 5, 3)
    assert found.dtype == np.float32
