"""One intra-op thread for torch's operators in a worker, without changing any other thread.

Pixels must not depend on the number of intra-op threads (torch's float sums do), and workers are parallel already.
"""

from __future__ import annotations

import threading

_lock = threading.Lock()


def use_one_intra_op_thread() -> None:
    """Let torch's operators run single-threaded in the calling thread, which must be new to torch.

    `torch.set_num_threads` sets two things: the calling thread's own number, and the number that every thread takes
    when it first uses torch. The second is put back, from a thread that ends right away, because whoever sets it sets
    their own number, too. Threads that use torch for the first time within these 0.1 ms would get one thread; nothing
    else is affected, and nothing is once this function has returned.

    Source: ATen/ParallelOpenMP.cpp (`set_num_threads`, `lazy_init_num_threads`)
    """
    import torch

    with _lock:
        for_new_threads = torch.get_num_threads()  # this thread is new, so its number is that of all new threads
        torch.set_num_threads(1)
        restorer = threading.Thread(target=torch.set_num_threads, args=(for_new_threads,), daemon=True)
        restorer.start()
        restorer.join()
