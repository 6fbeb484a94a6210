"""What was written comes back to the bit, or not at all.

`ModelCheckpoint` and `BackupAndRestore` are in test_equivalence.py.
"""

import errno
import importlib.util
import json
import re
import zlib

import keras
import numpy as np
import pytest

import sok_keras as sok
from dumped import (
    LOAD,
    MIB,
    OPTIMIZERS,
    all_of,
    assert_equal,
    assert_tables_equal,
    compiled,
    contents_of,
    filled,
    interrupted,
    run,
    two_tables,
)
from once import once_on
from reference import (
    BACKEND,
    DIM,
    FAST,
    STEPS,
    embedding_of,
    fit,
    our_embedding,
    table_of,
    to_numpy,
)

of_graphs = pytest.mark.skipif(BACKEND != "tensorflow", reason="the tests above run as the backend does by default")


# ---- training goes on


@pytest.mark.parametrize("way", LOAD)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_resumed_before_the_first_step_equals_training_that_never_stopped(name, way):
    path, expected = interrupted(name)
    model = compiled(OPTIMIZERS[name]())
    LOAD[way](model, path)
    assert_equal(all_of(fit(model)), expected)


@pytest.mark.parametrize("way", LOAD)
def test_training_resumed_in_a_model_that_was_compiled_anew_equals_training_that_never_stopped(way):
    path, expected = interrupted("adam")
    model = fit(compiled(OPTIMIZERS["adam"]()))
    model.compile(sok.OptimizerWrapper(OPTIMIZERS["adam"]()), "mse", **FAST)
    LOAD[way](model, path)
    assert_equal(all_of(fit(model)), expected)


@pytest.mark.parametrize("steps", [0, 2])
def test_states_that_were_loaded_for_an_optimizer_go_with_it(steps):
    """A model that is compiled anew after a load begins with an optimizer of no steps."""
    path, _ = interrupted("adam")
    model = fit(compiled(OPTIMIZERS["adam"]()))
    sok.load(path / "dump", model)
    if steps:
        fit(model, steps=steps)
    model.compile(sok.OptimizerWrapper(OPTIMIZERS["adam"]()), "mse", **FAST)
    model.optimizer.build(model.trainable_variables)
    assert not any(state.any() for state in table_of(model).export(states=True).states.values())


@pytest.mark.parametrize("way", LOAD)
def test_training_resumed_in_a_model_that_was_trained_equals_training_that_never_stopped(way):
    path, expected = interrupted("adam")
    model = fit(compiled(OPTIMIZERS["adam"]()), steps=2)
    LOAD[way](model, path)
    assert_equal(all_of(fit(model)), expected)


def test_training_resumed_from_a_keras_file_equals_training_that_never_stopped():
    path, expected = interrupted("amsgrad")
    assert_equal(all_of(fit(keras.models.load_model(path / "model.keras"))), expected)


@of_graphs
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("way", LOAD)
def test_training_resumed_in_a_graph_equals_training_that_never_stopped(way, steps_before):
    """A graph that was traced before must see what was loaded after."""
    path, expected = interrupted("amsgrad", in_graph=True)
    model = compiled(OPTIMIZERS["amsgrad"](), arguments={})
    if steps_before:
        fit(model, steps=steps_before)
    LOAD[way](model, path)
    assert_equal(all_of(fit(model)), expected)


@of_graphs
def test_training_resumed_in_a_graph_from_a_keras_file_equals_training_that_never_stopped():
    path, expected = interrupted("amsgrad", in_graph=True)
    model = keras.models.load_model(path / "model.keras")
    assert not model.run_eagerly
    assert_equal(all_of(fit(model)), expected)


def test_dump_checkpoint_goes_on_as_if_never_interrupted(tmp_path):
    _, expected = interrupted("adam")  # two epochs
    callback = lambda: sok.callbacks.DumpCheckpoint(tmp_path)
    fit(compiled(OPTIMIZERS["adam"](), our_embedding()), callbacks=[callback()])
    assert_equal(all_of(fit(compiled(OPTIMIZERS["adam"]()), callbacks=[callback()])), expected)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{2 * STEPS}"]


# ---- dumps of tables


def of_same_config(layer):
    return type(layer).from_config(layer.get_config())


