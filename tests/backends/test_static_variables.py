"""Variables of TensorFlow with a fixed number of rows, in loops with `tf.GradientTape`. `tests/ranks` has those of many ranks."""

import struct

import keras
import numpy as np
import pytest

import sok_keras as sok
from bags import bags
from reference import BACKEND
from sok_keras import horovod
from sok_keras.backend.private_keras import row_states_of

pytestmark = pytest.mark.skipif(BACKEND != "tensorflow", reason="variables of TensorFlow")

if BACKEND == "tensorflow":
    import tensorflow as tf

ROWS, DIM = 12, 3


def some_rows(seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS, DIM)).astype("float32")


def dense_of(slices):
    total = np.zeros(slices.dense_shape.numpy(), "float32")
    np.add.at(total, slices.indices.numpy(), slices.values.numpy())
    return total


def test_a_variable_is_a_tf_variable():
    v = sok.Variable(np.arange(15 * 16).reshape(15, 16), dtype=tf.float32)
    assert isinstance(v, tf.Variable) and v.shape.as_list() == [15, 16] == list(v.global_shape)
    np.testing.assert_array_equal(v, np.arange(15 * 16).reshape(15, 16))
    v.assign_add(tf.ones_like(v))
    assert v.numpy()[0, 0] == 1 and v.trainable and v.mode == "distributed" and (v.num_gpus, v.target_gpu) == (1, -1)
    assert sok.Variable([[1.0]], mode="localized:0").target_gpu == 0
    tensor = sok.Variable(tf.ones((2, 2)), trainable=False)
    assert not tensor.trainable and tensor.name.startswith("sok_static_Variable_")


@pytest.mark.parametrize("form", ["ragged", "sparse"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_and_gradients_are_those_of_tensorflow(form, combiner, weighted):
    tables = [some_rows(0), some_rows(1)]
    inputs = [bags(form, ROWS, seed) for seed in (0, 1, 2)]
    variables = [sok.Variable(rows) for rows in tables]
    chosen = [0, 1, 0]  # one of them twice
    weights = [pair[1] if weighted else None for pair in inputs]
    dense = [tf.Variable(rows) for rows in tables]
    upstream = [tf.constant(np.random.default_rng(9).normal(size=(5, DIM)).astype("float32")) for _ in chosen]
    with tf.GradientTape() as tape:
        expected = []
        for number, (ids, own) in zip(chosen, inputs, strict=True):
            sparse = [tensor if form == "sparse" else tensor.to_sparse() for tensor in (ids, own)]
            weights_of = sparse[1] if weighted else None
            expected.append(tf.nn.embedding_lookup_sparse(dense[number], sparse[0], weights_of, combiner=combiner))
    wanted = tape.gradient(expected, dense, output_gradients=upstream)
    with tf.GradientTape() as tape:
        got = sok.lookup_sparse(
            [variables[number] for number in chosen], [ids for ids, _ in inputs], weights, combiners=[combiner] * 3
        )
    found = tape.gradient(got, variables, output_gradients=upstream)
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(dense_of(other), dense_of(one), rtol=1e-5, atol=1e-6)
    assert len(set(found[1].indices.numpy())) == len(found[1].indices)


def test_ids_of_any_shape_are_read_without_combining():
    rows = some_rows()
    v, dynamic = sok.Variable(rows), sok.assign(sok.DynamicVariable(DIM), np.arange(ROWS), rows)
    ids = tf.constant([[3, 0], [3, 11]])
    for variable in (v, dynamic):
        with tf.GradientTape() as tape:
            found = sok.all2all_dense_embedding(variable, ids)
        np.testing.assert_array_equal(found, rows[ids.numpy()])
        gradient = tape.gradient(found, variable)
        counts = dict(zip(gradient.indices.numpy().tolist(), gradient.values.numpy()[:, 0].tolist(), strict=True))
        assert counts == {3: 2, 0: 1, 11: 1}

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.int64)])
    def read(ids):
        return sok.all2all_dense_embedding(v, ids)

    assert read(tf.cast(ids, tf.int64)).shape == (2, 2, DIM)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adagrad"])
