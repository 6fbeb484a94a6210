"""Variables of TensorFlow with a row for each id that they meet, in loops with `tf.GradientTape`."""

import copy
import datetime
import functools

import keras
import numpy as np
import pytest

import sok_keras as sok
from bags import bags
from reference import BACKEND, ON_GPU

pytestmark = pytest.mark.skipif(BACKEND != "tensorflow", reason="variables of TensorFlow")

if BACKEND == "tensorflow":
    import tensorflow as tf

KEYS, DIM = 12, 3


def variable(rows=None, **kwargs):
    """A variable, with these rows for the keys from 0 on."""
    made = sok.DynamicVariable(dimension=DIM, **kwargs)
    return made if rows is None else sok.assign(made, np.arange(len(rows)), rows)


def rows_of(variable):
    keys, rows = sok.export(variable)
    return dict(zip(keys.numpy().tolist(), rows.numpy().tolist(), strict=True))


def some_rows(seed=0):
    return np.random.default_rng(seed).normal(size=(KEYS, DIM)).astype("float32")


def test_a_variable_is_read_and_grows():
    """The first example of SparseOperationKit's page on the variable."""
    v = sok.DynamicVariable(dimension=3, initializer="13")
    assert v.shape.as_list() == [None, 3] and v.size.numpy().tolist() == [0, 3]
    indices = tf.convert_to_tensor([0, 1, 2**40], dtype=tf.int64)
    embedding = tf.nn.embedding_lookup(v, indices)
    np.testing.assert_array_equal(embedding, np.full((3, 3), 13.0))
    assert v.shape.as_list() == [None, 3] and v.size.numpy().tolist() == [3, 3]
    assert "with 3 rows" in repr(v)


def test_a_step_moves_the_rows_of_the_batch():
    """The second one."""
    v = sok.DynamicVariable(dimension=3, var_type="hbm", initializer="13")
    indices = tf.convert_to_tensor([0, 1, 2**40], dtype=tf.int64)
    with tf.GradientTape() as tape:
        embedding = tf.nn.embedding_lookup(v, indices)
        loss = tf.reduce_sum(embedding)
    grads = tape.gradient(loss, [v])
    assert grads[0].indices.numpy().tolist() == [0, 1, 2**40] and (grads[0].values.numpy() == 1).all()
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(learning_rate=1.0))
    optimizer.apply_gradients(zip(grads, [v], strict=True))
    np.testing.assert_array_equal(tf.nn.embedding_lookup(v, indices), np.full((3, 3), 12.0))


def test_the_lookup_of_the_getting_started_page():
    v1 = sok.DynamicVariable(dimension=3, initializer="1")
    v2 = sok.DynamicVariable(dimension=5, initializer="2")
    indices1 = tf.SparseTensor([[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]], tf.constant([1, 1, 3, 4, 5], tf.int64), [2, 3])
    indices2 = tf.SparseTensor([[0, 0], [1, 0], [1, 1]], tf.constant([1, 2, 3], tf.int64), [2, 2])
    with tf.GradientTape() as tape:
        embeddings = sok.lookup_sparse([v1, v2], [indices1, indices2], combiners=["sum", "mean"])
        loss = tf.add_n([tf.reduce_sum(embedding) for embedding in embeddings])
    assert embeddings[0].numpy().tolist() == [[2] * 3, [3] * 3] and embeddings[1].numpy().tolist() == [[2] * 5] * 2
    grads = tape.gradient(loss, [v1, v2])
    assert dict(zip(grads[0].indices.numpy().tolist(), grads[0].values.numpy()[:, 0].tolist(), strict=True)) == {
        1: 2,
        3: 1,
        4: 1,
        5: 1,
    }
    assert dict(zip(grads[1].indices.numpy().tolist(), grads[1].values.numpy()[:, 0].tolist(), strict=True)) == {
        1: 1,
        2: 0.5,
        3: 0.5,
    }


