"""Dumps that do not fit, or are broken: found before anything changes."""

import errno

import keras
import numpy as np
import pytest

import sok_keras as sok
from dumped import OPTIMIZERS, all_of, assert_equal, compiled, contents_of, filled, rewrite_manifest, two_tables
from reference import (
    DIM,
    embedding_of,
    fit,
    our_embedding,
    table_of,
)

# ---- what does not fit, or is broken


def assert_load_is_refused(path, source, error, match, **options):
    tables = [source.get_table()] if isinstance(source, sok.DynamicEmbedding) else source.get_tables().values()
    before = [contents_of(table) for table in tables]
    with pytest.raises(error, match=match):
        sok.load(path, source, **options)
    for table, contents in zip(tables, before, strict=True):
        assert_equal(contents_of(table).values(), contents.values())


def one_table(vocabulary_size=None, dim=DIM, **options):
    layer = sok.DistributedEmbedding(
        sok.FeatureConfig("f", sok.TableConfig("t", vocabulary_size, dim, seed=3, **options)), name="one"
    )
    layer.get_tables()["t"].find_or_insert(np.arange(options.get("max_capacity") or 5))
    return layer


MISMATCHES = {
    "dim": ({"dim": DIM + 1}, "`embedding_dim` of table `one/t` must be the dump's: expected 4, got 5"),
    "dynamic_for_static": (
        {"vocabulary_size": 7},
        "`vocabulary_size` of table `one/t` must be the dump's: expected None .*, got 7",
    ),
    "capacity": ({"max_capacity": 3}, "`max_capacity` must be at least the rows after the load: expected 5, got 3"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_dump_of_another_kind_of_table_changes_nothing(tmp_path, name):
    options, message = MISMATCHES[name]
    sok.dump(tmp_path / "d", one_table())
    assert_load_is_refused(tmp_path / "d", one_table(**options), sok.DumpMismatchError, message)


def test_dump_of_a_static_table_does_not_fit_a_dynamic_one(tmp_path):
    sok.dump(tmp_path / "d", one_table(7))
    assert_load_is_refused(
        tmp_path / "d",
        one_table(),
        sok.DumpMismatchError,
        "`vocabulary_size` of table `one/t` must be the dump's: expected 7, got None",
    )


def test_dump_of_other_tables_changes_nothing(tmp_path):
    sok.dump(tmp_path / "d", two_tables("two"))
    message = "a table must be in the dump: got `one/t`, the dump holds `two/dynamic`.*`two/static`"
    assert_load_is_refused(tmp_path / "d", one_table(), sok.DumpMismatchError, message)


def test_dump_of_another_optimizer_changes_nothing_unless_without_states(tmp_path):
    model = fit(compiled(OPTIMIZERS["adam"](), our_embedding()))
    sok.dump(tmp_path / "d", embedding_of(model))
    other = fit(compiled(OPTIMIZERS["momentum"](), our_embedding()))
    layer = embedding_of(other)
    assert_load_is_refused(tmp_path / "d", layer, sok.DumpMismatchError, "adam.*states=False|states=False")
    sok.load(tmp_path / "d", layer, states=False)
    np.testing.assert_array_equal(layer.get_table().export().rows, table_of(model).export().rows)


def test_dump_of_a_model_of_other_shapes_changes_nothing(tmp_path):
    sok.dump(tmp_path / "d", fit(compiled(OPTIMIZERS["momentum"]())))
    model = keras.Sequential([keras.Input((3,), dtype="int32"), sok.DynamicEmbedding(DIM), keras.layers.Dense(7)])
    with pytest.raises(sok.DumpMismatchError, match="the model's variables must agree in number and shapes"):
        sok.load(tmp_path / "d", model)
    assert len(table_of(model)) == 0


def test_merge_that_does_not_fit_changes_nothing(tmp_path):
    sok.dump(tmp_path / "d", one_table())
    layer = one_table(max_capacity=6)
    table = layer.get_tables()["t"]
    table.clear()
    table.find_or_insert([100, 101])
    assert_load_is_refused(tmp_path / "d", layer, sok.DumpMismatchError, "expected 7, got 6", mode="merge")


def test_missing_dump_is_a_missing_file(tmp_path):
    for call in (lambda p: sok.load(p, filled()), sok.read_manifest, sok.verify):
        with pytest.raises(FileNotFoundError, match=f"{tmp_path}/nowhere/manifest.json: No such file") as error:
            call(tmp_path / "nowhere")
        assert error.value.errno == errno.ENOENT


@pytest.fixture
def dump_of_model(tmp_path):
    """`(directory, model)`: three files, and a model that has gone on since."""
    model = fit(compiled(OPTIMIZERS["adam"](), our_embedding()))
    sok.dump(tmp_path / "d", model)
    fit(model, steps=1)
    sok.verify(tmp_path / "d")
    return tmp_path / "d", model


def assert_corrupt(directory, model, name):
    """Verifying and loading find it; nothing has changed."""
    for call in (lambda: sok.verify(directory), lambda: sok.load(directory, model)):
        with pytest.raises(sok.CorruptDumpError, match=name):
            call()


def test_every_flipped_byte_is_found(dump_of_model):
    directory, model = dump_of_model
    before = all_of(model)
    for file in sorted(directory.iterdir()):
        good = file.read_bytes()
        for place in [*range(0, len(good), 101), len(good) - 1]:
            bad = bytearray(good)
            bad[place] ^= 0x10
            file.write_bytes(bad)
            assert_corrupt(directory, model, file.name)
        file.write_bytes(good)
    assert_equal(all_of(model), before)
    sok.load(directory, model)


@pytest.mark.parametrize(
    "cut", [lambda data: b"", lambda data: data[:40], lambda data: data[:-1], lambda data: data + b"0"]
)
def test_file_of_another_length_is_found(dump_of_model, cut):
    directory, model = dump_of_model
    before = all_of(model)
    for file in sorted(directory.iterdir()):
        good = file.read_bytes()
        file.write_bytes(cut(good))
        assert_corrupt(directory, model, file.name)
        file.write_bytes(good)
    assert_equal(all_of(model), before)


def test_missing_shard_is_found(dump_of_model):
    directory, model = dump_of_model
    before = all_of(model)
    for file in directory.glob("*.safetensors"):
        good = file.read_bytes()
        file.unlink()
        assert_corrupt(directory, model, file.name)
        file.write_bytes(good)
    assert_equal(all_of(model), before)


def test_error_names_tensor_and_block(dump_of_model):
    directory, _ = dump_of_model
    shard = min(directory.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(
        sok.CorruptDumpError, match=r"checksum of block 0 of `state\.velocity` \(bytes \d+ to \d+ of the file\)"
    ):
        sok.verify(directory)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", 7, "version.*7"),
        ("format", "other", "`format` must be `sok_keras dump`: got `other`"),
        ("dtype", "float64", "float64"),
        ("dtype", "float16", "not as version 1 has it: .*rows of 16 bits came later"),
        ("unknown", 1, "unknown"),
    ],
)
def test_manifest_of_another_kind_does_not_fit(tmp_path, field, value, message):
    layer = filled()
    sok.dump(tmp_path / "d", layer)
    rewrite_manifest(
        tmp_path / "d", lambda body: (body["tables"][0] if field == "dtype" else body).update({field: value})
    )
    assert_load_is_refused(tmp_path / "d", layer, sok.DumpMismatchError, message)