def test_dump_of_a_layer_comes_back(tmp_path):
    layer = two_tables()
    manifest = sok.dump(tmp_path / "d", layer)
    twin = of_same_config(layer)
    report = sok.load(tmp_path / "d", twin)
    assert report.tables == {table.name: 9 for table in layer.get_tables().values()} and not report.variables
    for name, table in layer.get_tables().items():
        assert_tables_equal(twin.get_tables()[name], table)
    assert manifest == sok.read_manifest(tmp_path / "d")


def test_dump_of_a_table_comes_back(tmp_path):
    table = filled().get_table()
    sok.dump(tmp_path / "d", table)
    twin = sok.DynamicEmbedding(DIM).get_table()
    sok.load(tmp_path / "d", twin)  # of another name: the only one there is
    assert_tables_equal(twin, table)


def test_dump_of_a_list_comes_back(tmp_path):
    dynamic, static = two_tables().get_tables().values()
    layer = filled()
    sok.dump(tmp_path / "d", [static, layer, dynamic])
    twin, tables = sok.DynamicEmbedding(DIM), two_tables("twins").get_tables()
    tables["dynamic"].clear()
    sok.load(tmp_path / "d", [tables["static"], twin, tables["dynamic"]])  # by their order, as no name is the dump's
    assert_tables_equal(tables["static"], static)
    assert_tables_equal(tables["dynamic"], dynamic)
    assert_tables_equal(twin.get_table(), layer.get_table())


def tables_named(*names):
    """Each with a row a key, all of which say where they come from."""
    tables = [sok.DynamicEmbedding(DIM, name=name).get_table() for name in names]
    for number, table in enumerate(tables):
        table.assign([number], np.full((1, DIM), number + 1.0))
    return tables


def test_tables_are_matched_by_name_whatever_their_order(tmp_path):
    sok.dump(tmp_path / "d", tables_named("a", "b", "c"))
    loaded = tables_named("c", "a")
    sok.load(tmp_path / "d", loaded)
    assert [table.export().keys.tolist() for table in loaded] == [[2], [0]]


def test_tables_of_which_the_dump_has_some_are_not_matched_by_their_order(tmp_path):
    """Else `b` would get the rows of `a`."""
    sok.dump(tmp_path / "d", tables_named("a", "b"))
    loaded = tables_named("b", "c")
    with pytest.raises(sok.DumpMismatchError, match="a table must be in the dump: got `c`, the dump holds `a`.*`b`"):
        sok.load(tmp_path / "d", loaded)
    assert_equal([table.export().rows for table in loaded], [table.export().rows for table in tables_named("b", "c")])
    sok.load(tmp_path / "d", loaded[:1])
    assert loaded[0].export().keys.tolist() == [1]


@pytest.mark.parametrize("call", [sok.dump, sok.load])
def test_tables_of_one_name_are_refused(tmp_path, call):
    sok.dump(tmp_path / "d", tables_named("a"))
    with pytest.raises(ValueError, match=r"must have a name of its own. Received: more than one named \['a'\]"):
        call(tmp_path / "d", tables_named("a", "b", "a"))


def test_chosen_tables_are_written_and_read_alone(tmp_path):
    layer = two_tables("two")
    sok.dump(tmp_path / "d", layer, tables=["two/static"])
    assert [entry.name for entry in sok.read_manifest(tmp_path / "d").tables] == ["two/static"]
    sok.dump(tmp_path / "d", layer)
    twin = of_same_config(layer)
    sok.load(tmp_path / "d", twin, tables=["two/dynamic"])
    assert [len(table) for table in twin.get_tables().values()] == [9, 0]


@pytest.mark.parametrize("call", [sok.dump, sok.load])
def test_tables_that_the_source_has_not_are_refused(tmp_path, call):
    layer = two_tables("two")
    sok.dump(tmp_path / "d", layer)
    with pytest.raises(ValueError, match=r"which has \['two/dynamic', 'two/static'\]. Received: \['other'\]"):
        call(tmp_path / "d", layer, tables=["other"])
    with pytest.raises(ValueError, match="`tables` must be a sequence of names. Received: tables='two/static'"):
        call(tmp_path / "d", layer, tables="two/static")


@pytest.mark.parametrize("source", ["a name", keras.layers.Dense(1), []], ids=["text", "dense", "nothing"])
def test_source_without_tables_is_refused(tmp_path, source):
    with pytest.raises(ValueError, match="`source` (must be a Model|has no embedding tables)"):
        sok.dump(tmp_path / "d", source)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", [sok.dump, sok.load])