@pytest.mark.parametrize("form", ["ragged", "sparse"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_and_gradients_are_those_of_tensorflow(form, combiner, weighted):
    tables = [some_rows(0), some_rows(1)]
    inputs = [bags(form, KEYS, seed) for seed in (0, 1, 2)]
    variables = [variable(rows) for rows in tables]
    chosen = [0, 1, 0]  # one of them twice
    weights = [pair[1] if weighted else None for pair in inputs]
    dense = [tf.Variable(rows) for rows in tables]
    upstream = [tf.constant(np.random.default_rng(9).normal(size=(5, DIM)).astype("float32")) for _ in chosen]
    with tf.GradientTape() as tape:
        expected = []
        for number, (ids, own) in zip(chosen, inputs, strict=True):
            sparse = [tensor if form == "sparse" else tensor.to_sparse() for tensor in (ids, own)]
            # TensorFlow leaves rows without ids at the end away.
            found = tf.nn.embedding_lookup_sparse(
                dense[number], sparse[0], sparse[1] if weighted else None, combiner=combiner
            )
            expected.append(found)
    wanted = tape.gradient(expected, dense, output_gradients=upstream)
    with tf.GradientTape() as tape:
        got = sok.lookup_sparse(
            [variables[number] for number in chosen],
            [ids for ids, _ in inputs],
            weights,
            combiners=[combiner.upper(), combiner, combiner.title()],
        )
    found = tape.gradient(got, variables, output_gradients=upstream)
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)
    for one, other in zip(wanted, found, strict=True):
        sums = [np.zeros((KEYS, DIM), "float32") for _ in range(2)]
        for total, slices in zip(sums, (one, other), strict=True):
            np.add.at(total, slices.indices.numpy(), slices.values.numpy())
        np.testing.assert_allclose(sums[1], sums[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adagrad", "Lion"])
def test_variables_train_as_rows_of_a_dense_one(optimizer, compiled):
    rows = some_rows()
    v, w = variable(rows), keras.Variable(rows)
    dense = [keras.Variable(np.ones((DIM, 1), "float32")) for _ in range(2)]
    ours, theirs = (getattr(keras.optimizers, optimizer)(0.1) for _ in range(2))
    ours = sok.OptimizerWrapper(ours)
    every = tf.range(KEYS, dtype=tf.int64)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(v, every) @ dense[0].value))
        of_v, of_dense = tape.gradient(loss, [v, dense[0].value])
        ours.apply_gradients([(of_v, v), (of_dense, dense[0])])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.gather(w.value, every) @ dense[1].value))
        of_w, of_dense = tape.gradient(loss, [w.value, dense[1].value])
        theirs.apply_gradients([(tf.convert_to_tensor(of_w), w), (of_dense, dense[1])])

    run = tf.function(step) if compiled else step
    for _ in range(5):
        run()
    assert not np.allclose(v.table[np.arange(KEYS)], rows, atol=1e-2)
    np.testing.assert_allclose(v.table[np.arange(KEYS)], w.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dense[0].numpy(), dense[1].numpy(), rtol=1e-4, atol=1e-5)


def test_a_function_makes_variables_tables_and_is_traced_once():
    v, w, traces = variable(initializer="1"), variable(initializer="2"), []
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))

    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.int64)])
    def step(ids):
        traces.append(1)
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse([v, w], [ids, ids], combiners=["sum", "sum"])
            loss = tf.reduce_sum(rows[0]) + 2 * tf.reduce_sum(rows[1])
        gradients = tape.gradient(loss, [v, w])
        # What is done to gradients counts.
        gradients = [tf.IndexedSlices(0.5 * slices.values, slices.indices) for slices in gradients]
        optimizer.apply_gradients(zip(gradients, [v, w], strict=True))
        return v.size

    assert step(tf.ragged.constant([[7], [8, 9]], dtype=tf.int64)).numpy().tolist() == [3, DIM]
    assert step(tf.ragged.constant([[7, 7], []], dtype=tf.int64)).numpy().tolist() == [3, DIM]
    assert len(traces) <= 2  # Keras makes the optimizer's variables in the first one
    assert v.tables is w.tables
    assert rows_of(v) == {7: [-0.5] * DIM, 8: [0.5] * DIM, 9: [0.5] * DIM}
    assert rows_of(w) == {7: [-1.0] * DIM, 8: [1.0] * DIM, 9: [1.0] * DIM}


