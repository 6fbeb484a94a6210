"""Programs that run as several ranks, beside the same program in one process."""

import json
import os
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
from fail import PHASES
from processes import alone, last_line, launch, run, start

import sok_keras as sok
from once import once_on
from reference import ON_GPU

STEPS_IN_PYTHON = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="a phase is a Python call, and other backends compile the step"
)


def compare(one, many, names):
    for name in names:
        np.testing.assert_allclose(many[name], one[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_two_ranks_train_as_one_process(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    cases = ["adam", "clipped", "accumulated", "general", "table's own"]
    alone("train.py", folders[0], *cases)
    run(2, "train.py", folders[1], *cases)
    for case in cases:
        one = np.load(folders[0] / f"{case}0.npz")
        compare_ranks(one, [np.load(folders[1] / f"{case}{rank}.npz") for rank in range(2)])


def compare_ranks(one, ranks):
    np.testing.assert_allclose(np.mean([rank["losses"] for rank in ranks], axis=0), one["losses"], rtol=1e-4)
    dense = [name for name in one.files if name.startswith("dense")]
    assert len(dense) == 4
    for name in dense:
        np.testing.assert_array_equal(ranks[0][name], ranks[1][name])
    compare(one, ranks[0], [name for name in one.files if name != "losses"])
    for name in one.files:
        if name.startswith(("keys", "rows")):
            np.testing.assert_array_equal(ranks[0][name], ranks[1][name])


@once_on("jax")
def test_policies_count_the_ids_of_all_ranks():
    run(2, "policies.py")


@once_on("torch")
def test_a_commit_that_ranks_refuse_lets_the_rows_of_its_lookups_go():
    run(2, "refused.py")


@once_on("torch")
@pytest.mark.parametrize("eviction", ["lru", "none"])
def test_a_full_table_is_loaded_by_other_numbers_of_ranks(tmp_path, eviction):
    """Hashes do not give each rank as many rows as its part of `max_capacity`."""
    run(3, "full.py", tmp_path, "save", eviction)
    run(2, "full.py", tmp_path, "load", eviction)
    if eviction == "lru":
        alone("full.py", tmp_path, "load", eviction)


def test_many_tables_are_trained_by_uneven_and_empty_batches_as_by_one_process(tmp_path):
    alone("many_tables.py", tmp_path)
    run(2, "many_tables.py", tmp_path)
    one, *two = (np.load(tmp_path / f"rank{name}.npz") for name in ("0of1", "0of2", "1of2"))
    assert len(one.files) == 4 + 3 * 26 + 3  # three tables have two states
    compare(one, two[0], one.files)
    for name in one.files:
        np.testing.assert_array_equal(two[0][name], two[1][name], err_msg=name)


@once_on("jax")
def test_empty_batches_train_beside_tables_that_are_not_trained(tmp_path):
    alone("frozen.py", tmp_path)
    run(2, "frozen.py", tmp_path)
    one, *two = (np.load(tmp_path / f"rank{name}.npz") for name in ("0of1", "0of2", "1of2"))
    assert len(one.files) == 3 * 4
    compare(one, two[0], one.files)
    for name in one.files:
        np.testing.assert_array_equal(two[0][name], two[1][name], err_msg=name)


@once_on("jax")
def test_rows_and_gradients_travel_as_bfloat16(tmp_path, monkeypatch):
    if ON_GPU:
        monkeypatch.setenv("SOK_EXCHANGE", "nccl")  # nothing travels between GPUs that reach each other's memory
    for dtype in ("float32", "bfloat16"):
        run(2, "narrow.py", tmp_path, dtype)
    exact, narrow = (np.load(tmp_path / f"{dtype}.npz") for dtype in ("float32", "bfloat16"))
    np.testing.assert_array_equal(narrow["before"], exact["before"])
    changes = [run["after"] - run["before"] for run in (exact, narrow)]
    assert np.abs(changes[0]).max(axis=1).min() > 0
    np.testing.assert_allclose(changes[1], changes[0], rtol=0.02, atol=1e-4)
    assert (changes[1] != changes[0]).any()


def test_ranks_compute_in_16_bits():
    run(2, "compute_dtypes.py")


@pytest.mark.skipif(
    os.environ.get("SOK_EXCHANGE") == "nccl", reason="over NCCL, gradients are summed after the backward pass"
)
@pytest.mark.skipif(keras.backend.backend() != "torch", reason="other backends sum after the backward pass")
def test_gradients_are_summed_during_the_backward_pass_with_the_same_bits():
    status, text = launch(2, "buckets.py")
    assert status == 7, text


@once_on("jax")
def test_tables_answer_for_all_ranks(tmp_path):
    run(3, "persist.py", tmp_path, "tables", 0)


@once_on("jax")
def test_a_dump_of_three_ranks_goes_on_in_one_and_in_two(tmp_path):
    run(3, "persist.py", tmp_path, "dump", 1)
    sok.verify(tmp_path / "dump")
    assert len(sok.read_manifest(tmp_path / "dump").increments) == 1
    for ranks in (1, 2):
        run(ranks, "persist.py", tmp_path, "load", 2)
        sok.compact(tmp_path / "dump")
    one, two = (np.load(tmp_path / f"load{ranks}.npz") for ranks in (1, 2))
    compare(one, two, one.files)
    # Rank 0 has written all rows to files of Keras, too.
    run(2, "persist.py", tmp_path, "weights", 2)
    before, after = np.load(tmp_path / "dump3.npz"), np.load(tmp_path / "weights2.npz")
    assert len(before.files) == len(after.files) > 4
    for name in before.files:
        np.testing.assert_array_equal(after[name], before[name])
    with zipfile.ZipFile(tmp_path / "model.keras") as model:
        assert model.getinfo("model.weights.h5").file_size > 0.9 * (tmp_path / "model.weights.h5").stat().st_size


def trained_by_two_ranks_as_by_one(program, tmp_path, num_arrays):
    alone(program, tmp_path)
    run(2, program, tmp_path)
    one, *two = (np.load(tmp_path / f"rank{name}.npz") for name in ("0of1", "0of2", "1of2"))
    assert len(one.files) == num_arrays
    for of_rank in two:
        compare(one, of_rank, one.files)


@once_on("tensorflow")
def test_variables_are_trained_by_two_ranks_as_by_one(tmp_path):
    trained_by_two_ranks_as_by_one("variables.py", tmp_path, 4)


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="TensorFlow has variables of its own")
def test_loops_with_variables_are_trained_by_two_ranks_as_by_one(tmp_path):
    trained_by_two_ranks_as_by_one("functional_variables.py", tmp_path, 7)


@once_on("tensorflow")
def test_programs_of_sparse_operation_kits_pages_run(tmp_path):
    pages = Path(__file__).resolve().parents[3] / "shared" / "seeds"
    if not pages.exists():
        pytest.skip(f"needs the documents of SparseOperationKit in {pages}")
    for ranks in (1, 2):
        run(ranks, "sok_pages.py", tmp_path)


@once_on("tensorflow")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_and_gradients_of_ranks_are_those_of_tensorflow(ranks, tmp_path):
    run(ranks, "lookups.py", tmp_path / "dump")


@once_on("tensorflow")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_have_the_numbers_of_the_hugectr_notebook(ranks):
    run(ranks, "plugin.py")


@once_on("tensorflow")
def test_static_variables_are_trained_by_many_ranks_as_by_one(tmp_path):
    alone("static_variables.py", tmp_path)
    one = np.load(tmp_path / "static0of1.npz")
    for ranks in (2, 3, 4):
        run(ranks, "static_variables.py", tmp_path)
        found = [np.load(tmp_path / f"static{rank}of{ranks}.npz") for rank in range(ranks)]
        for rank, of_rank in enumerate(found):
            many = {name: one[name][rank::ranks] for name in ("spread", "drawn")} | {"dense": one["dense"]}
            compare(of_rank, many, many)
        np.testing.assert_allclose(found[-1]["whole"], one["whole"], rtol=1e-4, atol=1e-6)
        assert [len(of_rank["ids of whole"]) for of_rank in found] == [0] * (ranks - 1) + [len(one["whole"])]


@once_on("jax")
def test_dumps_of_sparse_operation_kit_are_read_and_written_by_any_number_of_ranks(tmp_path):
    random = np.random.default_rng(0)
    keys, rows = random.permutation(200_000) - 50, random.normal(size=(200_000, 3)).astype("float32")
    layer = sok.DynamicEmbedding(3, name="items")
    ids = keras.Input((), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile(sok.OptimizerWrapper("adam"), "mse")
    model.optimizer.build(model.trainable_variables)
    layer.get_table().assign(keys, rows, states={"momentum": 2 * rows, "velocity": rows**2})
    sok.exporters.sok(tmp_path / "from", layer.get_table(), states=True)
    for ranks in (2, 3):
        run(ranks, "imports.py", tmp_path)
        found, order = np.load(tmp_path / f"world{ranks}.npz"), np.argsort(keys)
        np.testing.assert_array_equal(found["keys"], keys[order])
        np.testing.assert_array_equal(found["rows"], rows[order])
        np.testing.assert_array_equal(found["velocity"], rows[order] ** 2)
        other = sok.DynamicEmbedding(3, name="items")
        other.build()
        sok.importers.sok(tmp_path / f"to{ranks}", other.get_table(), progress=False)
        np.testing.assert_array_equal(other.get_table().export().rows, rows[order])


@pytest.mark.parametrize(
    "how",
    [
        "kill",
        *[pytest.param(how, marks=once_on("jax")) for how in ("stop", "raise", "other")],
        *[pytest.param(how, marks=STEPS_IN_PYTHON) for how in PHASES],
    ],
)
def test_ranks_hear_of_another_that_fails(how, tmp_path):
    """`stop`: the launcher must end a rank that does nothing any more."""
    ranks = int(os.environ.get("SOK_TEST_RANKS", 2))
    status, text = launch(ranks, "fail.py", tmp_path, how, timeout=120)
    assert status != 0, text
    heard = {path.name for path in tmp_path.glob("heard*.npy")}
    assert heard == {f"heard{rank}.npy" for rank in range(ranks) if rank != 1}, text


@pytest.mark.parametrize("placement", ["everywhere", "localized:x", "localized:", "localized:-1", 3])
def test_placements_are_checked(placement):
    with pytest.raises(ValueError, match="`placement` must be one of"):
        sok.TableConfig("t", 10, 2, placement=placement)


def test_only_static_tables_are_replicated():
    with pytest.raises(ValueError, match="only for a static table"):
        sok.TableConfig("t", None, 2, placement="replicated")
    sok.TableConfig("t", 10, 2, placement="replicated")


def test_reductions_are_checked():
    with pytest.raises(ValueError, match="`gradient_reduction` must be"):
        sok.OptimizerWrapper("adam", gradient_reduction="max")
    wrapper = sok.OptimizerWrapper("adam", gradient_reduction="sum")
    assert sok.OptimizerWrapper.from_config(wrapper.get_config()).gradient_reduction == "sum"


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="only XLA reorders calls")
def test_a_lookup_depends_on_the_one_before():
    code = """
import jax, numpy as np
sok.init(merge_blocks=1)
layers = [sok.DynamicEmbedding(2) for _ in range(4)]
loss = lambda scale, ids: sum(layer(ids).sum() * scale for layer in layers)
ids = np.arange(3)
[layer(ids) for layer in layers]
graphs = [str(jax.make_jaxpr(function)(1.0, ids)) for function in (loss, jax.grad(loss))]
print([graph.count("('follows', True)") for graph in graphs], float(jax.jit(loss)(1.0, ids)) == float(loss(1.0, ids)))
"""
    assert last_line(start(0, code)) == "[3, 3] True"


def test_fit_and_evaluate_tell_the_metrics_of_all_ranks(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for ranks, folder in zip((1, 2), folders, strict=True):
        folder.mkdir()
        status, text = launch(ranks, "fit.py", folder)
        assert status == 0, text
        assert text.count("Epoch 1/20") == 1, "rank 0 alone prints"
    one, *two = (
        json.loads((folder / f"told{rank}.json").read_text())
        for folder, rank in ((folders[0], 0), (folders[1], 0), (folders[1], 1))
    )
    assert two[0] == two[1]
    assert two[0].keys() == one.keys() and {"auc", "val_auc", "loss", "evaluated"} <= one.keys()
    for name, values in one.items():
        pairs = (
            [(name, values, two[0][name])]
            if name != "evaluated"
            else [(f"val_{key}", value, two[0][name][key]) for key, value in values.items()]
        )
        for metric, expected, told in pairs:
            # The mean of 91 losses counts the sample that fills the last batch.
            scale = 91 / 92 if metric == "val_loss" else 1
            np.testing.assert_allclose(told, np.multiply(expected, scale), rtol=1e-4, err_msg=metric)


def test_all_ranks_skip_a_step_in_which_one_has_an_overflow(tmp_path):
    run(2, "overflow.py", tmp_path)


def test_ids_are_told_to_a_layer_outside_of_graphs():
    layer = sok.DynamicEmbedding(2)
    sok.prefetch(layer, np.array([1, 2], "int32"))
    assert len(layer.get_table()) == 0
    with pytest.raises(ValueError, match="must be a DynamicEmbedding or a DistributedEmbedding"):
        sok.prefetch(keras.layers.Dense(1), np.array([1], "int32"))
    with pytest.raises(ValueError, match="outside of functions that are traced"):
        sok.prefetch(layer, keras.Input((2,), dtype="int32"))
