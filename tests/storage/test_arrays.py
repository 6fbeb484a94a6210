"""A model's variables in a dump: exactly as they are, or refused before anything is written or changed."""

import contextlib
import json
import os
import subprocess
import sys

import keras
import ml_dtypes
import numpy as np
import pytest

import sok_keras as sok
from dumped import rewrite_manifest
from reference import BACKEND, DIM, table_of

DTYPES = [
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "complex64",
    "complex128",
    "bool",
    "string",
]
DTYPES += [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]


class WithVariable(keras.layers.Layer):
    def __init__(self, dtype_of_variable):
        super().__init__()
        self.variable = self.add_weight(
            shape=(2, 3), initializer="zeros", dtype=dtype_of_variable, trainable=False, autocast=False, name="odd"
        )

    def call(self, inputs):
        return inputs


def model_with(dtype):
    ids = keras.Input((3,), dtype="int32")
    return keras.Model(ids, WithVariable(dtype)(sok.DynamicEmbedding(DIM, seed=1)(ids)))


def variable_of(model):
    return model.layers[-1].variable


def bits_of(model):
    """As the framework has them."""
    value = np.asarray(sok.backend.to_numpy(variable_of(model).value))
    return value.dtype, value.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_variable_of_any_dtype_comes_back_to_the_bit_or_is_refused_at_dump(tmp_path, dtype):
    try:
        model, other = model_with(dtype), model_with(dtype)
    except Exception as error:
        pytest.skip(f"{BACKEND} has no variable of {dtype}: {type(error).__name__}")
    own = keras.backend.standardize_dtype(variable_of(model).value.dtype)
    if own in ("complex128", "string"):
        with pytest.raises(ValueError, match=f"A dump holds variables of the dtypes .* of dtype {dtype}"):
            sok.dump(tmp_path / "d", model)
        assert not list(tmp_path.iterdir())
        return
    numpy_dtype = np.dtype(getattr(ml_dtypes, own, own))
    patterns = np.random.default_rng(0).integers(0, 2 if own == "bool" else 256, 6 * numpy_dtype.itemsize, "uint8")
    variable_of(model).assign(sok.backend.from_numpy(patterns.view(numpy_dtype).reshape(2, 3)))
    assert bits_of(model) == (numpy_dtype, patterns.tobytes())
    sok.dump(tmp_path / "d", model)
    sok.load(tmp_path / "d", other)
    assert bits_of(other) == bits_of(model)


def test_model_of_a_bfloat16_policy_predicts_the_same_after_load(tmp_path):
    def model():
        ids = keras.Input((3,), dtype="int32")
        rows = sok.DynamicEmbedding(DIM, seed=1)(ids)
        return keras.Model(ids, keras.layers.Dense(2, dtype="bfloat16")(keras.layers.Flatten()(rows)))

    first, second = model(), model()
    sok.dump(tmp_path / "d", first)
    sok.load(tmp_path / "d", second)
    ids = np.arange(9).reshape(3, 3).astype("int32")
    np.testing.assert_array_equal(*(np.asarray(m.predict(ids, verbose=0), "float32") for m in (first, second)))


def dense_model(dtype="float32"):
    ids = keras.Input((3,), dtype="int32")
    rows = keras.layers.Flatten()(sok.DynamicEmbedding(DIM, seed=1)(ids))
    return keras.Model(ids, keras.layers.Dense(2, dtype=dtype, name="head")(rows))


def assert_refused(path, model, match, error=sok.DumpMismatchError):
    before = [np.asarray(sok.backend.to_numpy(v.value)).copy() for v in model.variables]
    with pytest.raises(error, match=match):
        sok.load(path, model)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(np.asarray(sok.backend.to_numpy(variable.value)), value)
    assert len(table_of(model)) == 0


def kernel_of(body):
    return next(tensor for tensor in body["arrays"]["tensors"] if tensor["shape"] == [3 * DIM, 2])


@pytest.mark.parametrize("dtype", ["I32", "U32"])
def test_kernel_relabelled_as_another_dtype_is_refused_before_its_bytes_are_read(tmp_path, dtype):
    """A signed manifest; its file is not even there to be read."""
    sok.dump(tmp_path / "d", dense_model())
    rewrite_manifest(tmp_path / "d", lambda body: kernel_of(body).update(dtype=dtype))
    assert_refused(
        tmp_path / "d", dense_model(), "variable 'head/kernel' must be of the dtype .* expected u?int32, got float32"
    )


