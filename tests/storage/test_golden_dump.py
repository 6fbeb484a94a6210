"""A dump that an earlier version wrote: it loads for ever, into the same numbers, and the same bytes are written anew.

`golden_dump` was written at 3e5fae1 by `python tests/storage/test_golden_dump.py tests/storage/golden_dump`.
"""

import hashlib
import pathlib
import sys

import keras
import numpy as np

import sok_keras as sok

DUMP = pathlib.Path(__file__).with_name("golden_dump")
DIGESTS = {
    "items": "64ede2abc0ee859c5fd37d379ee095a4a27ebd0f965e826695bd432d76738c79",
    "users": "143ce9401ea8e81312f8372a436c1227540ad50075fdb8992d670fc8536d6743",
    "dense": "8bd469b03395d0c23c9253589ede615176580b34ee58d6c4bef11ca7b6d04afb",
}


def made():
    """A model with a static and a dynamic table, Adam's states and dense weights. A GPU has rows in another order."""
    tables = [
        sok.TableConfig("items", 40, 5, "uniform", seed=1, storage="host"),
        sok.TableConfig("users", None, 4, "normal", seed=2, storage="host"),
    ]
    embedding = sok.DistributedEmbedding(
        {table.name: sok.FeatureConfig(table.name, table) for table in tables}, name="embedding"
    )
    inputs = {table.name: keras.Input((3,), dtype="int32", name=table.name) for table in tables}
    rows = [keras.layers.Flatten()(row) for row in embedding(inputs).values()]
    outputs = keras.layers.Dense(1, name="dense")(keras.layers.Concatenate()(rows))
    model = keras.Model(inputs, outputs)
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse")
    return model


def write(path):
    keras.utils.set_random_seed(1)
    model, random = made(), np.random.default_rng(1)
    ids = {name: random.integers(0, 40, (64, 3)).astype("int32") for name in ("items", "users")}
    ids["users"] = ids["users"] * 50_000_017 - 2**30
    model.fit(ids, random.normal(size=(64, 1)), batch_size=16, epochs=2, shuffle=False, verbose=0)
    sok.dump(path, model)


def digests(model):
    """SHA-256 of each table's keys, rows and states in the order of keys, and of the dense weights."""
    found = {}
    for name, table in model.get_layer("embedding").get_tables().items():
        contents = table.export(states=True)
        order = np.argsort(contents.keys)
        arrays = [contents.keys, contents.rows, *(contents.states[state] for state in sorted(contents.states))]
        found[name] = hashlib.sha256(b"".join(np.ascontiguousarray(array[order]).tobytes() for array in arrays))
    iterations = np.int64(keras.ops.convert_to_numpy(model.optimizer.iterations))
    dense = [*model.get_layer("dense").get_weights(), iterations]
    found["dense"] = hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in dense))
    return {name: digest.hexdigest() for name, digest in found.items()}


def loaded(path):
    model = made()
    model.optimizer.build(model.trainable_variables)
    sok.load(path, model)
    return model


def test_dump_of_an_earlier_version_loads_into_the_same_numbers():
    sok.verify(DUMP)
    assert digests(loaded(DUMP)) == DIGESTS


def test_rows_are_written_anew_byte_for_byte(tmp_path):
    sok.dump(tmp_path / "dump", loaded(DUMP))
    # The last shard has the dense weights, by names that Keras counts.
    (*old, _), (*new, _) = (sorted(path.glob("*.safetensors")) for path in (DUMP, tmp_path / "dump"))
    assert [file.read_bytes() for file in new] == [file.read_bytes() for file in old]


if __name__ == "__main__":
    write(sys.argv[1])
    print(digests(loaded(sys.argv[1])))
