"""Starts programs as ranks, each a process."""

import os
import pathlib
import socket
import subprocess
import sys

import keras

import sok_keras as sok
from reference import ON_GPU

HERE = pathlib.Path(__file__).parent
PACKAGES = os.pathsep.join(
    [str(pathlib.Path(sok.__file__).parent.parent), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
)


def environment(**variables):
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "RANK", "WORLD_SIZE")}
    common = {"PYTHONPATH": PACKAGES, "KERAS_BACKEND": keras.backend.backend(), "JAX_ENABLE_X64": "1"}
    if ON_GPU:
        # Each process would choose XLA's kernels by timing them, and round as these do. TensorFlow rounds products to TF32.
        common |= {"XLA_FLAGS": "--xla_gpu_autotune_level=0", "NVIDIA_TF32_OVERRIDE": "0"}
    return {**kept, **common, "SOK_NUM_THREADS": "1", **variables}


def launch(ranks, program, *arguments, timeout=240):
    """Runs a program as ranks. Returns its exit status and what it printed."""
    command = [sys.executable, "-m", "sok_keras.launch", "-n", str(ranks), str(HERE / program), *map(str, arguments)]
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    return done.returncode, done.stdout


def run(ranks, program, *arguments):
    status, text = launch(ranks, program, *arguments)
    assert status == 0, text


def alone(program, *arguments):
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout


def start(rank, code, **variables):
    command = [sys.executable, "-c", f"import sok_keras as sok\n{code}"]
    return subprocess.Popen(
        command, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def last_line(process):
    text = process.communicate(timeout=120)[0]
    return text.strip().splitlines()[-1] if text.strip() else ""
