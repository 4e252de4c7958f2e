"""A worker's intra-op threads are its own business: no other thread's number or real parallelism changes."""

import os
import threading
from pathlib import Path

import pytest
import torch

from gpupipe.backends.intra_op import use_one_intra_op_thread

TASKS = Path("/proc/self/task")
needs_tasks = pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in /proc, which is Linux's")
SECONDS = 30


@pytest.fixture(autouse=True)
def restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def in_new_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(SECONDS)
    return found[0]


def worker():
    use_one_intra_op_thread()
    return torch.get_num_threads()


def team():
    """(What torch says, how many threads its operators really start in a thread that has started none yet)."""
    before = set(os.listdir(TASKS))
    torch.ones(3_000_000).exp().sum()
    return torch.get_num_threads(), len(set(os.listdir(TASKS)) - before) + 1


def test_worker_has_one_thread_and_others_keep_theirs():
    torch.set_num_threads(3)
    assert in_new_thread(worker) == 1
    assert torch.get_num_threads() == 3
    assert in_new_thread(torch.get_num_threads) == 3


def test_worker_leaves_a_running_thread_of_another_number():
    go, seen = threading.Event(), []

    def user():
        torch.set_num_threads(5)
        seen.append("ready")
        assert go.wait(SECONDS)
        seen.append(torch.get_num_threads())

    torch.set_num_threads(2)
    thread = threading.Thread(target=user)
    thread.start()
    while not seen:
        pass
    assert in_new_thread(worker) == 1
    go.set()
    thread.join(SECONDS)
    assert seen[1] == 5
    assert torch.get_num_threads() == 2
    assert in_new_thread(torch.get_num_threads) == 5  # the last number that was set, as torch has it


def test_worker_numbers_set_later_count_for_new_threads():
    assert in_new_thread(worker) == 1
    torch.set_num_threads(4)
    assert torch.get_num_threads() == 4
    assert in_new_thread(torch.get_num_threads) == 4


def test_many_workers_at_once_restore_the_number():
    torch.set_num_threads(3)
    threads = [threading.Thread(target=use_one_intra_op_thread) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert in_new_thread(torch.get_num_threads) == 3


@needs_tasks
def test_worker_others_really_run_in_parallel_as_before():
    torch.set_num_threads(3)
    assert in_new_thread(team) == (3, 3)  # the check itself sees the difference
    assert in_new_thread(worker) == 1
    assert in_new_thread(team) == (3, 3)


@needs_tasks
def test_worker_really_runs_alone():
    torch.set_num_threads(3)

    def worker_team():
        use_one_intra_op_thread()
        return team()

    assert in_new_thread(worker_team) == (1, 1)
