"""Rows that come from other systems and files, and go back there."""

import struct

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import BACKEND, FAST

DIM = 3


def make_table(optimizer=None, **kwargs):
    layer = sok.DynamicEmbedding(DIM, name="items", **kwargs)
    layer.build()
    if optimizer is not None:
        ids = keras.Input((), dtype="int32")
        model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
        model.compile(sok.OptimizerWrapper(optimizer), "mse", **FAST)
        model.optimizer.build(model.trainable_variables)
    return layer.get_table()


def contents_of(table):
    contents = table.export()
    return {key: row.tolist() for key, row in zip(contents.keys.tolist(), contents.rows, strict=True)}


def some_rows(count, first=0):
    keys = np.arange(first, first + count, dtype="int64") * 2**33 - 5
    return keys, np.arange(count * DIM, dtype="float32").reshape(count, DIM)


def as_dict(keys, rows):
    return {int(key): row.tolist() for key, row in zip(keys, rows, strict=True)}


# ---- SparseOperationKit


def sok_file(path, kind, numbers, slot=""):
    """A file as the format's description says, without our own code."""
    dtypes = {"int32": 0, "int64": 1, "uint32": 2, "uint64": 3, "float16": 4, "float32": 5, "float64": 6}
    header = (
        b" " * 256 + struct.pack(">I", kind) + slot.rjust(32).encode() + struct.pack(">I", dtypes[numbers.dtype.name])
    )
    assert len(header) == 296
    path.write_bytes(header + numbers.tobytes())


def sok_order(keys, num_ranks):
    """The order of keys in a dump of so many ranks: rank by rank those that it owns, in rounds of a few."""
    of_ranks = [np.flatnonzero(keys % num_ranks == rank) for rank in range(num_ranks)]
    rounds = range(0, max(map(len, of_ranks)), 4)
    return np.concatenate([own[start : start + 4] for start in rounds for own in of_ranks])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_dumps_of_sparse_operation_kit_are_read(tmp_path, dtype, num_ranks):
    keys, rows = np.arange(-7, 23).astype(dtype), some_rows(30)[1]
    order = sok_order(keys, num_ranks)
    keys, rows = keys[order], rows[order]
    sok_file(tmp_path / "table1_0-key", 0, keys)
    sok_file(tmp_path / "table1_0-weight", 1, rows)
    sok_file(tmp_path / "table1_0-Adam-m", 2, 2 * rows, "m")
    sok_file(tmp_path / "table1_0-Adam-v", 2, 3 * rows, "v")
    table = make_table(keras.optimizers.Adam())
    outcomes = sok.importers.sok(tmp_path, {"table1:0": table}, states=True, progress=False)
    assert outcomes["table1:0"].inserted == 30
    contents = table.export(states=True)
    assert as_dict(contents.keys, contents.rows) == as_dict(keys, rows)
    np.testing.assert_array_equal(contents.states["momentum"], 2 * contents.rows)
    np.testing.assert_array_equal(contents.states["velocity"], 3 * contents.rows)


@pytest.mark.parametrize(
    "optimizer",
    ["Adam", "Adamax", "Adagrad", "Adadelta", "Ftrl", keras.optimizers.SGD(0.1, momentum=0.9)],
)
def test_what_is_written_for_sparse_operation_kit_comes_back(tmp_path, optimizer):
    table = make_table(keras.optimizers.get(optimizer))
    keys, rows = some_rows(10)
    states = {name: rows[:, :width] + number for number, (name, width) in enumerate(table.state_widths().items(), 1)}
    table.assign(keys, rows, states=states)
    sok.exporters.sok(tmp_path / "dump", table, states=True)
    sok.exporters.sok(tmp_path / "dump", table, states=True)  # replaces the files
    assert not list((tmp_path / "dump").glob(".*"))
    other = make_table(keras.optimizers.get(keras.optimizers.serialize(keras.optimizers.get(optimizer))))
    sok.importers.sok(tmp_path / "dump", {"items": other}, states=True, progress=False)
    one, two = table.export(states=True), other.export(states=True)
    assert as_dict(one.keys, one.rows) == as_dict(two.keys, two.rows)
    assert {name: array.tolist() for name, array in one.states.items()} == {
        name: array.tolist() for name, array in two.states.items()
    }