def native_calls(function):
    """Names of the native calls that a function makes when it is compiled and run."""
    graph = tf.function(function).get_concrete_function().graph
    return [operation.type for operation in graph.get_operations() if operation.type.startswith("Sok")]


def test_a_compiled_step_makes_four_native_calls():
    many, dense = [variable(initializer="1") for _ in range(200)], keras.Variable(np.ones(DIM, "float32"))
    optimizer, ids = sok.OptimizerWrapper("adam"), tf.ragged.constant([[1, 2], [1]], dtype=tf.int64)
    optimizer.build([*many, dense])

    def step(change=lambda gradients: gradients):
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(many, [ids] * len(many), combiners="sum")
            loss = tf.reduce_sum(tf.add_n(rows) * dense.value)
        *of_many, of_dense = tape.gradient(loss, [*many, dense.value])
        optimizer.apply_gradients(zip([*change(of_many), of_dense], [*many, dense], strict=True))

    kind = "SokGpu" if ON_GPU else "Sok"
    assert native_calls(step) == [f"{kind}Lookup", f"{kind}Push", f"{kind}Commit", f"{kind}Apply"]
    # The tables take gradients that a program has changed by a lookup of their keys.
    halves = native_calls(lambda: step(halved))
    assert [call for call in halves if call != "SokMergeGradients"] == [
        f"{kind}{call}" for call in ("Lookup", "Lookup", "Push", "Commit", "Apply")
    ]


def halved(gradients):
    return [tf.IndexedSlices(0.5 * slices.values, slices.indices) for slices in gradients]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        "all",
        "halved",
        "the first",
        "one halved",
        "twice",
        "of two lookups",
        "of a lookup after it",
        "read in a branch",
    ],
)
def test_gradients_count_as_they_are_given(given, is_built, compiled):
    """Two variables of equal first rows, whose gradients are 1 and 2 for each time that a key comes."""
    v, w = variable(initializer="1"), variable(initializer="1")
    optimizer, ids = sok.OptimizerWrapper(keras.optimizers.SGD(1.0)), tf.constant([7, 8, 8], tf.int64)
    if is_built:
        optimizer.build([v, w])

    def step():
        with tf.GradientTape(persistent=True) as tape:
            if given == "of two lookups":
                rows = [one.sparse_read(ids) for one in (v, w)]
            else:
                splits = tf.constant([0, 1, 3], tf.int64)
                ragged = tf.RaggedTensor.from_row_splits(ids, splits)
                rows = sok.lookup_sparse([v, w], [ragged, ragged], combiners="sum")
                if given == "of a lookup after it":
                    rows += sok.lookup_sparse([v, w], [ragged, ragged], combiners="sum")
            sums = [tf.reduce_sum(row) for row in rows]
            loss = tf.add_n(sums[::2]) + 2 * tf.add_n(sums[1::2])
        of_v, of_w = tape.gradient(loss, [v, w])
        if given == "twice":
            of_v, of_w = tape.gradient(loss, [v, w])
        pairs = {
            "halved": lambda: zip(halved([of_v, of_w]), [v, w], strict=True),
            "the first": lambda: [(of_v, v), (None, w)],
            "one halved": lambda: [(of_v, v), (halved([of_w])[0], w)],
            "read in a branch": lambda: [
                (
                    tf.IndexedSlices(
                        tf.cond(tf.constant(True), lambda: of_v.values, lambda: of_w.values), of_v.indices
                    ),
                    v,
                ),
                (of_w, w),
            ],
        }
        optimizer.apply_gradients(pairs.get(given, lambda: [(of_v, v), (of_w, w)])())

    (tf.function(step) if compiled else step)()
    moves = {
        "halved": [(0.5, 1), (1, 2)],
        "the first": [(1, 2), (0, 0)],
        "one halved": [(1, 2), (1, 2)],
        "of a lookup after it": [(2, 4), (4, 8)],
    }.get(given, [(1, 2), (2, 4)])
    for one, (of_7, of_8) in zip((v, w), moves, strict=True):
        assert rows_of(one) == {7: [1.0 - of_7] * DIM, 8: [1.0 - of_8] * DIM}


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_count_when_they_are_applied(compiled):
    v = variable(initializer="1")
    optimizer, ids = sok.OptimizerWrapper(keras.optimizers.SGD(1.0)), tf.constant([7], tf.int64)
    optimizer.build([v])

    def step():
        gradients = []
        for _ in range(70):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(v.sparse_read(ids))
            gradients.append(tape.gradient(loss, v))
        for gradient in [*reversed(gradients), gradients[0], gradients[3]]:
            optimizer.apply_gradients([(gradient, v)])

    (tf.function(step) if compiled else step)()
    assert rows_of(v) == {7: [1.0 - 72] * DIM}