def test_shapes_are_compared_before_bytes_are_read(tmp_path, monkeypatch):
    sok.dump(tmp_path / "d", dense_model("float16"))
    reader = sok.backend.native.DumpReader

    class Unread:
        def __init__(self, path):
            self.manifest = reader(path).manifest

    monkeypatch.setattr(sok.checkpoint.native, "DumpReader", Unread, raising=False)
    assert_refused(
        tmp_path / "d", dense_model(), "must be of the dtype that the dump has: expected float16, got float32"
    )


@pytest.mark.parametrize("name", ["model", "other/00000/x", "\0", "model/00000/" + "n" * 10**6, ""])
def test_array_of_an_absurd_name_is_an_error_of_ours(tmp_path, name):
    sok.dump(tmp_path / "d", dense_model())
    rewrite_manifest(tmp_path / "d", lambda body: kernel_of(body).update(name=name))
    assert_refused(tmp_path / "d", dense_model(), "", sok.DumpError)


def test_array_of_very_many_axes_is_an_error_of_ours(tmp_path):
    sok.dump(tmp_path / "d", dense_model())
    rewrite_manifest(tmp_path / "d", lambda body: kernel_of(body).update(shape=[3 * DIM, 2] + [1] * 10**5))
    assert_refused(tmp_path / "d", dense_model(), "size must be that of its tensors", sok.CorruptDumpError)


def test_counter_that_does_not_fit_is_refused(tmp_path):
    """Counters differ in width from backend to backend: what fits is taken."""
    model = model_with("int16")
    wide = [7, -300, 2**14, 0, 1, 2]
    sok.dump(tmp_path / "d", model)
    native = sok.backend.native
    for values, fits in ((wide, True), ([*wide[:5], 2**40], False)):
        array = np.array(values, "int64").view("uint8")
        tables = [table_of(model)._native]
        native.dump((str(tmp_path / "d"), tables, [("model/00000/odd", "I64", [2, 3], array)], (True, 0, True, None)))
        other = model_with("int16")
        if fits:
            sok.load(tmp_path / "d", other)
            assert np.asarray(sok.backend.to_numpy(variable_of(other).value)).ravel().tolist() == wide
        else:
            assert_refused(tmp_path / "d", other, "the integers of 'model/00000/odd' must fit variable")


# ---- beside a writer

WRITER = """
import test_arrays as t
model = t.dense_model()
for number in range(1, 10**9):
    t.write({path!r}, model, number)
"""


def write(path, model, number):
    """A dump whose rows and whose kernel say the same number."""
    table_of(model).assign(np.arange(4), np.full((4, DIM), number))
    model.get_layer("head").kernel.assign(np.full((3 * DIM, 2), number))
    sok.dump(path, model)


def numbers_of(model):
    rows = table_of(model).find(np.arange(4))[0]
    return {
        *rows.ravel().tolist(),
        *np.asarray(sok.backend.to_numpy(model.get_layer("head").kernel.value)).ravel().tolist(),
    }


@contextlib.contextmanager
def writer_beside(path):
    code = f"import sys\nsys.path[:0] = {sys.path!r}\n" + WRITER.format(path=str(path))
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "KERAS_BACKEND": BACKEND})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def count_torn(path, loads, dumps):
    """Loads beside a writer, at least `loads` times and until `dumps` dumps were met, however slow the writer is.

    Returns:
        `(torn loads, dumps that were met)`.
    """
    model, torn, met = dense_model(), 0, set()
    write(path, model, 0)
    with writer_beside(path) as process:
        while numbers_of(model) == {0.0}:  # the writer is starting
            assert process.poll() is None
            sok.load(path, model)
        done = 0
        while done < loads or len(met) < dumps:
            assert process.poll() is None
            sok.load(path, model)
            numbers = numbers_of(model)
            torn += len(numbers) > 1
            met |= numbers
            done += 1
    return torn, len(met)


def test_load_beside_a_writer_is_of_one_dump(tmp_path):
    torn, met = count_torn(tmp_path / "d", 200, 4)
    assert torn == 0 and met > 3


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_soak_loads_beside_a_writer_are_of_one_dump(tmp_path):
    torn, met = count_torn(tmp_path / "d", 10**5, 1001)
    print(json.dumps({"torn": torn, "met": met}))
    assert torn == 0 and met > 1000
