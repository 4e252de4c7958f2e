"""One intra-op thread for torch in these tests: DALI's threads share the cores, and torch's would wait for theirs."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_intra_op_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