@pytest.mark.parametrize("compiled", [False, True])
def test_many_variables_are_read_one_by_one(compiled):
    many, dense = [variable(initializer="1") for _ in range(80)], keras.Variable(np.ones(DIM, "float32"))
    optimizer, ids = sok.OptimizerWrapper(keras.optimizers.SGD(1.0)), tf.constant([7, 7], tf.int64)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.nn.embedding_lookup(one, ids) * dense.value) for one in many])
        *of_many, of_dense = tape.gradient(loss, [*many, dense.value])
        optimizer.apply_gradients(zip([*of_many, of_dense], [*many, dense], strict=True))

    run = tf.function(step) if compiled else step
    for _ in range(2):
        run()
    # In the second step, the dense variable is 1 - 160.
    assert all(rows_of(one) == {7: [1.0 - 2 - 2 * -159] * DIM} for one in many)


def test_a_tape_outside_of_a_function_may_be_there_when_it_is_traced():
    v, w = variable(initializer="1"), variable(initializer="1")
    optimizer, ids = sok.OptimizerWrapper(keras.optimizers.SGD(1.0)), tf.constant([7, 8, 8], tf.int64)
    forward = tf.function(lambda: tf.reduce_sum(v.sparse_read(ids)) + tf.reduce_sum(w.sparse_read(ids)))
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = forward()
        optimizer.apply_gradients(zip(tape.gradient(loss, [v, w]), [v, w], strict=True))
    assert rows_of(v) == rows_of(w) == {7: [-2.0] * DIM, 8: [-5.0] * DIM}


def test_rows_are_there_when_a_function_within_another_has_made_them():
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
    v = variable(initializer="1")
    optimizer.build([v])
    for number in range(20):
        ids = tf.constant([number, 100, 100], tf.int64)
        inner = tf.function(lambda ids=ids: tf.reduce_sum(v.sparse_read(ids)))

        @tf.function
        def step(inner=inner):
            with tf.GradientTape() as tape:
                loss = inner()
            optimizer.apply_gradients([(tape.gradient(loss, v), v)])

        step()
        assert rows_of(v)[number] == [0.0] * DIM and rows_of(v)[100] == [-1.0 - 2 * number] * DIM


def test_a_frozen_variable_is_read_beside_others():
    v, frozen, dense = variable(initializer="1"), variable(initializer="2", trainable=False), tf.Variable(1.0)
    optimizer, ids = sok.OptimizerWrapper(keras.optimizers.Adam(1.0)), tf.ragged.constant([[7, 8]], dtype=tf.int64)
    optimizer.build([v])

    def step():
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse([frozen, v], [ids, ids], combiners="sum")
            loss = tf.reduce_sum(rows[0] * rows[1]) * dense
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])

    calls = [call.removeprefix("SokGpu").removeprefix("Sok") for call in native_calls(step)]
    assert calls == ["Lookup", "Lookup", "Push", "Commit", "Apply"]
    step()
    assert rows_of(frozen) == {7: [2.0] * DIM, 8: [2.0] * DIM} and rows_of(v)[7][0] < 0.5