def test_a_written_file_has_the_bytes_of_the_format(tmp_path):
    table = make_table()
    keys, rows = some_rows(5)
    table.assign(keys, rows)
    sok.exporters.sok(tmp_path, {"a.b:0": table})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a_b_0-key", "a_b_0-weight"]
    contents = table.export()
    sok_file(tmp_path / "key", 0, contents.keys)
    sok_file(tmp_path / "weight", 1, contents.rows)
    for name in ("key", "weight"):
        assert (tmp_path / f"a_b_0-{name}").read_bytes() == (tmp_path / name).read_bytes()


def test_rows_that_are_there_are_replaced_and_others_stay(tmp_path):
    table = make_table()
    table.assign([1, 2], np.zeros((2, DIM)))
    sok_file(tmp_path / "items-key", 0, np.array([2, 3]))
    sok_file(tmp_path / "items-weight", 1, np.ones((2, DIM), "float32"))
    outcomes = sok.importers.sok(tmp_path, table, progress=False)["items"]
    assert (outcomes.hit, outcomes.inserted) == (1, 1)
    assert contents_of(table) == {1: [0] * DIM, 2: [1] * DIM, 3: [1] * DIM}


def test_a_static_table_becomes_the_dump_of_a_variable(tmp_path):
    size = 70_000
    table = sok.TableConfig("users", size, DIM)
    layer = sok.DistributedEmbedding(sok.FeatureConfig("users", table))
    layer.build()
    own, keys = layer.get_tables()["users"], np.random.default_rng(0).permutation(size)[:60_000]
    own.assign(keys, np.repeat(keys[:, None], DIM, axis=1))
    sok.exporters.sok(tmp_path, {"users": own}, progress=False)
    written = np.fromfile(tmp_path / "users-key", "int64", offset=296)
    np.testing.assert_array_equal(written, np.arange(size))
    rows = np.fromfile(tmp_path / "users-weight", "float32", offset=296).reshape(-1, DIM)
    np.testing.assert_array_equal(rows[keys, 0], keys)
    np.testing.assert_array_equal(rows, own.find(np.arange(size))[0])


def test_what_sparse_operation_kit_would_not_load_is_not_written(tmp_path):
    def refused(match, tables, **kwargs):
        with pytest.raises(ValueError, match=match):
            sok.exporters.sok(tmp_path / "dump", tables, progress=False, **kwargs)
        assert not (tmp_path / "dump").exists()

    table = make_table()
    refused("Table 'items' must have rows", table)
    table.assign([1], np.ones((1, DIM)))
    refused("`states` must be False for table 'items'", table, states=True)
    refused("Each of `tables` must have a name of its own", [table, table])
    refused("Each of `tables` must have a name of its own", {"a:0": table, "a.0": table})
    amsgrad = make_table(keras.optimizers.Adam(amsgrad=True))
    amsgrad.assign([1], np.ones((1, DIM)))
    refused("without `amsgrad`", amsgrad, states=True)


def test_a_new_dump_leaves_no_states_of_an_older_one(tmp_path):
    table, other = make_table(keras.optimizers.Adam()), make_table(keras.optimizers.Adam())
    table.assign([1], np.ones((1, DIM)))
    sok.exporters.sok(tmp_path, table, states=True, progress=False)
    sok.exporters.sok(tmp_path, table, progress=False)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["items-key", "items-weight"]
    with pytest.raises(FileNotFoundError, match="items-Adam-m"):
        sok.importers.sok(tmp_path, other, states=True, progress=False)


