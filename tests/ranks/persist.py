"""A rank that uses tables outside of training, and dumps and loads what `train.py` trains."""

import os
import sys

import keras
import numpy as np
from seeds import draw_seeds_from
from train import OPTIMIZERS, batches, make_model, share

import sok_keras as sok
from sok_keras.planner import H200, measuring


def check_tables(tables):
    """What a table answers does not depend on the number of ranks. Every rank asks for keys of its own."""
    keys, common = np.arange(10, 40), 45
    own = keys[sok.rank() :: sok.world_size()]
    for table in tables:
        asked = np.append(own, [common, own[0]])
        rows, outcomes = table.find_or_insert(asked)
        assert rows.shape == (len(asked), table.dim)
        assert outcomes.hit + outcomes.inserted == len(own) + 1, outcomes
        found_rows, found = table.find(asked)
        assert found.all()
        np.testing.assert_array_equal(found_rows, rows)
        np.testing.assert_array_equal(rows[-1], rows[0])
        size = len(table)
        assert table.stats().size == size == len(table.keys()) == len(set(table))
        assert sum(len(piece.keys) for piece in table.pieces(7)) == size
        outcomes = table.assign(own[:1], np.full((1, table.dim), 7.0))
        assert (outcomes.hit, outcomes.inserted) == (1, 0), outcomes
        assert (table[own[:1]] == 7).all()
        contents = table.export(states=True)
        assert (np.diff(contents.keys) > 0).all() and len(contents.keys) == size
        assert set(table.keys(local=True)) <= set(contents.keys)
        assert table.find(own, local=True)[1].sum() == np.isin(own, table.keys(local=True)).sum()
        assert table.erase(own) == len(own)
        sok.barrier()  # the others have erased theirs
        assert len(table) == size - len(keys)
        sok.barrier()


def digest(tables, model):
    rows = [
        [contents.keys, contents.rows, *contents.states.values()]
        for contents in (t.export(states=True) for t in tables)
    ]
    dense = [keras.ops.convert_to_numpy(v) for v in model.trainable_variables if "trigger" not in v.path]
    return [array for arrays in rows for array in arrays] + dense


def main(folder, action, seed):
    sok.init(timeout=30, merge_blocks=12)
    draw_seeds_from(0)
    model, tables = make_model("float32", OPTIMIZERS["adam"]())
    path = os.path.join(folder, "dump")
    if action == "tables":
        for inputs, targets in batches():
            model.train_on_batch({name: share(ids) for name, ids in inputs.items()}, share(targets))
        check_tables(tables)
        # The device is what the backend runs on.
        measured = measuring._with_device(H200, 2**20)
        assert 0 < measured.link != H200.link
        return
    if action == "weights":
        model.load_weights(os.path.join(folder, "model.weights.h5"))
    if action in ("load", "read"):
        report = sok.load(path, model)
        assert report.variables
    for inputs, targets in batches(int(seed)) if action not in ("read", "weights") else ():
        model.train_on_batch({name: share(ids) for name, ids in inputs.items()}, share(targets))
    if action == "dump":
        handle = sok.dump(path, model, wait=False)
        inputs, targets = next(batches(3))
        model.train_on_batch({name: share(ids) for name, ids in inputs.items()}, share(targets))
        handle.result()
        sok.dump_increment(path, model, wait=False).result()
        model.save_weights(os.path.join(folder, "model.weights.h5"))
        model.save(os.path.join(folder, "model.keras"))
    arrays = digest(tables, model)
    if action == "dump":
        try:
            model.save_weights(os.path.join(folder, "none", "model.weights.h5"))
        except (OSError, sok.RankError) as error:
            assert isinstance(error, OSError) == (sok.rank() == 0), error
        else:
            raise AssertionError("rank 0 cannot write there")
    if sok.rank() == 0:
        np.savez(os.path.join(folder, f"{action}{sok.world_size()}.npz"), *arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