def test_plain_optimizers_train_it_as_a_dense_variable(optimizer, wrapped, compiled):
    v, plain = sok.Variable(some_rows()), tf.Variable(some_rows())
    make = getattr(keras.optimizers, optimizer)
    own = sok.OptimizerWrapper(make(0.1)) if wrapped else make(0.1)
    reference = make(0.1)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(sok.lookup_sparse(v, ids, combiners="mean")))
        own.apply_gradients(zip(tape.gradient(loss, [v]), [v], strict=True))

    if compiled:
        step = tf.function(step, input_signature=[tf.RaggedTensorSpec([None, None], tf.int64)])
    for seed in range(5):
        ids, _ = bags("ragged", ROWS, seed)
        step(ids)
        with tf.GradientTape() as tape:
            found = tf.nn.embedding_lookup_sparse(plain, ids.to_sparse(), None, combiner="mean")
            loss = tf.reduce_sum(tf.square(found))
        reference.apply_gradients(zip(tape.gradient(loss, [plain]), [plain], strict=True))
    assert np.abs(v.numpy() - some_rows()).max() > 0.01
    np.testing.assert_allclose(v, plain, rtol=1e-5, atol=1e-6)


def test_one_optimizer_trains_static_dynamic_and_dense_variables():
    rows = some_rows()
    static, dynamic = sok.Variable(rows), sok.assign(sok.DynamicVariable(DIM), np.arange(ROWS), rows)
    dense = keras.Variable(np.ones(DIM, "float32"))
    variables = [static, dense, dynamic]
    assert sok.filter_variables(variables) == ([static, dynamic], [dense])
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adagrad(0.1, global_clipnorm=1.0))
    ids, _ = bags("ragged", ROWS)
    for _ in range(3):
        with tf.GradientTape() as tape:
            found = sok.lookup_sparse([static, dynamic], [ids, ids], combiners="sum")
            loss = tf.add_n([tf.reduce_sum(tf.square(one) * dense.value) for one in found])
        gradients = tape.gradient(loss, [static, dense.value, dynamic])
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    assert np.abs(dense.numpy() - 1).max() > 0.01
    own, trained = sok.export(dynamic)
    np.testing.assert_allclose(static.numpy()[own.numpy()], trained, rtol=1e-5, atol=1e-6)
    assert np.abs(trained - rows[own.numpy()]).max() > 0.01


def test_first_rows_are_those_of_a_layer():
    initializer = keras.initializers.RandomNormal(stddev=0.5, seed=7)
    v = sok.Variable(shape=(ROWS, DIM), initializer=initializer, name="t")
    config = sok.TableConfig("t", ROWS, DIM, initializer)
    layer = sok.DistributedEmbedding([sok.FeatureConfig("f", config)])
    layer.build()
    np.testing.assert_array_equal(v, layer.get_tables()["t"].find(np.arange(ROWS))[0])
    assert np.abs(sok.Variable(shape=[ROWS, DIM])).max() <= 0.05
    assert (sok.Variable(shape=[ROWS, DIM], initializer="ones").numpy() == 1).all()
    asked = []
    sok.Variable(shape=[ROWS, DIM], initializer=lambda shape, dtype: asked.append((shape, dtype)) or np.zeros(shape))
    assert asked == [((ROWS, DIM), "float32")]


def test_rows_are_exported_assigned_dumped_and_in_checkpoints(tmp_path):
    rows = some_rows()
    v = sok.Variable(rows, name="v")
    ids, exported = sok.export(v)
    np.testing.assert_array_equal(ids, np.arange(ROWS))
    np.testing.assert_array_equal(exported, rows)
    dynamic = sok.assign(sok.DynamicVariable(DIM, name="d"), [2**40], np.ones((1, DIM)))
    sok.dump(tmp_path / "dump", [v, dynamic])
    checkpoint = tf.train.Checkpoint(v=v).save(str(tmp_path / "tf"))
    new = np.full((2, DIM), 5.0)
    assert sok.assign(v, [3, 3], new * [[1], [2]]) is v and (v.numpy()[3] == 10).all()
    assert (v.numpy()[[0, 11]] == rows[[0, 11]]).all()
    assert sok.load(tmp_path / "dump", [v, dynamic]).tables == {"variables/v": ROWS, "variables/d": 1}
    np.testing.assert_array_equal(v, rows)
    v.assign(tf.zeros_like(v))
    sok.load(tmp_path / "dump", [v, dynamic], tables=["variables/d"])
    assert (v.numpy() == 0).all()
    tf.train.Checkpoint(v=v).restore(checkpoint).assert_consumed()
    np.testing.assert_array_equal(v, rows)