def test_model_in_a_list_is_refused(tmp_path, call):
    """Its dense variables and its optimizer's would be left out in silence."""
    model = compiled(OPTIMIZERS["adam"]())
    with pytest.raises(
        ValueError, match=r"(?s)A model must be `source` itself.*Pass `model`.*Received: <.*> in a list"
    ):
        call(tmp_path / "d", [model])
    assert not list(tmp_path.iterdir())
    sok.dump(tmp_path / "d", model.layers)  # tables alone, as said
    assert not sok.read_manifest(tmp_path / "d").arrays


def test_manifest_says_what_a_dump_holds(tmp_path):
    model = fit(compiled(OPTIMIZERS["adam"]()))
    sok.dump(tmp_path / "d", model)
    manifest = sok.read_manifest(tmp_path / "d")
    (entry,) = manifest.tables
    assert (manifest.version, manifest.step, manifest.path) == (1, STEPS, str(tmp_path / "d"))
    assert (entry.name, entry.dim, entry.vocabulary_size, entry.optimizer) == (table_of(model).name, DIM, None, "adam")
    assert (entry.num_rows, entry.states) == (len(table_of(model)), ("momentum", "velocity"))
    assert len([name for name in manifest.arrays if name.startswith("model/")]) == 2  # kernel and bias; no trigger
    assert not [name for name in manifest.arrays if "trigger" in name]


def test_dump_of_an_empty_table_comes_back(tmp_path):
    sok.dump(tmp_path / "d", sok.DynamicEmbedding(DIM))
    layer = filled()
    sok.load(tmp_path / "d", layer)
    assert len(layer.get_table()) == 0


