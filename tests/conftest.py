"""What every test gets: fixed seeds, warnings of ours as errors, the backend in the header."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Two devices, as far as JAX and TensorFlow know, for the tests that more than one is refused.
# On a GPU a product is the same bits each time that it is compiled, or run.
os.environ.setdefault("TF_DETERMINISTIC_OPS", "1")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2 --xla_gpu_deterministic_ops=true"
)

# On a GPU too products are of float32.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

import keras
import pytest

if keras.backend.backend() == "torch":
    import torch

    torch.set_num_threads(1)  # of models this small, threads only wait for each other
elif keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error:::sok_keras")
    # Attributed to the caller's module, so that users see their own line.
    config.addinivalue_line("filterwarnings", "error:Table .* is full")


def pytest_report_header():
    return f"keras {keras.__version__} on {keras.backend.backend()}"


@pytest.fixture(autouse=True)
def fixed_seeds():
    keras.utils.set_random_seed(7)