def test_damaged_files_are_named_with_the_byte_and_change_nothing(tmp_path):
    keys, rows = some_rows(4)
    table = make_table()
    key, weight = tmp_path / "items-key", tmp_path / "items-weight"

    def refused(match, kind=ValueError):
        with pytest.raises(kind, match=match):
            sok.importers.sok(tmp_path, table, progress=False)
        assert len(table) == 0

    refused("items-key", FileNotFoundError)
    sok_file(key, 0, keys)
    refused("items-weight", FileNotFoundError)
    sok_file(weight, 1, rows)
    whole = weight.read_bytes()
    weight.write_bytes(whole[:-1])
    refused(r"items-weight must hold rows of 12 bytes after 296 bytes. Received: 11 bytes from byte 332 on")
    weight.write_bytes(whole[:-12])
    refused(r"items-weight must hold 4 rows of 3 numbers, one for each key. Received: 3, up to byte 332")
    weight.write_bytes(whole[:100])
    refused("items-weight must begin with a header of 296 bytes. Received: 100 bytes")
    sok_file(weight, 2, rows)
    refused("items-weight must be a file of rows, as byte 256 says. Received: states")
    weight.write_bytes(whole[:292] + struct.pack(">I", 99) + whole[296:])
    refused("items-weight must have a type from 0 to 6 at byte 292. Received: 99")
    sok_file(weight, 1, rows.astype("int32"))
    refused("items-weight must have floats, as byte 292 says. Received: int32")
    weight.write_bytes(b"others".rjust(256) + whole[256:])
    refused("items-weight must be of the table 'items', as byte 0 says. Received: 'others'")
    weight.write_bytes(b"items".rjust(256) + whole[256:])
    sok_file(key, 0, rows[:, 0])
    refused("items-key must have integers, as byte 292 says. Received: float32")
    with pytest.raises(ValueError, match="`states` must be False for table 'items'"):
        sok_file(key, 0, keys)
        sok.importers.sok(tmp_path, table, states=True, progress=False)
    with pytest.raises(TypeError, match="`tables` must be a `Table`, as `layer.get_table\\(\\)` returns, or a `Dyn"):
        sok.importers.sok(tmp_path, "items", progress=False)
    table = make_table(keras.optimizers.Adam())
    sok_file(key, 0, keys)
    sok_file(weight, 1, rows)
    sok_file(tmp_path / "items-Adam-m", 2, rows, "m")
    sok_file(tmp_path / "items-Adam-v", 2, rows, "zzz")
    with pytest.raises(ValueError, match="Adam-v must be of the state 'v', as byte 260 says. Received: 'zzz'"):
        sok.importers.sok(tmp_path, table, states=True, progress=False)
    assert len(table) == 0


def test_variables_are_written_and_read_with_keys_of_their_type(tmp_path):
    keys, rows = np.array([-7, 3, 5, 2**30], "int32"), some_rows(4)[1]
    for key_type in ("int32", "int64"):
        made = sok.assign(sok.DynamicVariable(DIM, key_type=key_type, name=f"of_{key_type}"), keys, rows)
        sok.exporters.sok(tmp_path, made, progress=False)
        stem = tmp_path / f"of_{key_type}_0"
        written = np.fromfile(f"{stem}-key", key_type, offset=296)
        assert sorted(written.tolist()) == sorted(keys.tolist())
        other = sok.DynamicVariable(DIM, key_type=key_type)
        sok.importers.sok(tmp_path, {f"of_{key_type}:0": other}, progress=False)
        assert contents_of(other.table) == as_dict(keys, rows)


def test_all_tables_are_checked_before_one_changes(tmp_path):
    tables = {"a": make_table(), "b": make_table()}
    for name in tables:
        sok_file(tmp_path / f"{name}-key", 0, np.array([1]))
        sok_file(tmp_path / f"{name}-weight", 1, np.ones((1, DIM + (name == "b")), "float32"))
    with pytest.raises(ValueError, match="b-weight must hold rows of 12 bytes"):
        sok.importers.sok(tmp_path, tables, progress=False)
    assert len(tables["a"]) == 0


# ---- DynamicEmb


@pytest.mark.parametrize("num_ranks", [0, 1, 3])
def test_dumps_of_dynamicemb_are_read(tmp_path, num_ranks):
    keys, rows = some_rows(31)
    for rank in range(max(num_ranks, 1)):
        own = np.arange(31) % max(num_ranks, 1) == rank
        ending = f".rank_{rank}.world_size_{num_ranks}" if num_ranks else ""
        keys[own].tofile(tmp_path / f"items_emb_keys{ending}")
        rows[own].tofile(tmp_path / f"items_emb_values{ending}")
        # A table whose name begins like it is another one.
        np.array([99]).tofile(tmp_path / f"items_emb_keys_emb_keys{ending}")
    table = make_table()
    assert sok.importers.dynamicemb(tmp_path, table, progress=False)["items"].inserted == 31
    assert contents_of(table) == as_dict(keys, rows)


