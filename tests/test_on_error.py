"""What a Loader does with bad samples: the policies, the report, and the limit."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

import gpupipe as gp
from gpupipe.errors import ConfigError, DecodeError, RecordError, SourceError
from gpupipe.faults import BadSamples
from tests import images
from tests.available import each_backend, loader

RECIPE = gp.Recipe.train(size=16, jitter=(0.4, 0.4, 0.4, 0.1))
FIELDS = ("image", "label", "index", "valid")
BAD = {3: "cut", 4: "text", 11: "empty", 12: "cut in the middle", 20: "missing"}


class Mixed:
    """24 small images in memory, those of `BAD` broken; it counts what is read."""

    uri = "memory"
    fingerprint = "mixed"
    columns = ("caption", "score", "box")

    def __init__(self, *, bad=BAD, label=int, count=24):
        self.bad, self.label, self.count = bad, label, count
        good = images.jpeg(images.photo(90, 120, 7))
        self.files = {
            "cut": good[: len(good) * 95 // 100],
            "cut in the middle": good[: len(good) // 2],
            "text": b"no image at all",
            "empty": b"",
        }
        self.good = [images.jpeg(images.photo(30 + index, 40, index)) for index in range(count)]

    @property
    def labels(self):
        return np.array([self.label(index % 5) for index in range(self.count)])

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        kind = self.bad.get(index)
        if kind == "missing":
            raise RecordError(f"record {index} is gone", uri=self.uri, index=index, key=f"k{index}")
        data = self.good[index] if kind is None else self.files[kind]
        columns = {"caption": f"nr {index}", "score": index / 2, "box": np.full(4, index)}
        return gp.Record(data, self.label(index % 5), index, f"k{index}", columns=columns)

    def close(self):
        pass


def epoch(source, backend="torchvision", on_error="substitute", **arguments):
    """Index -> (image, valid, label) row by row of one epoch, in order."""
    arguments = {"batch_size": 5, "fields": FIELDS, "seed": 1} | arguments
    with loader(source, RECIPE, backend, on_error=on_error, **arguments) as each:
        rows = [row for batch in each for row in zip(*batch, strict=True)]
        return rows, each.errors


def substitutes(errors):
    return {bad.index: bad.substitute for bad in errors if bad.substitute is not None}


def by_index(rows):
    return {(int(index), round(float(image.double().sum()), 6)) for image, _, index, _ in rows}


@each_backend
def test_substitute_takes_the_place_of_each_bad_sample(backend):
    rows, errors = epoch(Mixed(), backend)
    found = [int(index) for _, _, index, _ in rows]
    replaced = substitutes(errors)
    assert set(replaced) == set(BAD)
    assert not set(replaced.values()) & set(BAD)
    assert found == [replaced.get(index, index) for index in range(24)]
    assert [int(label) for _, label, _, _ in rows] == [index % 5 for index in found]
    assert all(bool(valid) for _, _, _, valid in rows)
    # Another crop of the same file, not the one that the epoch has already.
    pixels = [image for image, *_ in rows]
    assert not torch.equal(pixels[3], pixels[found[3]])


@each_backend
def test_substitutes_are_the_same_for_every_backend_and_batch_size(backend):
    expected, first = epoch(Mixed(), "torchvision", batch_size=24)
    rows, errors = epoch(Mixed(), backend, batch_size=3)
    assert substitutes(errors) == substitutes(first)
    for (image, _, index, _), (other, _, same, _) in zip(rows, expected, strict=True):
        assert int(index) == int(same)
        torch.testing.assert_close(image, other, atol=0.05 / 255 / 0.22, rtol=0)


def test_substitutes_are_the_same_at_every_world_size():
    whole, errors = epoch(Mixed(), shuffle=True)
    parts, found = set(), {}
    for rank in range(3):
        rows, some = epoch(Mixed(), shuffle=True, sharding=gp.Sharding(rank=rank, world_size=3))
        parts |= by_index(rows)
        found |= substitutes(some)
    assert parts == by_index(whole)
    assert found == substitutes(errors)


@pytest.mark.parametrize("policy", ["substitute", "ignore"])
def test_resumed_epoch_is_the_rest_of_the_uninterrupted_one(policy):
    whole, _ = epoch(Mixed(), on_error=policy, shuffle=True, batch_size=2)
    arguments = {"on_error": policy, "shuffle": True, "seed": 1, "fields": FIELDS}
    for stop in range(1, 12):
        with loader(Mixed(), RECIPE, "torchvision", batch_size=2, **arguments) as first:
            batches = iter(first)
            for _ in range(stop):
                next(batches)
            state = first.state_dict()
        with loader(Mixed(), RECIPE, "torchvision", batch_size=2, **arguments) as second:
            second.load_state_dict(state)
            rest = [row for batch in second for row in zip(*batch, strict=True)]
        assert len(rest) == 24 - 2 * stop
        for row, expected in zip(rest, whole[2 * stop :], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(row, expected, strict=True))


def test_substitutes_differ_between_epochs_and_seeds():
    kinds = {3: "text"}
    found = set()
    for seed in range(4):
        with loader(Mixed(bad=kinds), RECIPE, "torchvision", batch_size=24, seed=seed, on_error="substitute") as each:
            for _ in range(4):
                list(each)
                found.add(each.errors[0].substitute)
    assert len(found) > 5


def test_substitutes_come_from_what_the_sampler_draws():
    rows, errors = epoch(Mixed(), sampler=[3, 5, 4, 7, 3], batch_size=5)
    found = [int(index) for _, _, index, _ in rows]
    assert set(found) <= {5, 7}
    # The sample that comes twice has one substitute, and another crop of it.
    assert found[0] == found[4]
    assert not torch.equal(rows[0][0], rows[4][0])
    assert [(bad.index, bad.count) for bad in errors if bad.index == 3] == [(3, 2)]


def test_substitutes_under_pad_mask_are_not_valid():
    rows, _ = epoch(Mixed(), sharding=gp.Sharding(rank=0, world_size=1, pad="mask"))
    assert len(rows) == 25
    assert [row for row, (_, _, _, valid) in enumerate(rows) if not valid] == [*BAD, 24]


@each_backend
def test_ignore_gives_zeros_that_are_not_valid_and_labelled_minus_100(backend):
    rows, errors = epoch(Mixed(), backend, "ignore")
    for row, (image, label, index, valid) in enumerate(rows):
        assert int(index) == row
        assert bool(valid) == (row not in BAD)
        assert int(label) == (-100 if row in BAD else row % 5)
        assert bool((image == 0).all()) == (row in BAD)
    assert [bad.index for bad in errors] == list(BAD)
    assert substitutes(errors) == {}


def test_ignored_rows_of_float_labels_keep_them():
    rows, _ = epoch(Mixed(label=float), on_error="ignore")
    assert [float(label) for _, label, _, _ in rows] == [float(index % 5) for index in range(24)]


def test_ignored_rows_that_cannot_be_read_have_blank_columns():
    rows, _ = epoch(Mixed(), on_error="ignore", fields=("caption", "score", "box"))
    assert rows[20][0] == ""
    assert float(rows[20][1]) == 0.0
    assert rows[20][2].tolist() == [0] * 4
    # Where only the pixels are bad, the columns are there.
    assert rows[3][0] == "nr 3"


class Unknown(Mixed):
    """Only its records know their labels."""

    labels = None


@pytest.mark.parametrize("label", [torch.tensor, np.array, np.int16, np.uint8])
def test_ignored_rows_of_integers_in_any_shape_are_labelled_minus_100(label):
    rows, _ = epoch(Unknown(label=label), on_error="ignore")
    assert [int(found) for _, found, _, _ in rows] == [-100 if row in BAD else row % 5 for row in range(24)]
    assert {found.dtype for _, found, _, _ in rows} == {torch.int64}


def test_ignored_rows_of_data_without_labels_have_none():
    rows, errors = epoch(Unknown(label=lambda _: None), on_error="ignore")
    assert [found for _, found, _, _ in rows] == [None] * 24
    assert len(errors) == len(BAD)


def test_batch_of_nothing_but_unreadable_records_can_be_ignored():
    bad = dict.fromkeys(range(5, 10), "missing")
    rows, _ = epoch(Mixed(bad=bad), on_error="ignore", fields=("label", "caption", "valid"))
    assert [int(label) for label, *_ in rows[5:10]] == [-100] * 5
    assert len(rows) == 24


@pytest.mark.parametrize("label", [float, lambda index: [index, 0]])
def test_ignore_without_valid_needs_integer_labels(label):
    source = Mixed(label=label)
    with pytest.raises(ConfigError, match="add 'valid' to fields"):
        gp.Loader(source, RECIPE, batch_size=2, on_error="ignore")
    gp.Loader(source, RECIPE, batch_size=2, on_error="ignore", fields=("image", "label", "valid")).close()
    gp.Loader(source, RECIPE, batch_size=2, on_error="ignore", fields=("image",)).close()


@each_backend
def test_raise_names_the_first_bad_sample(backend):
    with loader(Mixed(), RECIPE, backend, batch_size=5) as each:
        with pytest.raises(DecodeError, match=r"record 3 .*on_error='substitute'") as error:
            list(each)
        assert error.value.index == 3
        assert [bad.index for bad in each.errors] == [3, 4]
        assert each.state_dict()["delivered"] == 0


def test_cut_file_is_bad_whatever_part_of_it_the_crop_needs(tmp_path):
    """Damage in the lowest lines, crops that never reach them: bad on every backend all the same."""
    whole = images.jpeg(images.photo(400, 300, 1), quality=95)
    recipe = gp.Recipe.from_torchvision(_top_rows())
    (tmp_path / "a").mkdir()
    for share in (95, 50):
        (tmp_path / "a" / f"{share}.jpg").write_bytes(whole[: len(whole) * share // 100])
    (tmp_path / "a" / "whole.jpg").write_bytes(whole)
    for backend in ("torchvision", "numba", "dali"):
        with loader(tmp_path, recipe, backend, batch_size=3, on_error="ignore", fields=("index", "valid")) as each:
            ((_, valid),) = each
        assert valid.tolist() == [False, False, True], backend


def _top_rows():
    """Nearly always crops far smaller than the image."""
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RandomResizedCrop(32, scale=(0.01, 0.02)),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5], [0.5]),
        ]
    )


def test_errors_list_each_bad_sample_once_and_only_of_the_last_epoch():
    with loader(Mixed(bad={3: "text"}), RECIPE, "torchvision", batch_size=5, on_error="ignore") as each:
        assert len(each.errors) == 0
        for number in range(3):
            list(each)
            assert [bad.index for bad in each.errors] == [3]
            assert (each.errors.epoch, each.errors.rows) == (number, 24)


def test_errors_as_json_hold_what_is_known():
    _, errors = epoch(Mixed(), on_error="substitute")
    found = json.loads(errors.to_json())
    assert found["rows"] == 24
    assert [bad["index"] for bad in found["bad"]] == [bad.index for bad in errors]
    first = found["bad"][0]
    assert set(first) == {"index", "key", "path", "offset", "reason", "count", "substitute"}
    assert (first["key"], first["count"]) == ("k3", 1)
    assert pickle.loads(pickle.dumps(errors)).to_json() == errors.to_json()


def test_errors_count_what_only_pillow_decodes():
    source = Mixed(bad={})
    source.good[2] = images.encode(images.photo(20, 30), "PNG")
    source.good[9] = images.photo(20, 30)  # pixels: nothing to decode
    _, errors = epoch(source)
    assert errors.decoded_by_pillow == 1


def test_max_bad_as_a_number_stops_the_run():
    with loader(Mixed(), RECIPE, "torchvision", batch_size=5, on_error=gp.OnError("ignore", max_bad=3)) as each:
        batches = iter(each)
        for _ in range(2):
            next(batches)
        with pytest.raises(SourceError, match=r"4 bad samples among 15 rows .*max_bad=3.*'k3', 'k4', 'k11', 'k12'"):
            next(batches)


def test_max_bad_as_a_share_counts_from_a_thousand_rows():
    bad = dict.fromkeys(range(0, 2000, 10), "text")  # one in ten
    source = Mixed(bad=bad, count=24)
    source.count, source.good = 2000, source.good * 84
    policy = gp.OnError("ignore", max_bad=0.05)
    with loader(source, gp.Recipe.eval(size=4, resize=4), "torchvision", batch_size=20, on_error=policy) as each:
        with pytest.raises(SourceError, match=r"52 bad samples among 520 rows .* than on_error\.max_bad=0\.05"):
            list(each)
        assert each.errors.rows == 500


def test_data_set_of_bad_samples_alone_has_no_substitutes():
    source = Mixed(bad=dict.fromkeys(range(24), "text"))
    with loader(source, RECIPE, "torchvision", batch_size=5, on_error=gp.OnError("substitute", max_bad=24)) as each:
        with pytest.raises(RecordError, match="no substitute for record 0: 8 others were tried, and all are bad"):
            list(each)


def test_single_bad_sample_has_no_substitute():
    with loader(Mixed(bad={0: "text"}, count=1), RECIPE, "torchvision", batch_size=1, on_error="substitute") as each:
        with pytest.raises(DecodeError, match="record 0 "):
            list(each)


def test_bad_substitutes_are_passed_over_and_listed():
    source = Mixed(bad=dict.fromkeys(range(12), "text"))  # every second one is bad
    rows, errors = epoch(source, on_error=gp.OnError("substitute", max_bad=24))
    assert all(int(index) >= 12 for _, _, index, _ in rows)
    assert {bad.index for bad in errors} == set(range(12))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"policy": "skip"}, "on_error.policy='skip' is not valid: it must be one of 'raise', 'substitute', 'ignore'"),
        ({"max_bad": 1.5}, "on_error.max_bad=1.5"),
        ({"max_bad": -1}, "on_error.max_bad=-1"),
        ({"max_bad": True}, "on_error.max_bad=True"),
        ({"max_bad": float("nan")}, "on_error.max_bad=nan"),
        ({"max_pixels": 0}, "on_error.max_pixels=0"),
    ],
)
def test_on_error_of_wrong_values_raises(wrong, said):
    with pytest.raises(ConfigError, match=said):
        gp.OnError(**wrong)


@pytest.mark.parametrize("wrong", ["skip", None, 3])
def test_loader_given_another_policy_raises(wrong):
    with pytest.raises(ConfigError, match=r"on_error\.policy"):
        gp.Loader(Mixed(), RECIPE, batch_size=2, on_error=wrong)


@each_backend
def test_max_pixels_refuses_larger_images_before_they_are_decoded(backend):
    source = Mixed(bad={})
    source.good[5] = images.jpeg(images.photo(200, 300))
    policy = gp.OnError("ignore", max_pixels=200 * 300 - 1)
    rows, errors = epoch(source, backend, policy)
    assert [bad.index for bad in errors] == [5]
    assert "200 x 300 pixels are more than the 59999 that are allowed" in errors[0].reason
    rows, errors = epoch(source, backend, replace(policy, max_pixels=200 * 300))
    assert len(errors) == 0
    assert all(bool(valid) for *_, valid in rows)


@each_backend
def test_pixels_instead_of_files_give_what_their_png_gives(backend):
    encoded, raw = Mixed(bad={}), Mixed(bad={})
    for index in range(24):
        pixels = images.photo(30 + index, 40, index)
        pixels = pixels[..., 0] if index % 3 == 0 else pixels
        pixels.flags.writeable = False  # as a memory map's
        raw.good[index] = pixels
        encoded.good[index] = images.encode(pixels, "PNG", "L" if pixels.ndim == 2 else "RGB")
    found, _ = epoch(raw, backend)
    expected, _ = epoch(encoded, backend)
    for (image, *_), (other, *_) in zip(found, expected, strict=True):
        assert torch.equal(image, other)


@pytest.mark.parametrize(
    "pixels", [np.zeros((4, 4), np.float32), np.zeros((4, 4, 4), np.uint8), np.zeros((0, 3, 3), np.uint8)]
)
def test_pixels_of_other_shapes_are_bad(pixels):
    source = Mixed(bad={})
    source.good[2] = pixels
    _, errors = epoch(source, on_error="ignore")
    assert [bad.index for bad in errors] == [2]
    assert "pixels are uint8 (height, width, 3)" in errors[0].reason


def test_bad_samples_shows_numbers():
    assert repr(BadSamples(3)) == "BadSamples(epoch 3: 0 bad samples met in 0 rows)"
