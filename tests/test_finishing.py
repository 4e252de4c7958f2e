"""Functions of people's own on finished batches: where they run, what they see, and what happens when they fail."""

import gc
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch

import gpupipe as gp
from gpupipe.errors import ConfigError, StateError
from gpupipe.mixing import draw_mixture
from tests.available import each_backend, loader
from tests.test_mixing import reference
from tests.test_on_error import BAD, Mixed

RECIPE = gp.Recipe.train(size=24)


def doubled(images):
    return images * 2


def one_more(images):
    return images.add_(1)


def finishers():
    return [thread for thread in threading.enumerate() if thread.name == "gpupipe-finish"]


def made(source, recipe, backend="torchvision", **arguments):
    arguments = {"batch_size": 4, "shuffle": True} | arguments
    with loader(source, recipe, backend, **arguments) as each:
        return list(each)


@each_backend
def test_functions_get_finished_batches_in_their_order(backend, image_folder):
    plain = made(image_folder, RECIPE, backend)
    found = made(image_folder, RECIPE.then(doubled).then(one_more), backend)
    for (images, labels), (changed, same) in zip(plain, found, strict=True):
        assert torch.equal(changed, images * 2 + 1)
        assert torch.equal(labels, same)
    assert not finishers()


@pytest.mark.gpu
def test_functions_get_batches_on_the_gpu_and_a_stream_of_their_own(image_folder):
    seen = []

    def watched(images):
        seen.append((images.device, torch.cuda.current_stream().cuda_stream, torch.cuda.current_device()))
        return images * 2

    mixed = replace(RECIPE.then(watched, name="watched"), mix=gp.MixUp(1.0))
    with gp.Loader(image_folder, mixed, batch_size=4, backend="dali", device="cuda") as each:
        found = [(images.clone(), soft) for images, soft in each]
    with gp.Loader(image_folder, RECIPE, batch_size=4, backend="dali", device="cuda") as each:
        for number, (images, labels) in enumerate(each):
            mixture = draw_mixture(mixed.mix, seed=0, epoch=0, position=4 * number, size=(24, 24))
            wanted, soft = reference(mixture, images * 2, labels, 3)
            assert torch.equal(found[number][0], wanted)
            assert torch.equal(found[number][1], soft)
    assert all(
        device.type == "cuda" and stream != torch.cuda.default_stream().cuda_stream for device, stream, _ in seen
    )


def test_functions_run_beside_the_training_loop_and_without_gradients(image_folder):
    seen = []

    def watched(images):
        seen.append((threading.current_thread().name, torch.is_grad_enabled(), torch.get_num_threads()))
        return images

    made(image_folder, RECIPE.then(watched, name="watched"))
    assert set(seen) == {("gpupipe-finish", False, 1)}
    assert torch.is_grad_enabled()


def test_function_may_change_the_shape_but_not_the_number_of_rows(image_folder):
    def pooled(images):
        return images.mean(dim=(2, 3))

    for images, _ in made(image_folder, RECIPE.then(pooled, name="pooled")):
        assert images.shape[1:] == (3,)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda images: images[1:], r"returned a tensor of shape \(3, 3, 24, 24\) on cpu"),
        (lambda images: images.sum(), r"returned a tensor of shape \(\) on cpu"),
        (lambda images: images.to("meta"), r"returned a tensor of shape .* on meta"),
        (lambda images: list(images), "returned list"),
        (lambda _: None, "returned NoneType"),
    ],
)
def test_function_that_returns_no_batch_is_named(fn, said, image_folder):
    with pytest.raises(ConfigError, match=rf"function mine of the recipe {said}.* for the batch of records .*4 rows"):
        made(image_folder, RECIPE.then(fn, name="mine"))


def test_exception_of_a_function_comes_out_with_a_note(image_folder):
    def broken(_):
        raise KeyError("a mistake")

    with pytest.raises(KeyError, match="a mistake") as raised:
        made(image_folder, RECIPE.then(broken, name="broken"), shuffle=False)
    (note,) = raised.value.__notes__
    assert note == "raised by the function broken of the recipe, on the batch of records 0, 1, 2, 3 (4 rows) in epoch 0"
    assert not finishers()