def test_damaged_dumps_of_dynamicemb_are_named(tmp_path):
    table, (keys, rows) = make_table(), some_rows(4)
    with pytest.raises(FileNotFoundError, match="must have the keys of table 'items' of each rank of one dump"):
        sok.importers.dynamicemb(tmp_path, table, progress=False)
    keys.tofile(tmp_path / "items_emb_keys.rank_0.world_size_2")
    rows.tofile(tmp_path / "items_emb_values.rank_0.world_size_2")
    with pytest.raises(FileNotFoundError, match="must have the keys of table 'items' of each rank of one dump"):
        sok.importers.dynamicemb(tmp_path, table, progress=False)
    keys.tofile(tmp_path / "items_emb_keys.rank_1.world_size_2")
    rows[:3].tofile(tmp_path / "items_emb_values.rank_1.world_size_2")
    with pytest.raises(ValueError, match="rank_1.world_size_2 must hold 4 rows of 3 numbers"):
        sok.importers.dynamicemb(tmp_path, table, progress=False)
    assert len(table) == 0


# ---- TensorFlow Recommenders Addons


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("ranks", [0, 1, 2])
@pytest.mark.parametrize("types", [("int64", "float32"), ("int32", "float16"), ("int64", "float64")])
def test_files_of_tfra_are_read(tmp_path, shards, ranks, types):
    """TFRA writes two files for each shard: one has the keys, the other one the rows."""
    key_dtype, dtype = types
    keys, rows = np.arange(37) * 5, np.arange(37 * DIM).reshape(37, DIM)
    parts = [(rank, shard) for rank in range(max(ranks, 1)) for shard in range(shards)]
    for number, (rank, shard) in enumerate(parts):
        own = np.arange(37) % len(parts) == number
        of_rank = f"_rank{rank}_size{ranks}" if ranks else ""
        stem = tmp_path / f"model_items-parameter_mht_{shard + 1}of{shards}{of_rank}"
        keys[own].astype(key_dtype).tofile(f"{stem}-keys")
        rows[own].astype(dtype).tofile(f"{stem}-values")
        # States of optimizers, and a variable whose name begins like it.
        keys.tofile(
            tmp_path / f"model_items-parameter_DynamicEmbedding_Adam-shadow_m_mht_{shard + 1}of{shards}{of_rank}-keys"
        )
        keys.tofile(tmp_path / f"model_items-parameter2_mht_{shard + 1}of{shards}{of_rank}-keys")
    for name in ("model/items", "model/items-parameter"):
        table = make_table()
        read = sok.importers.tfra(tmp_path, {name: table}, key_dtype=key_dtype, dtype=dtype, progress=False)
        assert read[name].inserted == 37
        assert contents_of(table) == as_dict(keys, rows.astype("float32"))


def test_damaged_files_of_tfra_are_named(tmp_path):
    table, (keys, rows) = make_table(), some_rows(4)
    with pytest.raises(FileNotFoundError, match="must have the keys of all shards of 'items'"):
        sok.importers.tfra(tmp_path, table, progress=False)
    keys.tofile(tmp_path / "items_mht_1of2-keys")
    rows.tofile(tmp_path / "items_mht_1of2-values")
    with pytest.raises(FileNotFoundError, match=r"Received: \['items_mht_1of2-keys'\]"):
        sok.importers.tfra(tmp_path, table, progress=False)
    keys.tofile(tmp_path / "items_mht_2of2-keys")
    with pytest.raises(FileNotFoundError, match="items_mht_2of2-values"):
        sok.importers.tfra(tmp_path, table, progress=False)
    (tmp_path / "items_mht_2of2-values").write_bytes(rows.tobytes()[:-1])
    with pytest.raises(
        ValueError, match=r"items_mht_2of2-values must hold rows of 12 bytes .* 11 bytes from byte 36 on"
    ):
        sok.importers.tfra(tmp_path, table, progress=False)
    rows[:3].tofile(tmp_path / "items_mht_2of2-values")
    with pytest.raises(
        ValueError, match="must hold 4 rows of 3 numbers of type float32, one for each key of type int64"
    ):
        sok.importers.tfra(tmp_path, table, progress=False)
    keys.tofile(tmp_path / "items_mht_1of1-keys")
    with pytest.raises(FileNotFoundError, match="that were saved together"):
        sok.importers.tfra(tmp_path, table, progress=False)
    for argument in ("key_dtype", "dtype"):
        with pytest.raises(ValueError, match=f"`{argument}` must be one of"):
            sok.importers.tfra(tmp_path, table, progress=False, **{argument: "uint8"})
    assert len(table) == 0


# ---- arrays and columns


