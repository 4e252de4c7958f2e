"""Start torchrun, and never wait for ever."""

import os
import signal
import subprocess
import sys

import pytest

GUARD_S = 60


def guarded(command, *, guard_s=GUARD_S, **options):
    """The output of a command that ends in time and with success; else the test fails, and nothing is left running.

    torchrun forwards SIGTERM to its workers and waits for them, so it is asked first.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **options
    )
    try:
        output, _ = process.communicate(timeout=guard_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        pytest.fail(f"still running after {guard_s} s: {command}\n{output[-5000:]}")
    assert process.returncode == 0, f"{command} ended with {process.returncode}\n{output[-5000:]}"
    return output


def torchrun(script, *arguments, processes=2):
    """Run a script in several processes that find each other over the loopback device."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return guarded([sys.executable, *start, str(script), *map(str, arguments)], env=environment)
