"""The loader on a GPU: what only a whole loader shows. The backend alone is tested in backends/dali/test_gpu.py."""

import json

import numpy as np
import pytest
import torch

import gpupipe as gp
from tests import images
from tests.test_on_error import BAD, Mixed
from tests.torchrun.run import torchrun

pytestmark = pytest.mark.gpu

RECIPE = gp.Recipe.train(size=48, jitter=(0.4, 0.4, 0.4, 0.1))
FIELDS = ("image", "label", "index", "valid")
# Of one LSB after the normalisation, in what PARITY allows a GPU: 0.1 LSB on the same decoded pixels.
ALLOWED = 0.1 / 255 / min(RECIPE.normalize.std)
DECODE = pytest.mark.parametrize("decode", ["gpu", "hardware", "cpu"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """60 images of all kinds that decoders treat differently."""
    folder = tmp_path_factory.mktemp("gpu") / "a"
    folder.mkdir()
    for number in range(60):
        pixels = images.photo(90 + number, 160 - number, number)
        kind = ("4:2:0", "4:4:4", "4:2:2", "4:4:0", "grey")[number % 5]
        progressive = number % 7 == 3 and kind != "4:4:0"
        (folder / f"{number:02}.jpg").write_bytes(images.jpeg(pixels, subsampling=kind, progressive=progressive))
    return folder.parent


def loader(source, decode="gpu", device="cuda", **arguments):
    defaults = {"batch_size": 8, "shuffle": True, "seed": 3, "fields": FIELDS, "backend": "dali"}
    return gp.Loader(
        source, RECIPE, device=device, options=gp.Options(threads=2, decode=decode), **(defaults | arguments)
    )


def by_index(batches):
    """Index -> image on the host, of the valid rows."""
    found = {}
    for batch_images, _, indices, valid in batches:
        for image, index, is_valid in zip(batch_images.cpu(), indices.tolist(), valid.tolist(), strict=True):
            if is_valid:
                found[index] = image
    return found


def worst(found, expected):
    assert found.keys() == expected.keys()
    return max(float((found[index] - expected[index]).abs().max()) for index in found)


def test_gpu_is_what_auto_takes_and_all_tensors_are_there(folder):
    with gp.Loader(folder, RECIPE, batch_size=8, fields=FIELDS) as auto:
        assert auto.backend.name == "dali"
        batch_images, labels, indices, valid = next(iter(auto))
    assert {each.device.type for each in (batch_images, labels, indices, valid)} == {"cuda"}
    assert batch_images.device.index == torch.cuda.current_device()


def test_gpu_epoch_with_host_decode_equals_the_reference(folder):
    with loader(folder, "cpu") as gpu, loader(folder, backend="torchvision", device="cpu") as reference:
        assert worst(by_index(gpu), by_index(reference)) <= ALLOWED


@DECODE
@pytest.mark.parametrize("on_error", ["substitute", "ignore"])
def test_gpu_error_policies_do_what_they_do_on_a_cpu(decode, on_error):
    with (
        loader(Mixed(), decode, on_error=on_error) as gpu,
        loader(Mixed(), on_error=on_error, backend="torchvision", device="cpu") as reference,
    ):
        rows, expected = list(gpu), list(reference)
        told, said = ([(bad.index, bad.substitute) for bad in each.errors] for each in (gpu, reference))
    assert sorted(told) == sorted(said)
    assert {index for index, _ in told} == set(BAD)
    for batch, other in zip(rows, expected, strict=True):
        for field, value, wanted in zip(FIELDS[1:], batch[1:], other[1:], strict=True):
            assert torch.equal(value.cpu(), wanted), field
        if on_error == "ignore":
            assert not batch[0][~batch[3]].any()


@DECODE
def test_gpu_error_policy_raise_names_the_sample(decode):
    with (
        loader(Mixed(bad={3: "cut"}), decode, shuffle=False, on_error="raise") as gpu,
        pytest.raises(gp.DecodeError, match="k3"),
    ):
        list(gpu)


@DECODE
def test_gpu_resumes_what_a_gpu_began_with_the_same_pixels(folder, decode):
    with loader(folder, decode) as whole:
        expected = [batch[0].cpu() for batch in whole]
    with loader(folder, decode) as begun:
        iterator = iter(begun)
        first = [next(iterator)[0].cpu() for _ in range(3)]
        state = json.loads(json.dumps(begun.state_dict()))
    with loader(folder, decode) as resumed:
        resumed.load_state_dict(state)
        rest = [batch[0].cpu() for batch in resumed]
    assert len(first) + len(rest) == len(expected)
    assert all(map(torch.equal, [*first, *rest], expected))


@pytest.mark.parametrize("way", ["CPU to GPU", "GPU to CPU"])
def test_gpu_and_cpu_resume_each_other(folder, way):
    gpu, cpu = {"decode": "cpu"}, {"backend": "torchvision", "device": "cpu", "batch_size": 5}
    before, after = (cpu, gpu) if way == "CPU to GPU" else (gpu, cpu)
    with loader(folder, **cpu) as reference:
        expected = by_index(reference)
    with loader(folder, **before) as begun:
        iterator = iter(begun)
        found = by_index([next(iterator) for _ in range(3)])
        state = begun.state_dict()
    with loader(folder, **after) as resumed:
        resumed.load_state_dict(state)
        rest = by_index(resumed)
    assert not found.keys() & rest.keys()
    assert worst(found | rest, expected) <= ALLOWED


@DECODE
def test_gpu_two_loaders_at_once_do_not_disturb_each_other(folder, decode):
    with loader(folder, decode) as one, loader(folder, decode, seed=4) as other:
        expected = [[batch[0].cpu() for batch in each] for each in (one, other)]
        one.set_epoch(0)
        other.set_epoch(0)
        found: tuple[list, list] = ([], [])
        for batch, second in zip(one, other, strict=True):  # in turn, so that both have batches in flight
            found[0].append(batch[0].cpu())
            found[1].append(second[0].cpu())
    for now, alone in zip(found, expected, strict=True):
        assert all(map(torch.equal, now, alone))


def test_gpu_loader_leaves_memory_flat_over_epochs(folder):
    torch.cuda.synchronize()
    with loader(folder) as each:
        for _ in range(3):
            list(each)
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        for _ in range(40):
            for batch in each:
                del batch
        torch.cuda.synchronize()
        taken = free - torch.cuda.mem_get_info()[0]
    assert taken < 32 << 20, f"{taken >> 20} MB more after 40 epochs"


def test_gpu_loader_for_each_rank_stays_on_its_own_device(folder, tmp_path):
    """Two processes by torchrun; with one GPU both have it, and with more each has its own."""
    script = tmp_path / "worker.py"
    script.write_text(_WORKER)
    torchrun(script, folder, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert sorted(index for rank in ranks for index in rank["indices"]) == list(range(60))
    devices = torch.cuda.device_count()
    assert [rank["device"] for rank in ranks] == ([0, 1] if devices > 1 else [0, 0])
    for rank in ranks:
        touched = set(np.flatnonzero(rank["contexts"]).tolist())
        assert touched == {rank["device"]}, "a device of another rank was touched"


_WORKER = """
import json, os, sys
from pathlib import Path
import torch
import gpupipe as gp

folder, out = sys.argv[1:]
rank = int(os.environ["LOCAL_RANK"])
if torch.cuda.device_count() == 1:
    torch.cuda.set_device(0)
    arguments = {"device": "cuda:0"}
else:
    arguments = {}
with gp.Loader(folder, gp.Recipe.train(size=32), batch_size=8, shuffle=True, fields=("image", "index"), backend="dali",
               **arguments) as loader:
    batches = list(loader)
Path(out, f"{rank}.json").write_text(json.dumps({
    "indices": [index for _, indices in batches for index in indices.tolist()],
    "device": batches[0][0].device.index,
    # A device that torch never used has no memory reserved.
    "contexts": [torch.cuda.memory_reserved(number) for number in range(torch.cuda.device_count())],
}))
"""