def test_a_dump_that_lacks_rows_changes_none(tmp_path):
    rows = some_rows()
    v = sok.Variable(rows, name="v")
    table = v.as_table()
    assert table.erase([3]) == 1
    sok.dump(tmp_path / "dump", [table])
    with pytest.raises(ValueError, match=f"must get all its rows. Received: {ROWS - 1} of {ROWS}"):
        sok.load(tmp_path / "dump", [v])
    np.testing.assert_array_equal(v, rows)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, sok.OptimizerWrapper])
def test_states_of_rows_are_the_optimizers(wrap, tmp_path):
    """The order of arguments is that of SparseOperationKit."""
    variables = [sok.Variable(some_rows(), name="v"), sok.Variable(some_rows(1), name="other")]
    optimizer = wrap(keras.optimizers.Adam(0.1))

    def step():
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(tf.square(sok.all2all_dense_embedding(v, tf.constant([1, 5])))) for v in variables)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    step()
    manifest = sok.dump(tmp_path / "dump", variables, optimizer)
    of_one = ["variables/v", "variables/v#momentums", "variables/v#velocities"]
    assert sorted(t.name for t in manifest.tables) == sorted(of_one + [n.replace("/v", "/other") for n in of_one])
    saved = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "tf"))
    step()
    after = [v.numpy() for v in variables]
    sok.load(tmp_path / "dump", variables, optimizer)
    # The number of steps is the optimizer's.
    (optimizer.inner_optimizer if wrap is sok.OptimizerWrapper else optimizer).iterations.assign(1)
    step()
    for v, rows in zip(variables, after, strict=True):
        np.testing.assert_array_equal(v, rows)
    # The checkpoint has the same states.
    sok.load(tmp_path / "dump", variables, states=False)
    tf.train.Checkpoint(optimizer=optimizer).restore(saved)
    step()
    np.testing.assert_array_equal(variables[0], after[0])
    assert len(sok.dump(tmp_path / "one", variables, optimizer, tables=["variables/v"]).tables) == 3
    assert len(sok.dump(tmp_path / "rows", variables, optimizer, states=False).tables) == 2
    # Variables of other names, whose optimizer is built.
    again = [sok.Variable(np.zeros((ROWS, DIM), "float32")) for _ in variables]
    fresh = wrap(keras.optimizers.Adam(0.1))
    with pytest.warns(UserWarning, match=r"does not have the states .*variables/v#momentums'.*of the dump: call its"):
        sok.load(tmp_path / "dump", again, fresh)
    fresh.build(again)
    sok.load(tmp_path / "dump", again, fresh)
    (fresh.inner_optimizer if wrap is sok.OptimizerWrapper else fresh).iterations.assign(1)
    variables, optimizer = again, fresh
    step()
    for v, rows in zip(again, after, strict=True):
        np.testing.assert_array_equal(v, rows)
    with pytest.warns(UserWarning, match=r"does not have \[.*'variables/v#momentums'.*stay as they are"):
        sok.load(tmp_path / "rows", variables, optimizer)


def test_an_optimizer_has_no_states_of_a_dynamic_variable(tmp_path):
    dynamic = sok.DynamicVariable(DIM, name="d")
    sok.assign(dynamic, [1], np.ones((1, DIM)))
    sok.dump(tmp_path / "own", [dynamic], sok.OptimizerWrapper("adam"))
    assert sok.load(tmp_path / "own", [dynamic], sok.OptimizerWrapper("adam")).tables == {"variables/d": 1}
    with pytest.raises(TypeError, match="`optimizer` must be a Keras optimizer"):
        sok.dump(tmp_path / "own", [dynamic], ["d"])


def test_a_tape_outside_of_a_function_sees_the_variable():
    v = sok.Variable(some_rows())
    read = tf.function(lambda ids: tf.reduce_sum(sok.all2all_dense_embedding(v, ids)))
    combine = tf.function(lambda ids: tf.reduce_sum(sok.lookup_sparse(v, ids, combiners="mean")))
    for function, ids in ((read, tf.constant([3, 3])), (combine, tf.ragged.constant([[3], [3]], dtype=tf.int64))):
        with tf.GradientTape() as tape:
            loss = function(ids)
        gradient = tape.gradient(loss, v)
        assert gradient.indices.numpy().tolist() == [3] and (gradient.values.numpy() == 2).all()


