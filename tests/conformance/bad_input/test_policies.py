"""Every odd and broken file through every backend and all three policies: one verdict, one substitute, one picture."""

import re

import pytest
import torch

import gpupipe as gp
from gpupipe.errors import DecodeError
from tests.available import each_backend, need
from tests.conformance.bad_input import files
from tests.zoo import Trap

COLLECTIONS = ("zoo", "tricky")
EXIF = ("ignore", "apply")
# PARITY.md, whole chain; the jitter of these recipes stays below 1.8.
TOLERANCE_LSB = 0.05


@pytest.fixture(params=COLLECTIONS)
def animals(request):
    return files.collection(request.param, request)


@pytest.fixture
def few(request):
    return files.few(request)


def references(source, bad, exif):
    """Index -> picture, of the good ones; drawn once for all backends."""
    good = [index for index, name in enumerate(source.names) if name not in bad]
    names = tuple(source.names)
    found = {}
    for index in good:  # each alone, as an index is part of the draws
        key = (names, index, exif)
        if key not in _known:
            _known[key] = files.expected(source, [index], files.recipe(exif))[index]
        found[index] = _known[key]
    return found


_known = {}


@each_backend
@pytest.mark.parametrize("exif", EXIF)
def test_ignore_gives_each_good_file_its_picture_and_each_bad_one_zeros(animals, backend, exif):
    data, bad = animals
    source, recipe = files.Files(data), files.recipe(exif)
    with files.open_loader(source, recipe, backend, "ignore") as loader:
        batches = list(loader)
        assert len(batches) == len(loader) == -(-len(data) // 11)
        errors = loader.errors
    assert all(images.shape == (len(labels), 3, 24, 24) for images, labels, *_ in batches)
    rows = files.rows_of(batches)
    assert [int(index) for _, _, index, _ in rows] == list(range(len(data)))
    wrong = {source.names[int(i)] for *_, i, valid in rows if bool(valid) == (source.names[int(i)] in bad)}
    assert not wrong, "the verdict on these is not the one that is expected"
    pictures = references(source, bad, exif)
    for image, label, index, valid in rows:
        if valid:
            assert int(label) == int(index) % 7
            far = files.lsb(image, pictures[int(index)], recipe)
            assert far <= TOLERANCE_LSB, f"{source.names[int(index)]} is {far:.3f} LSB off"
        else:
            assert int(label) == -100
            assert not image.any()
    assert {each.key for each in errors} == set(bad)
    assert not Trap.sprung, "a file was unpickled"


@each_backend
def test_reasons_are_readable_and_name_the_record(animals, backend):
    data, bad = animals
    with files.open_loader(files.Files(data), files.recipe(), backend, "ignore") as loader:
        list(loader)
        errors = {each.key: each for each in loader.errors}
    for name, why in bad.items():
        found = errors[name]
        assert re.search(why, found.reason), found.reason
        assert found.reason.startswith(f"record {found.index} ({name!r} of /data/{name} at byte {512 * found.index})")
        assert (found.path, found.offset, found.count) == (f"/data/{name}", 512 * found.index, 1)
        assert "0x" not in found.reason.replace("'0xFF'", "").replace(name, ""), "an address says nothing"
        assert len(found.reason) < 600
        assert "\n" not in found.reason


@each_backend
def test_raise_stops_at_each_bad_file_and_at_no_good_one(animals, backend):
    data, bad = animals
    source = files.Files(data)
    with files.open_loader(source, files.recipe(), backend, "raise", batch_size=1, fields=("index",)) as loader:
        beginning = loader.state_dict()
        stops = []
        position = 0
        while position < len(source):
            loader.load_state_dict(beginning | {"delivered": position})
            try:
                for (index,) in loader:
                    assert int(index) == position
                    position += 1
            except DecodeError as error:
                stops.append((error.index, error.key))
                position += 1
    assert stops == [(index, name) for index, name in enumerate(data) if name in bad]


def epoch(source, backend, **arguments):
    """The rows of one epoch, and index -> substitute."""
    with files.open_loader(source, files.recipe(), backend, "substitute", **arguments) as loader:
        batches = list(loader)
        assert len(batches) == len(loader)
        return files.rows_of(batches), {each.index: each.substitute for each in loader.errors}


@each_backend
def test_substitutes_are_those_of_the_reference_and_so_are_their_pictures(animals, backend):
    data, bad = animals
    source = files.Files(data)
    need("torchvision")
    name = tuple(data)
    if name not in _by_reference:
        _by_reference[name] = epoch(source, "torchvision", shuffle=True)
    expected, theirs = _by_reference[name]
    rows, substitutes = epoch(source, backend, shuffle=True, batch_size=7)
    assert substitutes == theirs
    taken = {index: other for index, other in substitutes.items() if source.names[index] in bad and other is not None}
    assert {source.names[index] for index in taken} == set(bad)
    assert not {source.names[other] for other in taken.values()} & set(bad)
    for (image, label, index, valid), (reference, same_label, same, _) in zip(rows, expected, strict=True):
        assert (int(index), int(label), bool(valid)) == (int(same), int(same_label), True)
        assert files.lsb(image, reference, files.recipe()) <= TOLERANCE_LSB


_by_reference = {}


@each_backend
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("policy", ["substitute", "ignore"])
def test_ranks_deliver_together_what_one_delivers_alone(few, backend, policy, world_size):
    source = files.Files(few[0])

    def run(**arguments):
        with files.open_loader(
            source, files.recipe(), backend, policy, shuffle=True, batch_size=2, **arguments
        ) as loader:
            batches = list(loader)
            # One that was only met as a bad substitute has none itself.
            substitutes = {each.index: each.substitute for each in loader.errors if each.substitute is not None}
            return len(batches), files.rows_of(batches), substitutes

    _, alone, substitutes = run()
    parts = [run(sharding=gp.Sharding(rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert len({batches for batches, _, _ in parts}) == 1
    assert {index: other for _, _, found in parts for index, other in found.items()} == substitutes
    together = [row for group in zip(*(rows for _, rows, _ in parts), strict=True) for row in group]
    assert_same_rows(together, alone)


def assert_same_rows(rows, expected):
    for row, other in zip(rows, expected, strict=True):
        for value, same in zip(row, other, strict=True):
            assert torch.equal(value, same)


@each_backend
@pytest.mark.parametrize("policy", ["substitute", "ignore"])
def test_resumed_at_any_point_the_rest_is_as_it_would_have_been(few, backend, policy):
    source, recipe = files.Files(few[0]), files.recipe()
    arguments = {"shuffle": True, "batch_size": 3}
    with (
        files.open_loader(source, recipe, backend, policy, **arguments) as first,
        files.open_loader(source, recipe, backend, policy, **arguments) as second,
    ):
        rows, states = [], []
        for batch in first:
            states.append(first.state_dict())
            rows.extend(zip(*batch, strict=True))
        for number, state in enumerate(states[:-1], 1):
            second.load_state_dict(state)
            assert_same_rows(files.rows_of(second), rows[3 * number :])
