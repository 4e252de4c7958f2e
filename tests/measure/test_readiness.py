"""Whether a batch had been loaded when it was asked for: told for every kind of loader, and used by the diagnosis."""

import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import gpupipe as gp
from gpupipe.measure.readiness import Readiness
from tests.images import folder

PATIENT_S = 2.0


class Sleeping(Dataset):
    """Each sample takes its own time."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return len(self.seconds)

    def __getitem__(self, index):
        time.sleep(self.seconds[index])
        return torch.tensor(index)


def seen(loader, before_s):
    """For each batch, whether it was ready after the loop had worked for so long."""
    batches = iter(loader)
    readiness = Readiness(batches)
    found = []
    for seconds in before_s:
        time.sleep(seconds)
        readiness.ask()
        next(batches)
        found.append(readiness.was_ready())
    return found


def test_batches_that_workers_have_loaded_are_ready():
    loader = DataLoader(Sleeping([0.0] * 6), batch_size=1, num_workers=2)
    assert seen(loader, [PATIENT_S, 0.2, 0.2]) == [True] * 3


def test_batches_that_are_still_loaded_are_not_ready():
    loader = DataLoader(Sleeping([0.3] * 6), batch_size=1, num_workers=1, prefetch_factor=1)
    assert seen(loader, [0.0, 0.0, 0.0]) == [False] * 3


def test_a_batch_that_came_before_its_turn_does_not_make_the_right_one_ready():
    loader = DataLoader(Sleeping([PATIENT_S, 0.0, 0.0, 0.0]), batch_size=1, num_workers=2)
    assert seen(loader, [PATIENT_S / 2, 0.0]) == [False, True]


@pytest.mark.parametrize("loader", [[1, 2], DataLoader(Sleeping([0.0] * 2), batch_size=1)])
def test_it_is_unknown_where_nothing_loads_ahead(loader):
    assert seen(loader, [0.0, 0.0]) == [None, None]


def test_batches_of_a_loader_and_of_prefetch(tmp_path):
    recipe = gp.Recipe.train(size=32)
    # Others may compile their kernels first, which takes longer than the loop works.
    with gp.Loader(folder(tmp_path / "data"), recipe, batch_size=2, backend="torchvision") as loader:
        assert seen(loader, [PATIENT_S, PATIENT_S / 4]) == [True, True]
    slow = ((time.sleep(0.3), number)[1] for number in range(3))
    assert seen(gp.prefetch(slow, "cpu", depth=1), [0.0, 1.0]) == [False, True]


def test_watch_notes_it():
    with gp.watch(DataLoader(Sleeping([0.2] * 3), batch_size=1, num_workers=1), every=0) as watched:
        for _ in watched:
            pass
        assert watched.report().log.steps["ready"].tolist() == [0, 0, 0]


def test_watch_counts_the_start_of_workers_as_a_wait():
    class Late:
        def __iter__(self):
            time.sleep(0.2)
            return iter([torch.zeros(1)])

    with gp.watch(Late(), every=0) as watched:
        list(watched)
        assert watched.report().log.steps["wait_s"][0] >= 0.2