@pytest.mark.parametrize("clipping", ["clipvalue", "clipnorm", "global_clipnorm"])
def test_gradients_of_several_lookups_are_clipped_as_one(clipping):
    v, dense = sok.Variable(some_rows()), tf.Variable(some_rows())
    optimizers = [sok.OptimizerWrapper(keras.optimizers.SGD(1.0, **{clipping: 1.0})) for _ in range(2)]
    with tf.GradientTape() as tape:
        parts = [sok.all2all_dense_embedding(v, tf.constant(ids)) for ids in ([1, 2], [1])]
        loss = tf.add_n([tf.reduce_sum(part) for part in parts])
    optimizers[0].apply_gradients(zip(tape.gradient(loss, [v]), [v], strict=True))
    whole = np.zeros((ROWS, DIM), "float32")
    whole[[1, 2]] = [[2], [1]]
    optimizers[1].apply_gradients([(tf.constant(whole), dense)])
    np.testing.assert_allclose(v, dense, rtol=1e-6)


def test_ids_of_unknown_shape_are_read():
    v = sok.Variable(some_rows())
    for shape in ([None, None], None):
        read = tf.function(
            lambda ids: sok.all2all_dense_embedding(v, ids), input_signature=[tf.TensorSpec(shape, tf.int64)]
        )
        np.testing.assert_array_equal(read(tf.constant([[1, 2]], tf.int64)), some_rows()[[[1, 2]]])


def test_what_would_give_wrong_rows_is_refused(tmp_path):
    v = sok.Variable(some_rows(), name="v")
    with pytest.raises(TypeError, match="rows of their own"):
        horovod.broadcast_variables([v], 0)
    with pytest.raises(ValueError, match="loss_scale_factor=2"):
        sok.OptimizerWrapper(keras.optimizers.SGD(loss_scale_factor=2.0)).build([v])
    sok.dump(tmp_path / "d", [v])
    with pytest.raises(TypeError, match="dump it whole"):
        sok.dump_increment(tmp_path / "d", [v])
    with pytest.raises(ValueError, match="32 bits"):
        horovod.allreduce(tf.constant([1]))


def test_sgd_adds_gradients():
    v = sok.Variable(np.ones((3, 2), "float32"))
    optimizer = sok.SGD(lr=0.5)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.all2all_dense_embedding(v, tf.constant([1, 1, 2])))
    optimizer.apply_gradients(zip(tape.gradient(loss, [v]), [v], strict=True))
    assert v.numpy()[:, 0].tolist() == [1, 0, 0.5] and optimizer.gradient_reduction == "sum"


def test_a_row_that_is_not_there_is_an_error():
    v = sok.Variable(some_rows(), name="short")

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def read(ids):
        return sok.all2all_dense_embedding(v, ids)

    for ids in ([-1], [0, ROWS], [2**40]):
        ids = tf.constant(ids, tf.int64)
        for call in (read, lambda ids: sok.all2all_dense_embedding(v, ids)):
            with pytest.raises(tf.errors.InvalidArgumentError, match=f"Ids of short.* less than {ROWS}"):
                call(ids)
    with pytest.raises(ValueError, match=f"less than {ROWS}. Received: {ROWS}"):
        sok.assign(v, [0, ROWS], np.zeros((2, DIM)))
    with pytest.raises(ValueError, match=r"shape \(1, 3\). Received: shape \(1, 2\)"):
        sok.assign(v, [0], np.zeros((1, 2)))
    np.testing.assert_array_equal(v, some_rows())