def test_rows_that_a_tape_has_seen_may_go_if_no_gradient_comes():
    v = sok.DynamicVariable(DIM, var_type="hybrid", max_capacity=100)
    optimizer = sok.OptimizerWrapper("sgd")
    optimizer.build([v])
    for number in range(50):
        with tf.GradientTape():
            v.sparse_read(tf.range(10 * number, 10 * (number + 1), dtype=tf.int64))
    assert v.size.numpy()[0] <= 100 and v.table.stats().evicted > 0


def test_a_gradient_belongs_to_its_variable():
    v, w, optimizer = variable(initializer="1"), variable(initializer="1"), sok.OptimizerWrapper("sgd")
    static, dense = sok.Variable(np.ones((9, DIM))), tf.Variable(tf.ones((9, DIM)))
    other, ids = sok.DynamicVariable(DIM + 1), tf.constant([7, 8], tf.int64)
    optimizer.build([v, w, static])

    def gradient(read, of):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(read())
        return tape.gradient(loss, of)

    of_v, of_other = (gradient(lambda one=one: one.sparse_read(ids), one) for one in (v, other))
    of_static = gradient(lambda: sok.all2all_dense_embedding(static, ids), static)
    of_dense = gradient(lambda: tf.gather(dense, ids), dense)
    for given, of, message in [
        (of_v, w, "the gradient of sok_dynamic"),
        (of_v, static, "the gradient of sok_dynamic"),
        (of_static, v, "the gradient of sok_static"),
        (of_other, v, "the gradient of sok_dynamic"),
        (tf.IndexedSlices(of_other.values, of_other.indices), v, f"must have rows of {DIM} floats"),
        (of_dense, v, "`tf.IndexedSlices` of 9 rows"),
        (tf.ones((2, DIM)), v, "must be `tf.IndexedSlices`"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            optimizer.apply_gradients([(given, of)])
    assert rows_of(v) == {7: [1.0] * DIM, 8: [1.0] * DIM} and rows_of(w) == {}
    optimizer.apply_gradients([(of_v, v)])
    assert rows_of(v)[7][0] < 1.0


def test_a_gradient_shows_keys_and_rows():
    v = variable(initializer="1")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v.sparse_read(tf.constant([7, 8, 8], tf.int64)))
    gradient = tape.gradient(loss, v)
    assert "indices=tf.Tensor([7 8]" in str(gradient) and gradient.dense_shape.numpy().tolist() == [-1, DIM]
    dense = tf.function(lambda slices: tf.math.unsorted_segment_sum(slices.values, slices.indices, 9))(gradient)
    assert dense.numpy()[:, 0].tolist() == [0] * 7 + [1, 2]
    # First read in a graph, they are there afterwards, too.
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v.sparse_read(tf.constant([7, 8, 8], tf.int64)))
    gradient = tape.gradient(loss, v)
    assert float(tf.function(lambda: tf.reduce_sum(gradient.values))()) == 3 * DIM
    copied = copy.deepcopy(gradient)
    assert copied.indices.numpy().tolist() == gradient.indices.numpy().tolist() == [7, 8]


def test_variables_and_layers_have_one_optimizer():
    v, layer = variable(initializer="1"), sok.DynamicEmbedding(DIM, embeddings_initializer="ones")
    layer.build()
    dense = keras.Variable(np.ones(DIM, "float32"))
    optimizer, ids = sok.OptimizerWrapper(keras.optimizers.SGD(1.0)), tf.constant([5], tf.int64)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((v.sparse_read(ids) + layer(ids, training=True)) * dense.value)
    variables = [v, layer.trigger, dense]
    gradients = tape.gradient(loss, [v, layer.trigger.value, dense.value])
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    assert rows_of(v) == {5: [0.0] * DIM}
    np.testing.assert_array_equal(layer.get_table()[5], np.zeros(DIM))
    np.testing.assert_array_equal(dense, np.full(DIM, -1.0))
    assert sok.filter_variables([dense, v, layer.trigger]) == ([v], [dense, layer.trigger])


def test_rows_that_went_since_the_forward_pass_get_no_gradient():
    v, optimizer = variable(initializer="1"), sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v.sparse_read(tf.constant([1, 2], tf.int64)))
    v.table.erase([1])
    optimizer.apply_gradients([(tape.gradient(loss, v), v)])
    assert rows_of(v) == {2: [0.0] * DIM}