def test_many_pieces_of_arrays_are_read(tmp_path, capsys):
    count = 150_000
    keys, rows = np.arange(count), np.random.default_rng(0).normal(size=(count, DIM)).astype("float32")
    np.savez(tmp_path / "rows.npz", keys=keys, rows=rows)
    table = make_table()
    assert sok.importers.numpy(tmp_path / "rows.npz", table).inserted == count
    assert f"{count}/{count}" in capsys.readouterr().out
    np.testing.assert_array_equal(table.export().rows, rows)


def test_arrays_that_do_not_fit_are_refused(tmp_path):
    table = make_table()
    with pytest.raises(KeyError, match="`source` must have arrays 'keys' and 'rows'"):
        sok.importers.numpy({"keys": [1]}, table)
    np.save(tmp_path / "rows.npy", np.ones((1, DIM)))
    with pytest.raises(ValueError, match="`source` must be an `.npz` file, or a mapping of arrays by name"):
        sok.importers.numpy(tmp_path / "rows.npy", table)
    with pytest.raises(ValueError, match=r"must be of shape \(n,\) and \(n, 3\). Received: \(2,\) and \(1, 3\)"):
        sok.importers.numpy({"keys": np.arange(2), "rows": np.ones((1, DIM))}, table)
    with pytest.raises(TypeError, match="Keys must be integers"):
        sok.importers.numpy({"keys": np.ones(1), "rows": np.ones((1, DIM))}, table)


@pytest.mark.parametrize("form", ["lists", "columns", "folder"])
def test_parquet_files_are_read(tmp_path, form):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    keys, rows = some_rows(1000)
    columns = {"id": keys, "other": keys, "vector": list(rows), **{f"v{i}": rows[:, i] for i in range(DIM)}}
    data = arrow.table(columns)
    path, table = tmp_path / "rows.parquet", make_table()
    if form == "folder":
        parquet.write_table(data[:300], tmp_path / "a.parquet", row_group_size=70)
        parquet.write_table(data[300:], tmp_path / "b.parquet")
        path = tmp_path
    else:
        parquet.write_table(data, path)
    names = [f"v{i}" for i in range(DIM)] if form == "columns" else "vector"
    assert sok.importers.parquet(path, table, keys="id", rows=names, progress=False).inserted == 1000
    assert contents_of(table) == as_dict(keys, rows)