def read_safetensors(path):
    """As the format's own page has it: length of the header, header, data."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    assert set(header.pop("__metadata__")) == {"table"}
    dtypes = {"I64": "<i8", "F32": "<f4"}

    def array(entry):
        begin, end = entry["data_offsets"]
        return np.frombuffer(data[start + begin : start + end], dtypes[entry["dtype"]]).reshape(entry["shape"])

    return {name: array(entry) for name, entry in header.items()}


def test_shards_are_safetensors(tmp_path):
    model = fit(compiled(OPTIMIZERS["adam"](), our_embedding()))
    sok.dump(tmp_path / "d", embedding_of(model))
    (shard,) = (tmp_path / "d").glob("*.safetensors")
    arrays = read_safetensors(shard)
    order = np.argsort(arrays["keys"])
    contents = contents_of(table_of(model))
    assert list(arrays) == ["keys", "rows", "state.momentum", "state.velocity"]
    assert_equal([array[order] for array in arrays.values()], contents.values())


def test_a_million_keys_come_back(tmp_path):
    layer = sok.DynamicEmbedding(DIM, seed=1)
    layer.get_table().find_or_insert(np.arange(10**6) * 2**40)
    sok.dump(tmp_path / "d", layer)
    twin = sok.DynamicEmbedding(DIM)
    sok.load(tmp_path / "d", twin)
    assert_tables_equal(twin.get_table(), layer.get_table())


# ---- ways to load


def test_load_replaces_what_is_there(tmp_path):
    layer, other = filled(seed=0), filled(seed=1)
    sok.dump(tmp_path / "d", layer)
    sok.load(tmp_path / "d", other)
    assert_tables_equal(other.get_table(), layer.get_table())


def test_merge_overwrites_and_joins(tmp_path):
    layer, other = sok.DynamicEmbedding(DIM), sok.DynamicEmbedding(DIM)
    layer.get_table().assign([1, 2], np.full((2, DIM), 1.0))
    other.get_table().assign([2, 3], np.full((2, DIM), 5.0))
    sok.dump(tmp_path / "d", layer)
    sok.load(tmp_path / "d", other, mode="merge")
    contents = other.get_table().export()
    assert contents.keys.tolist() == [1, 2, 3]
    assert contents.rows[:, 0].tolist() == [1, 1, 5]


def test_load_of_rows_alone_starts_states_and_steps_anew(tmp_path):
    model = fit(compiled(OPTIMIZERS["adam"]()))
    sok.dump(tmp_path / "d", model)
    steps = int(to_numpy(model.optimizer.iterations))
    rows = table_of(model).export().rows
    fit(model)
    sok.load(tmp_path / "d", model, states=False)
    contents = table_of(model).export(states=True)
    np.testing.assert_array_equal(contents.rows, rows)
    assert not any(state.any() for state in contents.states.values())
    assert int(to_numpy(model.optimizer.iterations)) == 2 * steps  # the optimizer's own stay


def test_unknown_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`mode` must be \"replace\" or \"merge\". Received: mode='add'"):
        sok.load(tmp_path, filled(), mode="add")


def test_dump_is_not_overwritten_unless_allowed(tmp_path):
    layer = filled()
    sok.dump(tmp_path / "d", layer)
    layer.get_table().clear()
    with pytest.raises(ValueError, match="`overwrite` must be True to replace a dump: .*d holds one"):
        sok.dump(tmp_path / "d", layer, overwrite=False)
    assert sok.read_manifest(tmp_path / "d").tables[0].num_rows == 20
    sok.dump(tmp_path / "d", layer)
    assert sok.read_manifest(tmp_path / "d").tables[0].num_rows == 0
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["manifest.json"]  # an empty table has no shard


def test_files_of_others_stay_in_the_directory(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(2):
        sok.dump(tmp_path, filled())
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


# ---- in processes of their own


OTHER_BACKEND = {"torch": "jax", "jax": "tensorflow", "tensorflow": "torch"}[BACKEND]

LOAD_AND_DIGEST = """
import test_persistence as t
model = t.compiled(t.OPTIMIZERS["adam"]())
t.sok.load({!r}, model)
model.optimizer.build(model.trainable_variables)
loaded = t.digest(model)
t.fit(model, steps=1)
print(loaded)
"""


def digest(model):
    """Of all that training goes on from, in a form that other processes can compare."""
    # TensorFlow counts steps in int64, the others in int32.
    arrays = [array.astype("float64") for array in all_of(model)]
    return str([(array.shape, zlib.crc32(array.tobytes())) for array in arrays])


@pytest.mark.skipif(importlib.util.find_spec(OTHER_BACKEND) is None, reason=f"needs {OTHER_BACKEND} too")
def test_dump_of_one_backend_goes_on_in_another():
    path, _ = interrupted("adam")
    model = compiled(OPTIMIZERS["adam"]())
    sok.load(path / "dump", model)
    model.optimizer.build(model.trainable_variables)
    assert run(LOAD_AND_DIGEST.format(str(path / "dump")), OTHER_BACKEND) == digest(model)


FULL_DISK = """
import resource, numpy as np, sok_keras as sok
layer = sok.DynamicEmbedding(8, seed=1, name="layer")
layer.get_table().find_or_insert(np.arange(10))
sok.dump({path!r}, layer)
layer.get_table().find_or_insert(np.arange(100_000))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    sok.dump({path!r}, layer)
except OSError as error:
    print(type(error).__name__, error)
"""


@once_on("jax")
def test_full_disk_leaves_the_old_dump(tmp_path):
    """A limit on the size of files stands in for it."""
    told = run(FULL_DISK.format(path=str(tmp_path)))
    shard = r"sok-[0-9a-f]{16}-\d{5}\.safetensors"
    assert re.match(rf"OSError \[Errno {errno.EFBIG}\] {tmp_path}/{shard}.*: File too large", told), told
    assert len(list(tmp_path.glob("*.safetensors"))) == 1  # what was written of the new one is gone
    layer = sok.DynamicEmbedding(8, seed=1, name="layer")
    sok.load(tmp_path, layer)
    assert layer.get_table().export().keys.tolist() == list(range(10))


PEAK_OF_DUMP = """
import resource, numpy as np, sok_keras as sok
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
table = sok.DynamicEmbedding(64, initial_capacity=800_000, seed=1).get_table()
for keys in np.array_split(np.arange(800_000), 40):
    table.find_or_insert(keys)
sok.dump({small!r}, sok.DynamicEmbedding(4))
before = peak()
sok.dump({path!r}, table)
print(peak() - before, table.stats().bytes)
"""


@once_on("jax")
def test_dump_takes_little_memory_beside_the_table(tmp_path):
    grown, size = map(int, run(PEAK_OF_DUMP.format(path=str(tmp_path / "d"), small=str(tmp_path / "s"))).split())
    assert size > 200 * 10**6
    assert grown < 64 * MIB