def test_a_variable_on_the_host_removes_rows_at_its_capacity():
    with pytest.warns(UserWarning, match=r"\['max_hbm_for_vectors'\] have no effect"):
        v = sok.DynamicVariable(
            16, "uniform", "hybrid", init_capacity=2, max_capacity=4, max_hbm_for_vectors=2, name="items"
        )
    for key in range(6):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v.sparse_read(tf.constant([key], tf.int64)))
        sok.OptimizerWrapper("sgd").apply_gradients([(tape.gradient(loss, v), v)])
    assert v.size.numpy().tolist() == [4, 16] and v.table.stats().evicted == 2


@pytest.mark.parametrize(
    ("initializer", "low", "high"),
    [
        (None, -0.05, 0.05),
        ("random", -0.05, 0.05),
        ("uniform", 0, 1),
        ("ones", 1, 1),
        ("zeros", 0, 0),
        ("0.5", 0.5, 0.5),
    ],
)
def test_initializers_have_their_names(initializer, low, high):
    rows = variable(initializer=initializer).sparse_read(tf.range(100, dtype=tf.int64)).numpy()
    assert (rows >= low).all() and (rows <= high).all() and (low == high or np.ptp(rows) > 0.5 * (high - low))
    normal = variable(initializer="normal").sparse_read(tf.range(300, dtype=tf.int64)).numpy()
    assert 0.9 < normal.std() < 1.1


def test_rows_are_dumped_by_the_table(tmp_path):
    v = variable(some_rows(), name="dumped")
    sok.dump(tmp_path / "dump", [v])
    other = variable()
    sok.load(tmp_path / "dump", {v.table.name: other.table})
    assert rows_of(other) == rows_of(v)


def test_a_checkpoint_brings_rows_and_states(tmp_path):
    v = variable(some_rows(), name="saved")
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(sok.all2all_dense_embedding(v, tf.constant(ids, tf.int64))))
        optimizer.apply_gradients(zip(tape.gradient(loss, [v]), [v], strict=True))

    step([1, 2, 1000])
    checkpoint = tf.train.Checkpoint(v=v, optimizer=optimizer)
    saved = checkpoint.save(str(tmp_path / "checkpoint"))
    before = rows_of(v)
    step([2, 7, 2000])
    after = rows_of(v)
    checkpoint.restore(saved).assert_consumed()
    assert rows_of(v) == before
    step([2, 7, 2000])
    assert rows_of(v) == after

    asynchronous = tf.train.Checkpoint(v=v)
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    path = asynchronous.save(str(tmp_path / "asynchronous"), options)
    step([3])
    asynchronous.sync()
    asynchronous.restore(path)
    assert rows_of(v) == after
    other = variable(name="untrained")
    with pytest.warns(UserWarning, match="the rows were loaded alone"):
        tf.train.Checkpoint(v=other).restore(saved).expect_partial()
    assert rows_of(other) == before
    narrow = sok.DynamicVariable(1)
    with pytest.raises(ValueError, match="must have 1 columns"):
        tf.train.Checkpoint(v=narrow).restore(saved).expect_partial()


def test_a_tape_outside_of_a_function_sees_the_variable_in_each_call():
    v, dense = variable(initializer="1"), tf.Variable(2.0)
    forward = tf.function(lambda ids: tf.reduce_sum(v.sparse_read(ids)) * dense)
    ids = tf.constant([3, 4, 3], tf.int64)
    forward(ids)  # traced without a tape
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = forward(ids)
        of_v, of_dense = tape.gradient(loss, [v, dense])
        assert of_v.indices.numpy().tolist() == [3, 4] and of_v.values.numpy()[:, 0].tolist() == [4, 2]
        assert float(of_dense) == 3 * DIM


