"""Work in threads: results in order, errors in their place, nothing left behind."""

import os
import threading
import time

import pytest

from gpupipe.parallel import Peekable, in_order, usable_cores


def test_usable_cores_is_what_this_process_may_use():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert usable_cores() == cores


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_in_order_gives_results_in_the_order_of_the_tasks(threads):
    def work(number):
        time.sleep(0.002 * (number % 3))
        return number * number

    assert list(in_order(work, range(50), threads)) == [number * number for number in range(50)]


@pytest.mark.parametrize("threads", [1, 3])
def test_in_order_raises_what_the_work_raised_in_its_place(threads):
    def work(number):
        if number == 5:
            raise KeyError("five")
        return number

    results = in_order(work, range(100), threads)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError, match="five"):
        next(results)


def test_in_order_takes_few_tasks_ahead_and_leaves_no_thread():
    before = threading.active_count()
    taken = []

    def tasks():
        for number in range(10_000):
            taken.append(number)
            yield number

    results = in_order(lambda number: number, tasks(), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert len(taken) <= 3 + 4 * 2
    results.close()
    assert threading.active_count() == before


def test_in_order_of_nothing_is_nothing():
    assert list(in_order(str, [], 3)) == []


def test_peekable_shows_the_next_value_until_it_is_taken():
    values = Peekable(iter("ab"))
    assert [values.peek(), values.peek(), values.take(), values.peek(), values.take()] == ["a", "a", "a", "b", "b"]
    assert values.peek() is None