def test_failed_batch_was_not_delivered_and_comes_again(image_folder):
    fails = [True]

    def once(images):
        if len(images) == 4 and float(images[0, 0, 0, 0]) in third and fails:
            fails.clear()
            raise RuntimeError("out of luck")
        return images

    wanted = made(image_folder, RECIPE)
    third = {float(wanted[2][0][0, 0, 0, 0])}
    with loader(image_folder, RECIPE.then(once, name="once"), "torchvision", batch_size=4, shuffle=True) as each:
        batches = iter(each)
        found = [next(batches), next(batches)]
        with pytest.raises(RuntimeError, match="out of luck"):
            next(batches)
        each.load_state_dict(each.state_dict())
        found += list(each)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(found, wanted, strict=True))


@each_backend
@pytest.mark.parametrize("policy", ["ignore", "substitute"])
def test_function_gets_batches_whose_bad_rows_were_dealt_with(backend, policy):
    arguments = {"on_error": policy, "fields": ("image", "index", "valid"), "batch_size": 6}
    plain = made(Mixed(), RECIPE, backend, **arguments)
    found = made(Mixed(), RECIPE.then(one_more), backend, **arguments)
    for (images, index, valid), (changed, same_index, same_valid) in zip(plain, found, strict=True):
        assert torch.equal(changed, images + 1)
        assert torch.equal(index, same_index)
        assert torch.equal(valid, same_valid)
    assert sum(int((~valid).sum()) for *_, valid in found) == (len(BAD) if policy == "ignore" else 0)


def test_mixing_comes_behind_functions_and_leaves_what_they_keep(image_folder):
    kept = []

    def keeping(images):
        kept.append((images, images.clone()))
        return images

    mixed = replace(RECIPE.then(keeping, name="keeping").then(doubled), mix=gp.MixUp(1.0))
    plain, found = made(image_folder, RECIPE), made(image_folder, mixed)
    for number, ((images, labels), (changed, soft)) in enumerate(zip(plain, found, strict=True)):
        mixture = draw_mixture(mixed.mix, seed=0, epoch=0, position=4 * number, size=(24, 24))
        wanted, wanted_soft = reference(mixture, images * 2, labels, 3)
        assert torch.equal(changed, wanted)
        assert torch.equal(soft, wanted_soft)
    assert all(torch.equal(images, copy) for images, copy in kept)

    def counted(images):
        return images.mul(255).to(torch.uint8)

    with pytest.raises(ConfigError, match=r"function counted of the recipe returned torch.uint8 .* cannot be mixed"):
        made(image_folder, replace(RECIPE.then(counted, name="counted"), mix=gp.MixUp(1.0)))


def test_function_that_raises_stop_iteration_does_not_end_the_epoch_in_silence(image_folder):
    def ended(images):
        return next(iter(images[:0]))

    with pytest.raises(RuntimeError, match="StopIteration raised by the function ended"):
        made(image_folder, RECIPE.then(ended, name="ended"))


def test_close_in_the_middle_ends_the_thread(image_folder):
    entered, release = threading.Event(), threading.Event()

    def waiting(images):
        entered.set()
        assert release.wait(30)
        return images

    with loader(image_folder, RECIPE.then(waiting, name="waiting"), "torchvision", batch_size=2) as each:
        iter(each)
        assert entered.wait(30)
        each.close()
    release.set()
    until = time.monotonic() + 30
    while finishers() and time.monotonic() < until:
        time.sleep(0.01)
    assert not finishers()


def test_break_and_a_new_epoch_leave_one_thread_at_most(image_folder):
    with loader(image_folder, RECIPE.then(doubled), "torchvision", batch_size=2) as each:
        for _ in range(4):
            next(iter(each))
        until = time.monotonic() + 30
        while len(finishers()) > 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(finishers()) <= 1


def test_state_of_another_function_is_refused(image_folder):
    with loader(image_folder, RECIPE.then(doubled), "torchvision", batch_size=2) as each:
        next(iter(each))
        state = each.state_dict()
    with loader(image_folder, RECIPE.then(one_more), "torchvision", batch_size=2) as each:
        with pytest.raises(StateError, match=r"functions.*doubled.*one_more"):
            each.load_state_dict(state)


@each_backend
def test_batch_is_freed_once_it_is_dropped(backend, image_folder):
    mixed = replace(RECIPE.then(doubled), mix=gp.MixUp())
    for recipe in (mixed, gp.Views(RECIPE, RECIPE.then(doubled))):
        with loader(image_folder, recipe, backend, batch_size=4) as each:
            batches = iter(each)
            gc.collect()
            gc.disable()
            try:
                images, _ = next(batches)
                held = [weakref.ref(view) for view in (images if isinstance(images, tuple) else (images,))]
                del images
                next(batches)
                assert [ref() is None for ref in held] == [True] * len(held)
            finally:
                gc.enable()