def test_parquet_files_that_do_not_fit_are_refused(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, table = tmp_path / "rows.parquet", make_table()
    parquet.write_table(arrow.table({"id": [1, None], "text": ["a", "b"], "v": [[1.0] * DIM, [1.0] * 2]}), path)
    with pytest.raises(
        ValueError, match=r"rows.parquet must have columns \['id', 'x'\]. Received: \['id', 'text', 'v'\]"
    ):
        sok.importers.parquet(path, table, keys="id", rows="x")
    with pytest.raises(ValueError, match="row group 0 must have values in column 'id'"):
        sok.importers.parquet(path, table, keys="id", rows="v")
    parquet.write_table(arrow.table({"id": [1, 2], "text": ["a", "b"], "v": [[1.0] * DIM, [1.0] * 2]}), path)
    with pytest.raises(ValueError, match=r"row group 0 must have lists of 3 numbers in column 'v'. Received: \[2, 3\]"):
        sok.importers.parquet(path, table, keys="id", rows="v")
    with pytest.raises(ValueError, match="must have lists in column 'text'"):
        sok.importers.parquet(path, table, keys="id", rows="text")
    with pytest.raises(ValueError, match="`rows` must name 3 columns"):
        sok.importers.parquet(path, table, keys="id", rows=["v"])
    with pytest.raises(TypeError, match="Keys must be integers"):
        sok.importers.parquet(path, table, keys="text", rows="v")
    parquet.write_table(arrow.table({"id": [1], "v": [[1.0, None, 2.0]]}), path)
    with pytest.raises(ValueError, match="row group 0 must have values in column 'v'"):
        sok.importers.parquet(path, table, keys="id", rows="v")
    with pytest.raises(FileNotFoundError, match="has no files"):
        (tmp_path / "empty").mkdir()
        sok.importers.parquet(tmp_path / "empty", table, keys="id", rows="v")
    assert len(table) == 0


# ---- frameworks


def test_rows_of_keras_embeddings_are_read():
    embedding = keras.layers.Embedding(5, DIM)
    with pytest.raises(ValueError, match="`embedding` must be built"):
        sok.importers.keras(embedding, make_table())
    embedding.build()
    rows = keras.ops.convert_to_numpy(embedding.embeddings)
    table = make_table()
    assert sok.importers.keras(embedding, table, progress=False).inserted == 5
    assert contents_of(table) == as_dict(range(5), rows)
    table = make_table()
    sok.importers.keras(rows, table, keys=[9, 8, 7, 6, 2**40], progress=False)
    assert contents_of(table) == as_dict([9, 8, 7, 6, 2**40], rows)
    with pytest.raises(ValueError, match="`embedding` must have rows of 3 numbers"):
        sok.importers.keras(np.ones((2, 4)), table)
    with pytest.raises(ValueError, match="`keys` must hold one key for each of 5 rows"):
        sok.importers.keras(rows, table, keys=[1])
    with pytest.raises(TypeError, match="Keys must be integers"):
        sok.importers.keras(rows, table, vocabulary=[1.5, 2.5])
    with pytest.raises(TypeError, match="`embedding` must be a `keras.layers.Embedding` or an array. Received: Dense"):
        sok.importers.keras(keras.layers.Dense(1), table)
    with pytest.raises(TypeError, match="`table` must be a `Table`"):
        sok.importers.keras(rows, sok.DynamicEmbedding(DIM))
    embedding.quantize("int8")
    with pytest.raises(ValueError, match="`embedding` must not be quantized"):
        sok.importers.keras(embedding, make_table())
    with pytest.raises(ValueError, match="both name the keys"):
        sok.importers.keras(rows, table, keys=np.arange(5), vocabulary=["a"])
    with pytest.raises(ValueError, match="`vocabulary` must have at most 5 tokens"):
        sok.importers.keras(rows, table, vocabulary=list("abcdef"))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Keras' StringLookup needs TensorFlow's strings")
@pytest.mark.parametrize("special", [{}, {"num_oov_indices": 2, "mask_token": ""}])
def test_a_model_with_a_string_lookup_answers_as_before(special):
    lookup = keras.layers.StringLookup(vocabulary=["red", "green", "blue"], **special)
    embedding = keras.layers.Embedding(lookup.vocabulary_size(), DIM)
    embedding.build()
    layer = sok.DynamicEmbedding(DIM)
    layer.build()
    assert sok.importers.keras(embedding, layer.get_table(), vocabulary=lookup, progress=False).inserted == 3
    words = np.array(["blue", "red"])
    expected = embedding(lookup(keras.ops.convert_to_tensor(words)))
    np.testing.assert_array_equal(layer(sok.string_keys(words), training=False), expected)


def test_vocabularies_are_lists_too():
    rows, table = some_rows(3)[1], make_table()
    sok.importers.keras(rows, table, vocabulary=["a", "b"], progress=False)
    assert contents_of(table) == as_dict(sok.string_keys(["a", "b"]), rows[:2])
    table = make_table()
    sok.importers.keras(rows, table, vocabulary=[30, 10, 20], progress=False)
    assert contents_of(table) == as_dict([30, 10, 20], rows)


def test_state_dicts_of_pytorch_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.ModuleDict({"a": torch.nn.Embedding(4, DIM), "b": torch.nn.EmbeddingBag(6, DIM)})
    weights = {name: weight.detach().numpy() for name, weight in model.state_dict().items()}
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for source in (model.state_dict(), tmp_path / "model.pt", model.bfloat16().state_dict()):
        tables = {"a.weight": make_table(), "b.weight": make_table()}
        outcomes = sok.importers.torch(source, tables, keys={"b.weight": np.arange(6) * 10}, progress=False)
        assert (outcomes["a.weight"].inserted, outcomes["b.weight"].inserted) == (4, 6)
        rows = tables["b.weight"].find(np.arange(6) * 10)[0]
        np.testing.assert_allclose(rows, weights["b.weight"], rtol=1e-2)
        np.testing.assert_allclose(tables["a.weight"].find(np.arange(4))[0], weights["a.weight"], rtol=1e-2)
    table = make_table()
    with pytest.raises(KeyError, match=r"`source` must have the weights \['c.weight'\]"):
        sok.importers.torch({}, {"c.weight": table})
    with pytest.raises(ValueError, match="Weight 'a' must have rows of 3 numbers"):
        sok.importers.torch({"a": np.ones((2, 2))}, {"a": table})
    with pytest.raises(KeyError, match=r"`keys` must be those of weights in `tables`, \['a'\]. Received: \['A'\]"):
        sok.importers.torch({"a": np.ones((2, DIM))}, {"a": table}, keys={"A": [7, 8]})
    with pytest.raises(TypeError, match="`tables` must be a dict of names of weights and tables. Received: Table"):
        sok.importers.torch({"a": np.ones((2, DIM))}, table)


def test_states_are_assigned_with_rows():
    table = make_table(keras.optimizers.Adam())
    assert table.formula() == "adam" and table.state_widths() == {"momentum": DIM, "velocity": DIM}
    rows = some_rows(2)[1]
    table.assign([1, 2], rows, states={"velocity": rows + 2, "momentum": rows + 1})
    assert table.assign([2, 3], rows, insert=False, states={"velocity": rows, "momentum": rows}).refused == 1
    contents = table.export(states=True)
    assert contents.rows.tolist() == [rows[0].tolist(), rows[0].tolist()]
    assert contents.states["momentum"].tolist() == [(rows[0] + 1).tolist(), rows[0].tolist()]
    with pytest.raises(
        ValueError, match=r"`states` must be those of the optimizer that trains the table, \['momentum', 'velocity'\]"
    ):
        table.assign([1], rows[:1], states={"m": rows[:1]})
    with pytest.raises(ValueError, match=r"`states` 'momentum' must be of shape \(1, 3\). Received: \(2, 3\)"):
        table.assign([1], rows[:1], states={"momentum": rows, "velocity": rows})
    assert make_table().formula() is None and make_table().state_widths() == {}
    with pytest.raises(ValueError, match="once an optimizer is built"):
        make_table().assign([1], rows[:1], states={"momentum": rows[:1]})


def test_states_are_assigned_under_every_policy():
    states = {"momentum": np.ones((4, DIM)), "velocity": np.ones((4, DIM))}
    rows = np.arange(4 * DIM, dtype="float32").reshape(4, DIM)
    # Of equal keys the last one counts.
    table = make_table(keras.optimizers.Adam(), admission=sok.policies.Frequency(3), embedding_dtype="bfloat16")
    assert table.assign([1, 2, 1, 3], rows, states=states).inserted == 3
    assert table[1].tolist() == rows[2].tolist()
    table = make_table(keras.optimizers.Adam(), max_capacity=2, eviction="lru")
    assert table.assign([1, 2], rows[:2], states={name: state[:2] for name, state in states.items()}).inserted == 2
    assert table.assign([3], rows[:1], states={name: state[:1] for name, state in states.items()}).evicted == 1
    table = make_table(keras.optimizers.Adam(), max_capacity=2, check_mode="count")
    assert table.assign([1, 2, 3, 4], rows, states=states).refused == 2
    assert len(table) == 2 and (table.export(states=True).states["momentum"] == 1).all()
    assert table.assign([], np.empty((0, DIM)), states={name: state[:0] for name, state in states.items()}).hit == 0


@pytest.mark.parametrize("end", [0, 10, 100, 0.5, -1])
def test_files_that_are_cut_are_named_with_the_byte(tmp_path, end):
    """`end`: bytes that are left, or their share."""
    keys, rows = some_rows(1000)
    table, frame = make_table(), {"key": keys, **{f"x{column}": rows[:, column] for column in range(DIM)}}
    columns = [f"x{column}" for column in range(DIM)]
    readers = {"rows.npz": lambda path: sok.importers.numpy(path, table, progress=False)}
    np.savez(tmp_path / "rows.npz", keys=keys, rows=rows)
    if BACKEND == "torch":
        import torch

        torch.save({"items": torch.from_numpy(rows)}, tmp_path / "rows.pt")
        readers["rows.pt"] = lambda path: sok.importers.torch(path, {"items": table}, progress=False)
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(frame), tmp_path / "rows.parquet")
    readers["rows.parquet"] = lambda path: sok.importers.parquet(path, table, keys="key", rows=columns, progress=False)
    for name, read in readers.items():
        data = (tmp_path / name).read_bytes()
        cut = data[: int(len(data) * end) if isinstance(end, float) else end]
        (tmp_path / name).write_bytes(cut)
        with pytest.raises(
            ValueError, match=rf"{name} must be .*, whole. Received: a file that ends at byte {len(cut)}"
        ):
            read(tmp_path / name)
        assert len(table) == 0