def test_wrong_arguments_are_refused():
    for arguments, message in [
        ({"initial_value": [[1.0]], "shape": [1, 1]}, "Either `initial_value` or `shape`"),
        ({}, "Either `initial_value` or `shape`"),
        ({"initial_value": [1.0]}, "two axes"),
        ({"shape": [0, 3]}, "two axes"),
        ({"initial_value": [[1.0]], "dtype": "float64"}, "`dtype` must be float32"),
        ({"initial_value": [[1.0]], "mode": "localized:1"}, "one of the 1 ranks"),
        ({"initial_value": [[1.0]], "mode": "localised:0"}, "`mode` must be"),
        ({"shape": [2, 3], "initializer": lambda shape, dtype: np.zeros((3, 2))}, "must return the rows of this rank"),
        ({"shape": [2, 3], "initializer": keras.initializers.Orthogonal()}, "core has a formula"),
    ]:
        with pytest.raises(ValueError, match=message):
            sok.Variable(**arguments)
    v = sok.Variable(some_rows())
    with pytest.raises(ValueError, match="Ids of .* must be int64. Received: ids of dtype"):
        sok.lookup_sparse(v, tf.ragged.constant([[1.0]]))
    with pytest.raises(TypeError, match="sparse or ragged"):
        sok.lookup_sparse(v, tf.constant([[1]]))
    with pytest.raises(TypeError, match="sok_keras.Variable"):
        sok.lookup_sparse(tf.Variable(some_rows()), tf.ragged.constant([[1]]))


@pytest.mark.parametrize(
    ("optimizer", "name", "slots"),
    [
        (keras.optimizers.SGD(0.1, momentum=0.9), "SGD", {"momentum": "momentums"}),
        (keras.optimizers.Adam(0.1), "Adam", {"m": "momentums", "v": "velocities"}),
        (keras.optimizers.AdamW(0.1), "Adam", {"m": "momentums", "v": "velocities"}),
        (keras.optimizers.Adamax(0.1), "Adam", {"m": "m", "v": "u"}),
        (keras.optimizers.Adagrad(0.1), "Adagrad", {"accumulator": "accumulators"}),
        (
            keras.optimizers.Adadelta(0.1),
            "Adadelta",
            {"accum_grad": "accumulated_grads", "accum_var": "accumulated_delta_vars"},
        ),
        (keras.optimizers.Ftrl(0.1), "Ftrl", {"accumulator": "accumulators", "linear": "linears"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_and_states_are_files_of_sparse_operation_kit(optimizer, name, slots, tmp_path):
    kind = type(optimizer)
    v = sok.Variable(some_rows(), name="v")
    optimizer = sok.OptimizerWrapper(optimizer)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(sok.all2all_dense_embedding(v, tf.constant([1, 5, 7]))))
    optimizer.apply_gradients([(tape.gradient(loss, v), v)])
    sok.exporters.sok(tmp_path, [v], states=True, optimizer=optimizer, progress=False)
    files = {"v_0-key", "v_0-weight", *(f"v_0-{name}-{slot}" for slot in slots)}
    assert {file.name for file in tmp_path.iterdir()} == files
    states = row_states_of(optimizer, v)
    for slot, own in slots.items():
        data = (tmp_path / f"v_0-{name}-{slot}").read_bytes()
        assert data[256:296] == struct.pack(">I", 2) + slot.rjust(32).encode() + struct.pack(">I", 5)
        np.testing.assert_array_equal(np.frombuffer(data[296:], "float32").reshape(ROWS, DIM), states[own])
    other = sok.Variable(np.zeros((ROWS, DIM), "float32"), name="w")
    again = kind(**({"momentum": 0.9} if kind is keras.optimizers.SGD else {}))
    with pytest.raises(ValueError, match="once the optimizer is built"):
        sok.importers.sok(tmp_path, {"v:0": other}, states=True, optimizer=again, progress=False)
    with pytest.raises(ValueError, match="Received: no optimizer"):
        sok.importers.sok(tmp_path, {"v:0": other}, states=True, progress=False)
    assert not other.numpy().any()
    again.build([other])
    outcomes = sok.importers.sok(tmp_path, {"v:0": other}, states=True, optimizer=again, progress=False)
    assert outcomes["v:0"].hit == ROWS
    np.testing.assert_array_equal(other, v)
    for state, values in row_states_of(again, other).items():
        np.testing.assert_array_equal(values, states[state])


def test_states_that_have_no_files_are_refused(tmp_path):
    v, optimizer = sok.Variable(some_rows(), name="v"), keras.optimizers.Nadam()
    optimizer.build([v])
    with pytest.raises(ValueError, match="Received: Nadam with the states"):
        sok.exporters.sok(tmp_path / "dump", v, states=True, optimizer=optimizer, progress=False)
    assert not (tmp_path / "dump").exists()
    sok.exporters.sok(tmp_path / "dump", v, optimizer=optimizer, progress=False)
    assert sorted(file.name for file in (tmp_path / "dump").iterdir()) == ["v_0-key", "v_0-weight"]
