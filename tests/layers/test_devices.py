"""Several devices in a process: what is not supported is an error that says so."""

import os
import re
import subprocess
import sys

import pytest

from reference import BACKEND

# ---- several devices in a process

SEVERAL_DEVICES = {
    "tensorflow": """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
scope = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope
""",
    "jax": """
import contextlib, keras
keras.distribution.set_distribution(keras.distribution.DataParallel())
scope = contextlib.nullcontext
""",
}
BUILD_AND_CALL = """
import numpy as np, sok_keras as sok
for use in (lambda layer: layer.build(), lambda layer: layer(np.array([1], "int32"))):
    with scope():
        try:
            use(sok.DynamicEmbedding(4))
        except sok.DeviceError as error:
            print(error)
"""


@pytest.mark.skipif(BACKEND == "torch", reason="Keras has no distribution on PyTorch")
def test_several_devices_in_a_process_are_refused():
    """In a process of its own: a device cannot be split once it was used."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SEVERAL_DEVICES[BACKEND] + BUILD_AND_CALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=True)
    told = "One process uses one device. Received: a distribution over 2 devices.*torchrun --nproc-per-node 2 train.py"
    assert len(re.findall(told, done.stdout)) == 2, done.stdout


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tests how TensorFlow numbers GPUs")
def test_tables_of_a_rank_are_on_the_gpu_that_it_may_use(monkeypatch):
    import tensorflow as tf

    from sok_keras import backend

    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU") for number in range(4)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["/device:GPU:0"])
    seen = []
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda device, kind: seen.append(device))
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: seen)
    backend.bind_gpu(3)
    assert backend.gpu(required=True) == 3
