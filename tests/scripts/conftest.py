"""What several tests of scripts need."""

import os
import socket
import subprocess
import sys

import pytest


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder for data that the tests of a file share."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def run_in_two_processes():
    """Run a script in two processes on CPU: by Accelerate's launcher, or by PyTorch's."""

    def run(script, *flags, accelerate=True, **variables):
        # The launcher that starts several processes is the one for GPUs; what it starts goes by this variable.
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"} | variables
        if accelerate:
            launch = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
            launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(free_port())]
        else:
            launch = ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
        command = [sys.executable, "-m", *launch, str(script), *map(str, flags)]
        result = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
        assert result.returncode == 0, result.stderr[-3000:]
        return result

    return run