def test_a_function_takes_variables_as_arguments():
    v, w = variable(initializer="1"), variable(initializer="2")
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
    optimizer.build([v, w])
    read = tf.function(lambda variable: variable.sparse_read(tf.constant([1], tf.int64)))
    assert read(v).numpy()[0, 0] == 1 and read(w).numpy()[0, 0] == 2 and read(v).numpy()[0, 0] == 1

    @tf.function
    def step(variables):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(one.sparse_read(tf.constant([1], tf.int64))) for one in variables])
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    step([v])
    step([w])
    step([w, v])
    assert rows_of(v) == {1: [-1.0] * DIM} and rows_of(w) == {1: [0.0] * DIM}


def test_what_would_see_an_empty_variable_is_refused():
    import pickle

    v = variable(some_rows())
    calls = [
        lambda: v.assign(np.ones((1, DIM))),
        lambda: v + 1,
        v.numpy,
        lambda: tf.convert_to_tensor(v),
        lambda: copy.deepcopy(v),
        lambda: pickle.dumps(v),
        lambda: v.scatter_sub(tf.IndexedSlices(tf.ones((1, DIM)), tf.constant([1]))),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match="has its rows in a table"):
            call()
    assert len(rows_of(v)) == KEYS


def test_weights_of_other_places_and_ids_out_of_order_are_refused():
    v = variable()
    ids = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="values in the places of the ids"):
        sok.lookup_sparse(v, ids, tf.ragged.constant([[1.0], [2.0, 3.0]]))
    unordered = tf.SparseTensor([[1, 0], [0, 0]], tf.constant([1, 2], tf.int64), [2, 1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="as `tf.sparse.reorder` puts them"):
        sok.lookup_sparse(v, unordered)


def test_keys_of_32_bits_are_not_cut():
    v = variable(key_type=tf.int32)
    assert v.sparse_read(tf.constant([-1, 5])).shape == (2, DIM)
    assert sok.export(v)[0].dtype == tf.int32 and sok.export(v)[0].numpy().tolist() == [-1, 5]
    with pytest.raises(ValueError, match="must be int32. Received: 1099511627781"):
        sok.assign(v, [2**40 + 5], np.ones((1, DIM)))
    with pytest.raises(ValueError, match="must be int32. Received: ids of dtype"):
        v.sparse_read(tf.constant([5], tf.int64))


def test_names_are_free_again_when_a_variable_is_gone():
    import gc

    first = variable(name="again")
    assert variable(name="again").name == "again_1:0"
    del first
    gc.collect()
    assert variable(name="again").name == "again:0"
    with pytest.raises(ValueError, match="`key_type` must be"):
        variable(name="refused", key_type="float32")
    gc.collect()
    assert variable(name="refused").name == "refused:0"


def test_spellings_of_sparse_operation_kit_are_taken():
    v, ids = (
        variable(initializer="1", var_type=None, filter_ratio=1.0),
        tf.ragged.constant([[1], [2, 3]], dtype=tf.int64),
    )
    for combiners in (["sum"], "sum"):
        assert sok.lookup_sparse(v, ids, combiners=combiners).numpy()[:, 0].tolist() == [1, 2]
        (rows,) = sok.lookup_sparse([v], [ids], combiners=combiners, hotness=[2])
        assert rows.numpy()[:, 0].tolist() == [1, 2]
    rows = sok.lookup_sparse(v, ids, combiners="sum", use_low_frequency_filter=True)
    assert rows.numpy()[:, 0].tolist() == [1, 2]
    rows = sok.lookup_sparse([v, sok.Variable(some_rows())], [ids, ids], use_low_frequency_filter=True)
    assert [row.shape for row in rows] == [(2, DIM)] * 2
    with pytest.raises(ValueError, match="`filter_ratio` must be 1.0 if `trainable` is False"):
        variable(filter_ratio=0.5, trainable=False)
    for ratio in (0, 1.5, True, "0.5"):
        with pytest.raises(ValueError, match="`filter_ratio` must be a number above 0"):
            variable(filter_ratio=ratio)


def test_wrong_arguments_are_refused():
    def refused(match, call, kind=ValueError):
        with pytest.raises(kind, match=match):
            call()

    make = sok.DynamicVariable
    refused("`dimension` must be a positive integer", lambda: make(0))
    refused("`initializer` must be one of", lambda: make(2, "thirteen"))
    refused("`var_type` must be", lambda: make(2, var_type="disk"))
    refused("`key_type` must be one of int64, int32", lambda: make(2, key_type=tf.float32))
    refused("`dtype` must be one of float32", lambda: make(2, dtype=tf.float16))
    refused("`constraint` must be None", lambda: make(2, constraint=abs))
    refused("must be those of HierarchicalKV", lambda: make(2, init_capcity=3))
    refused("`init_capacity` must be at most", lambda: make(2, init_capacity=3, max_capacity=2))
    refused("`evict_strategy` must be", lambda: make(2, evict_strategy="kEpoch"))
    refused("`mode` must be", lambda: make(2, mode="localized"))
    refused("`mode` must name one of the 1 ranks", lambda: make(2, mode="localized:5"))
    refused("`init_capacity` must be an integer of at least 0", lambda: make(2, init_capacity=-1))
    refused("`init_capacity` must be an integer of at least 0", lambda: make(2, init_capacity="x"))
    refused("`max_capacity` must be an integer of at least 1", lambda: make(2, max_capacity=1.5))
    v, ids = variable(), tf.ragged.constant([[1], [2, 3]], dtype=tf.int64)
    refused("`params` must be", lambda: sok.lookup_sparse(tf.Variable([[1.0]]), ids), TypeError)
    refused("`sp_ids` must be sparse or ragged", lambda: sok.lookup_sparse(v, tf.constant([[1]])), TypeError)
    refused("`sp_weights` must be sparse or", lambda: sok.lookup_sparse(v, ids, tf.ones((2, 2))), TypeError)
    refused("`sp_ids` must be a list as long as `params`, 2", lambda: sok.lookup_sparse([v, v], [ids]))
    refused("`combiners` must be a list as long", lambda: sok.lookup_sparse([v], [ids], combiners=["sum"] * 2))
    refused("`combiners` must be of", lambda: sok.lookup_sparse(v, ids, combiners="max"))
    refused("must be int64. Received: ids of dtype", lambda: v.sparse_read(tf.constant([1.5])))
    optimizer = sok.OptimizerWrapper("sgd")
    refused("must be `tf.IndexedSlices`", lambda: optimizer.apply_gradients([(tf.ones((1, DIM)), v)]), TypeError)
    refused("`var` must be", lambda: sok.export(tf.Variable(1.0)), TypeError)
    assert v.size.numpy().tolist() == [0, DIM]


def test_rows_that_have_changed_since_a_time_are_copied():
    now = functools.partial(datetime.datetime.now, datetime.timezone.utc)
    v, w = variable(some_rows()), variable(some_rows(1))
    start = now()
    keys, rows = sok.incremental_model_dump([v, w], start)
    assert [len(part) for part in keys] == [KEYS, KEYS]
    np.testing.assert_array_equal(rows[1], some_rows(1))
    middle = now()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(v, tf.constant([3, 100])))
    sok.SGD(1.0).apply_gradients(zip(tape.gradient(loss, [v]), [v], strict=True))
    sok.assign(w, [5], np.ones((1, DIM)))
    keys, rows = sok.incremental_model_dump([v, w], [middle, middle])
    assert [part.tolist() for part in keys] == [[3, 100], [5]] and (rows[1] == 1).all()
    np.testing.assert_allclose(rows[0][0], some_rows()[3] - 1, rtol=1e-6)
    # Of an earlier time, what has changed since the call before it; of one before all calls, everything.
    assert [len(part) for part in sok.incremental_model_dump([v, w], [middle, now()])[0]] == [2, 0]
    assert len(sok.incremental_model_dump([v], start)[0][0]) == KEYS + 1
    with pytest.raises(TypeError, match="time zone"):
        sok.incremental_model_dump([v], datetime.datetime.now())
    with pytest.raises(ValueError, match="a time for each of 1 variables. Received: 2"):
        sok.incremental_model_dump([v], [start, start])
    with pytest.raises(TypeError, match="DynamicVariable"):
        sok.incremental_model_dump([sok.Variable([[1.0]])], start)
