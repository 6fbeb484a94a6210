"""Whatever is wrong is told by a clear error, and nothing has changed by then."""

import re

import keras
import numpy as np
import pytest
from keras import ops

import sok_keras as sok
from reference import BACKEND, ON_GPU, apply_gradients, gradients, raises, to_numpy

DIM = 4
ROWS = np.arange(12, dtype="float32").reshape(3, DIM)
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow has this behavior")
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="only JAX has this behavior")


def dynamic(**options):
    layer = sok.DynamicEmbedding(DIM, **options)
    layer.get_table().assign([0, 1, 2], ROWS)
    layer.build()
    return layer


def distributed(vocabulary_size=None, **options):
    layer = sok.DistributedEmbedding(
        {"f": sok.FeatureConfig("f", sok.TableConfig("t", vocabulary_size, DIM, **options))}
    )
    layer.get_tables()["t"].assign([0, 1, 2], ROWS)
    layer.build()
    return layer


def table_of(layer):
    return layer.get_table() if isinstance(layer, sok.DynamicEmbedding) else layer.get_tables()["t"]


def assert_untouched(layer):
    contents = table_of(layer).export()
    assert contents.keys.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(contents.rows, ROWS)
    assert table_of(layer).stats().pending_pushes == 0


def ids(*values, dtype="int32"):
    return np.array(values, dtype)


# ---- arguments of layers and configs


@pytest.mark.parametrize("dim", [0, -4, 4.0, "4", None])
def test_dim_must_be_a_positive_integer(dim):
    message = f"must be a positive integer. Received: {{}}={dim!r}"
    with pytest.raises(ValueError, match="`output_dim` " + message.format("output_dim")):
        sok.DynamicEmbedding(dim)
    with pytest.raises(ValueError, match="`embedding_dim` " + message.format("embedding_dim")):
        sok.DistributedEmbedding(sok.FeatureConfig("f", sok.TableConfig("t", None, dim)))


CHOICES = {
    "combiner": '"mean", "sum", "sqrtn"',
    "placement": '"auto", "default_device", "distributed", "replicated", or "localized:r" with the number of a rank',
    "missing": '"initial", "zeros"',
    "out_of_vocabulary": '"raise", "zeros"',
    "check_mode": '"raise", "warn", "count"',
    "storage": '"auto", "hbm", "host"',
}


@pytest.mark.parametrize("argument", CHOICES)
def test_unknown_choice_lists_the_known_ones(argument):
    message = f"`{argument}` must be one of {CHOICES[argument]}. Received: {argument}='other'"
    with pytest.raises(ValueError, match=message):
        sok.TableConfig("t", None, DIM, **{argument: "other"})
    if argument != "out_of_vocabulary":
        with pytest.raises(ValueError, match=message):
            sok.DynamicEmbedding(DIM, **{argument: "other"})


SIZES = {
    "vocabulary_size": "must be None or a positive integer of at most 64 bits",
    "max_capacity": "must be None or a positive integer of at most 64 bits",
    "initial_capacity": "must be an integer from 0 on of at most 64 bits",
    "seed": "must be an integer or None",  # a negative one counts modulo 2^64
}


@pytest.mark.parametrize("value", [-1, 1.5, "3", True, 2**70])
@pytest.mark.parametrize("argument", SIZES)
def test_sizes_and_seeds_must_be_integers(argument, value):
    if argument == "seed" and value in (-1, True, 2**70):
        value = np.float32(1)
    config = sok.TableConfig("t", **{"vocabulary_size": None, "embedding_dim": DIM, argument: value})
    with pytest.raises(ValueError, match=f"`{argument}` {SIZES[argument]}. Received: {argument}=.*{value!s}"):
        sok.DistributedEmbedding(sok.FeatureConfig("f", config))


@pytest.mark.parametrize("key", [2**64, -(2**63) - 1])
def test_padding_key_must_fit_into_64_bits(key):
    with pytest.raises(ValueError, match="`padding_key` must be a 64-bit integer"):
        sok.DynamicEmbedding(DIM, padding_key=key)(ids(1))


@pytest.mark.parametrize("given", [None, 3, [], {}, {"a": 3}, [sok.TableConfig("t", None, DIM)]])
def test_features_must_be_nested_feature_configs(given):
    with pytest.raises(ValueError, match="`feature_configs` must"):
        sok.DistributedEmbedding(given)


def test_table_of_a_feature_must_be_a_config():
    with pytest.raises(ValueError, match=r"`table` must be a `TableConfig`. Received: table='t' \(feature 'f'\)"):
        sok.FeatureConfig("f", "t")


# ---- ids


@pytest.mark.parametrize("make", [dynamic, lambda: distributed()], ids=["dynamic", "distributed"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bool"])
def test_ids_that_are_no_integers_are_refused(make, dtype):
    layer = make()
    given = np.array([1, 0], dtype)
    with pytest.raises(
        ValueError,
        match=rf"Ids must be integers; put `keras.Input\(shape, dtype=\"int64\"\)`.*dtype {dtype} \(feature '",
    ):
        layer(given if isinstance(layer, sok.DynamicEmbedding) else {"f": given}, training=True)
    assert_untouched(layer)


def test_sequential_model_without_an_input_names_the_remedy():
    """Keras' default dtype is float32, by which ids above 2^24 are rounded."""
    model = keras.Sequential([dynamic(), keras.layers.Dense(1)])
    model.compile(sok.OptimizerWrapper("sgd"), "mse")
    with pytest.raises(ValueError, match=r'keras.Input\(shape, dtype="int64"\)'):
        model.fit(np.zeros((4, 3), "float32"), np.zeros((4, 1)), verbose=0)
    assert_untouched(model.layers[0])


def test_symbolic_float_input_is_refused_when_the_model_is_built():
    with pytest.raises(ValueError, match="dtype float32"):
        dynamic()(keras.Input((3,)))


@on_jax
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_ids_that_jax_would_cut_are_refused(dtype):
    layer = dynamic()
    message = rf"JAX cuts {dtype} ids to 32 bits. Set `JAX_ENABLE_X64=1`.*layer.preprocess\(ids\).*dtype {dtype}"
    with pytest.raises(ValueError, match=message):
        layer(ids(1, dtype=dtype))
    if dtype != "uint64":
        with pytest.raises(ValueError, match=message):
            layer(keras.Input((3,), dtype=dtype))
    assert_untouched(layer)


@on_tensorflow
@pytest.mark.parametrize(
    ("splits", "message"),
    [([0, 2, 4], "an end at 4 for 3 ids"), ([0, 2, 1, 3], "1 after 2 at row 2"), ([1, 2, 3], "Received: .*start")],
    ids=["past_the_end", "descending", "late_start"],
)
def test_ragged_rows_that_do_not_add_up_are_refused_by_the_core(splits, message):
    import tensorflow as tf

    layer = dynamic(combiner="sum")
    ragged = tf.RaggedTensor.from_row_splits(ids(7, 8, 9, dtype="int64"), np.array(splits, "int64"), validate=False)
    with raises(ValueError, f"row_splits.*({message})", layer.get_table()):
        layer(ragged, training=True)
    assert_untouched(layer)


def test_preprocess_refuses_weights_of_other_lengths():
    with pytest.raises(ValueError, match="`weights` must have as many numbers in each row as `inputs` has ids"):
        dynamic().preprocess([[1, 2], [3]], [[1.0], [1.0, 2.0]])


@pytest.mark.parametrize("shape", [(2,), (2, 2), (3, 3), (3, 2)])
def test_weights_of_another_shape_are_refused(shape):
    layer = dynamic(combiner="sum")
    with pytest.raises(
        ValueError, match=r"`weights` must be shaped as the ids are\. Received: .* ids of shape \(2, 3\)"
    ):
        layer(np.full((2, 3), 7, "int32"), np.ones(shape, "float32"), training=True)
    assert_untouched(layer)


@on_tensorflow
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("make", [dynamic, lambda **options: distributed(**options)], ids=["dynamic", "distributed"])
@pytest.mark.parametrize("form", ["other_lengths", "fewer_rows", "other_places", "more_places"])
def test_weights_in_other_places_than_the_ids_are_refused(form, make, in_graph):
    """As many weights as ids in all, where they can be: each would go with the id of another bag."""
    import tensorflow as tf

    sparse = tf.sparse.from_dense(ids([7, 8, 0], [0, 0, 9]))
    ragged = tf.ragged.constant([[7, 8], [9]], dtype="int64")
    given, weights = {
        "other_lengths": (ragged, tf.ragged.constant([[1.0], [10.0, 100.0]])),
        "fewer_rows": (ragged, tf.ragged.constant([[1.0, 10.0, 100.0]])),
        "other_places": (sparse, tf.sparse.from_dense([[1.0, 0.0, 0.0], [0.0, 10.0, 100.0]])),
        "more_places": (sparse, tf.sparse.from_dense([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])),
    }[form]
    layer = make(combiner="sum")
    call = lambda *tensors: layer(*(t if make is dynamic else {"f": t} for t in tensors), training=True)
    specs = [getattr(tf, f"{type(t).__name__}Spec")([None, None], t.dtype) for t in (given, weights)]
    told = "`weights` must be shaped as the ids are.*Received: "
    refused = raises(ValueError, told) if in_graph else pytest.raises(ValueError, match=told)
    with refused:
        (tf.function(call, input_signature=specs) if in_graph else call)(given, weights)
    assert_untouched(layer)


@on_tensorflow
def test_weights_of_another_kind_than_the_ids_are_refused():
    import tensorflow as tf

    layer = dynamic(combiner="sum")
    with pytest.raises(
        ValueError, match=r"Received: dense weights of shape \(2, 2\) for ragged ids of shape \(2, None\)"
    ):
        layer(tf.ragged.constant([[7, 8], [9]]), np.ones((2, 2), "float32"), training=True)
    assert_untouched(layer)


@on_tensorflow
def test_dense_weights_of_another_shape_are_refused_when_a_function_runs():
    import tensorflow as tf

    layer = dynamic(combiner="sum")
    specs = [tf.TensorSpec([None, None], dtype) for dtype in ("int32", "float32")]
    call = tf.function(lambda *given: layer(*given, training=True), input_signature=specs)
    with raises(ValueError, r"`weights` must be shaped as the ids are.*ids of shape \(None, None\)"):
        call(np.full((2, 3), 7, "int32"), np.ones((3, 2), "float32"))
    assert_untouched(layer)


def test_weights_must_be_floats():
    layer = dynamic(combiner="sum")
    with pytest.raises(ValueError, match=r"`weights` must be floats. Received: weights of dtype.*int32"):
        layer(np.full((2, 3), 7, "int32"), np.ones((2, 3), "int32"), training=True)
    assert_untouched(layer)


NESTED = {
    "list_for_dict": ([ids(1)], r"here a dict. Received: list"),
    "array_for_dict": (ids(1), "here a dict. Received: ndarray"),
    "other_names": ({"g": ids(1)}, r"\['f'\]. Received: \['g'\]"),
    "too_many": ({"f": ids(1), "g": ids(1)}, r"\['f'\]. Received: \['f', 'g'\]"),
}


@pytest.mark.parametrize("name", NESTED)
def test_inputs_must_be_nested_as_the_features(name):
    given, message = NESTED[name]
    layer = distributed()
    with pytest.raises(ValueError, match=f"Ids, weights and scores must be nested as `feature_configs` is.*{message}"):
        layer(given, training=True)
    assert_untouched(layer)


def test_inputs_of_another_shape_than_stated_are_refused():
    table = sok.TableConfig("t", None, DIM)
    layer = sok.DistributedEmbedding(sok.FeatureConfig("f", table, input_shape=(8, 3)))
    layer(np.zeros((2, 3), "int32"))  # another batch size passes
    with pytest.raises(ValueError, match=r"`input_shape` of feature 'f' is \(8, 3\). Received: shape \(2, 4\)"):
        layer(np.zeros((2, 4), "int32"))


# ---- static tables


@pytest.mark.parametrize("key", [-1, 3, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("training", [True, False])
def test_ids_outside_a_static_table_are_refused(key, training):
    layer = distributed(3, combiner="sum")
    feature = "" if ON_GPU else " of feature `f`"  # a GPU finds it after the call
    message = f"id {key}{feature} is outside table `.*/t`, whose ids are 0 to 2"
    with raises(ValueError, message, table_of(layer)):
        layer({"f": ids([1, key])}, training=training)
    assert_untouched(layer)


@pytest.mark.parametrize("key", [-1, 3])
def test_ids_outside_a_static_table_are_zeros_where_asked(key):
    layer = distributed(3, combiner="sum", out_of_vocabulary="zeros")
    rows = to_numpy(layer({"f": ids([1, key], [key, key])}, training=True)["f"])
    np.testing.assert_array_equal(rows, [ROWS[1], np.zeros(DIM)])
    assert_untouched(layer)


@pytest.mark.parametrize("keys", [[-1], [3], [0, 2**63]])
def test_table_of_a_vocabulary_takes_no_other_keys(keys):
    layer = distributed(3)
    with pytest.raises(ValueError, match=r"outside|below|vocabulary"):
        table_of(layer).assign(np.array(keys, "uint64" if keys[-1] > 2**62 else "int64"), np.zeros((len(keys), DIM)))
    with pytest.raises(ValueError, match=r"outside|below|vocabulary"):
        table_of(layer).find_or_insert(np.array(keys, "uint64" if keys[-1] > 2**62 else "int64"))
    assert_untouched(layer)


# ---- a full table


@pytest.mark.parametrize("call", ["lookup", "find_or_insert", "assign"])
def test_batch_that_does_not_fit_changes_nothing(call):
    layer = dynamic(max_capacity=4)
    table, message = (
        layer.get_table(),
        "is full: no room for 1 of the new keys, it holds 3 of at most 4 rows. Raise `max_capacity`",
    )
    if call == "lookup":
        with raises(sok.TableFullError, message, table):
            layer(ids(7, 1, 8), training=True)
    else:
        arguments = [[7, 1, 8]] if call == "find_or_insert" else [[7, 1, 8], np.full((3, DIM), 9.0)]
        with pytest.raises(sok.TableFullError, match=message):
            getattr(table, call)(*arguments)
    assert_untouched(layer)


# ---- tables by hand


@pytest.mark.parametrize("method", ["find", "find_or_insert", "erase"])
def test_keys_must_be_integers(method):
    layer = dynamic()
    with pytest.raises(TypeError, match=r"Keys must be integers of at most 64 bits. Received: keys of dtype float64"):
        getattr(layer.get_table(), method)([1.5])
    assert_untouched(layer)


def test_assigned_rows_must_be_one_a_key():
    layer = dynamic()
    with pytest.raises(ValueError, match=r"`rows` must hold one row a key. Received: 1 rows for 2 keys"):
        layer.get_table().assign([0, 1], np.zeros((1, DIM)))
    assert_untouched(layer)


def test_assigned_rows_must_be_of_the_dim():
    layer = dynamic()
    with pytest.raises(ValueError, match=r"`rows` must be 4 wide. Received: rows of shape \(4, 2\)"):
        layer.get_table().assign([0, 1], np.zeros((DIM, 2)))
    assert_untouched(layer)


GIVEN_TABLES = {
    "float_keys": (
        ([7.5], ROWS[:1]),
        TypeError,
        "Keys must be integers of at most 64 bits. Received: keys of dtype float64",
    ),
    "too_many": ((np.arange(5), np.ones((5, DIM))), sok.TableFullError, "5 keys for at most 4 rows"),
    "other_dim": (([7], ROWS[:1, :2]), ValueError, r"shape \(1, 4\). Received: shape \(1, 2\)"),
    "fewer_rows": (([7, 8], ROWS[:1]), ValueError, r"shape \(2, 4\). Received: shape \(1, 4\)"),
    "matrix": (ROWS, ValueError, r"takes `\(keys, rows\)`. Received: ndarray"),
}


@pytest.mark.parametrize("name", GIVEN_TABLES)
@pytest.mark.parametrize("make", [dynamic, lambda **options: distributed(**options)], ids=["dynamic", "distributed"])
def test_set_embedding_tables_checks_before_it_changes_anything(make, name):
    given, error, message = GIVEN_TABLES[name]
    layer = make(max_capacity=4)
    with pytest.raises(error, match=message):
        layer.set_embedding_tables({layer.name if make is dynamic else "t": given})
    assert_untouched(layer)


def test_set_embedding_tables_checks_all_tables_first():
    configs = [sok.TableConfig(name, None, DIM, max_capacity=4) for name in "ab"]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(config.name, config) for config in configs])
    layer.set_embedding_tables({name: ([0, 1, 2], ROWS) for name in "ab"})
    with pytest.raises(sok.TableFullError) as caught:
        layer.set_embedding_tables({"a": ([7], ROWS[:1]), "b": (np.arange(6), np.ones((6, DIM)))})
    assert (caught.value.refused, caught.value.capacity) == (2, 4)
    assert [len(table) for table in layer.get_tables().values()] == [3, 3]


def test_set_embedding_tables_counts_equal_keys_once():
    layer = dynamic(max_capacity=4)
    layer.set_embedding_tables({layer.name: ([7, 8, 7, 8, 9, 9], np.repeat(ROWS, 2, 0))})
    assert layer.get_table().export().keys.tolist() == [7, 8, 9]


def test_a_new_array_of_rows_may_hold_anything_but_is_as_given():
    table = dynamic().get_table()
    table.assign([0], [[np.nan, np.inf, -np.inf, 0.0]])
    assert np.isnan(table.find([0])[0][0, 0])


# ---- weights files


def saved(layer):
    """What Keras keeps of a layer in a weights file."""
    layer.build()
    store = {}
    layer.save_own_variables(store)
    return store


def with_tables(names, **options):
    configs = [sok.TableConfig(name, options.pop("vocabulary_size", None), DIM, **options) for name in names]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(config.name, config) for config in configs])
    layer.build()
    return layer


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["t", "u"], "which are 2: '.*/t', '.*/u'. Received: 1 tables"),
        (["t"], "which are 1: '.*/t'. Received: 2 tables"),
    ],
    ids=["fewer", "more"],
)
def test_file_with_another_number_of_tables_is_refused(names, message):
    layer, store = with_tables(names), saved(with_tables("tu"[: 3 - len(names)]))
    layer.get_tables()["t"].assign([0, 1, 2], ROWS)
    with pytest.raises(ValueError, match=f"The file must have the layer's tables, {message}"):
        layer.load_own_variables(store)
    assert_untouched(layer)


def test_file_with_rows_of_another_dim_is_refused():
    layer, other = dynamic(), sok.DynamicEmbedding(DIM + 1)
    other.get_table().find_or_insert([7])
    with pytest.raises(ValueError, match=f"must be {DIM} wide. Received: {DIM + 1} in the file"):
        layer.load_own_variables(saved(other))
    assert_untouched(layer)


def test_file_with_keys_outside_the_vocabulary_is_refused():
    layer, other = distributed(3), distributed(9)
    table_of(other).assign([8], ROWS[:1])
    with pytest.raises(ValueError, match="must be below `vocabulary_size` 3. Received: 8 in the file"):
        layer.load_own_variables(saved(other))
    assert_untouched(layer)


@pytest.mark.parametrize("check_mode", ["raise", "count"])
def test_file_with_more_rows_than_fit_is_refused(check_mode, tmp_path):
    layer, other = dynamic(max_capacity=4, check_mode=check_mode), dynamic()
    other.get_table().assign(np.arange(6), np.ones((6, DIM)))
    inputs = keras.Input((2,), dtype="int32")
    keras.Model(inputs, other(inputs)).save_weights(tmp_path / "x.weights.h5")
    with pytest.raises(ValueError, match=r"`max_capacity` of table .* file's rows, 6. Received: max_capacity=4"):
        keras.Model(inputs, layer(inputs)).load_weights(tmp_path / "x.weights.h5")
    assert_untouched(layer)


def test_file_brings_its_rows_after_weights_of_other_tables_were_set():
    layer, other = dynamic(), dynamic()
    other.get_table().assign([7], ROWS[:1])
    layer.set_weights(other.get_weights())
    layer.load_own_variables(saved(other))
    assert layer.get_table().export().keys.tolist() == [0, 1, 2, 7]


# ---- optimizers


def pushed(layer):
    """Gradients of a backward pass on ids that are there."""

    def loss():
        given = ids(0, 1, 2)
        if isinstance(layer, sok.DynamicEmbedding):
            return ops.sum(layer(given, training=True))
        return ops.sum(layer({"f": given}, training=True)["f"])

    return gradients(loss, layer.trainable_variables)[0]


@pytest.mark.parametrize("name", [True, None, 7, b"t"])
def test_names_must_be_strings(name):
    table = sok.TableConfig("t", None, 2)
    for make in (lambda: sok.TableConfig(name, None, 2), lambda: sok.FeatureConfig(name, table)):
        with pytest.raises(ValueError, match="`name` must be a string. Received: name="):
            make()


def test_ids_that_are_no_array_are_refused_with_what_came():
    layer = sok.DynamicEmbedding(2)
    layer.build(None)
    text = [] if BACKEND == "tensorflow" else [["", b"\x80"]]
    for ids in ([1, "a"], [[1, 2], [3]], *text):
        with pytest.raises((ValueError, TypeError), match=r"(?i)received|ids|sequence|inhomogeneous"):
            layer(ids)


@pytest.mark.parametrize(
    "make", [lambda: sok.OptimizerWrapper("adam"), lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())]
)
def test_wrapped_optimizer_is_refused(make):
    with pytest.raises(
        ValueError, match=r"`inner_optimizer` must be a plain optimizer.*goes around the wrapper.*Received: "
    ):
        sok.OptimizerWrapper(make())


def test_unknown_update_mode_is_refused():
    with pytest.raises(ValueError, match='"global" or "lazy_global". Received: update_mode=\'dense\''):
        sok.OptimizerWrapper("adam", update_mode="dense")


@pytest.mark.parametrize("make", [dynamic, lambda: distributed()], ids=["dynamic", "distributed"])
def test_second_push_without_a_wrapped_optimizer_is_refused(make):
    """The first may belong to a wrapper that is built after it."""
    layer = make()
    pushed(layer)
    told = r"no optimizer has updated them.*Compile with `sok_keras.OptimizerWrapper\(optimizer\)`"
    with raises(sok.UnwrappedOptimizerError, told, table_of(layer)):
        for gradient in pushed(layer):
            to_numpy(gradient)
    np.testing.assert_array_equal(table_of(layer).export().rows, ROWS)


def test_two_optimizers_with_states_may_not_alternate_on_a_table():
    layer = dynamic()
    first, second = (sok.OptimizerWrapper(keras.optimizers.Adam(0.1)) for _ in range(2))
    for optimizer in (first, second):
        apply_gradients(optimizer, pushed(layer), layer.trainable_variables)
    before = layer.get_table().export(states=True)
    with raises(sok.SokError, "bound to another optimizer", layer.get_table()):
        apply_gradients(first, pushed(layer), layer.trainable_variables)
    after = layer.get_table().export(states=True)
    for now, then in zip([after.rows, *after.states.values()], [before.rows, *before.states.values()], strict=True):
        np.testing.assert_array_equal(now, then)


def test_no_gradients_at_all_are_refused():
    layer = dynamic()
    with pytest.raises(ValueError, match=r"No gradients provided for any variable. Received: variables"):
        apply_gradients(sok.OptimizerWrapper("sgd"), [None], layer.trainable_variables)
    assert_untouched(layer)


def test_unknown_variable_is_refused():
    layer, other = dynamic(), dynamic()
    optimizer = sok.OptimizerWrapper("sgd")
    optimizer.build(layer.trainable_variables)
    with pytest.raises(ValueError, match="trigger"):
        apply_gradients(optimizer, pushed(other), other.trainable_variables)
    assert_untouched(layer)
    np.testing.assert_array_equal(other.get_table().export().rows, ROWS)


@on_tensorflow
def test_gradient_of_a_function_that_was_traced_without_a_tape_says_what_to_do():
    """Evaluated first, then differentiated: TensorFlow traces once for both."""
    import tensorflow as tf

    layer = dynamic()
    function = tf.function(lambda given: layer(given))
    function(ids(0, 1, 2))
    with tf.GradientTape() as tape:
        rows = function(ids(0, 1, 2))
    told = "a gradient is asked of a lookup that kept nothing.*`training=True`, or open the `tf.GradientTape` inside the function"
    with raises(sok.TicketError, told, layer.get_table()):
        tape.gradient(rows, layer.trigger.value)
    assert_untouched(layer)


def test_positional_arguments_of_keras_embedding_are_refused_with_the_new_call():
    with pytest.raises(ValueError, match=r"use `DynamicEmbedding\(16\)`. Received: DynamicEmbedding\(10000, 16\)"):
        sok.DynamicEmbedding(10_000, 16)


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("input_dim", 100, "Leave it out"),
        ("input_length", 3, "Leave it out"),
        ("embeddings_regularizer", "l2", "weight decay"),
        ("embeddings_constraint", "unit_norm", "UnitNormalization"),
        ("weights", [np.zeros((2, 2))], "set_embedding_tables"),
        ("lora_rank", 2, "trainable = False"),
    ],
)
def test_arguments_of_keras_embedding_are_refused_in_words(argument, value, says):
    with pytest.raises(ValueError, match=f"has no `{argument}`.*{says}.*Received: {argument}="):
        sok.DynamicEmbedding(output_dim=2, **{argument: value})


def test_capacities_are_blamed_by_their_own_names():
    with pytest.raises(
        ValueError, match=r"`initial_capacity` must not be above.*initial_capacity=20, max_capacity=10$"
    ):
        dynamic(initial_capacity=20, max_capacity=10)
    with pytest.raises(ValueError, match=r"`initial_capacity` must be at most \d+. Received: \d+$"):
        dynamic(initial_capacity=2**40)


@on_tensorflow
@pytest.mark.parametrize(("way", "cause"), [("fit", "outside"), ("fit", "full"), ("predict", "outside")])
def test_errors_stand_at_the_end_of_what_tensorflow_prints(way, cause):
    import tensorflow as tf

    tables = [
        sok.TableConfig("t", 5, DIM, combiner="sum")
        if cause == "outside"
        else sok.TableConfig("t", None, DIM, combiner="sum", max_capacity=1)
        for _ in range(3)
    ]
    inputs = [keras.Input((2,), dtype="int64") for _ in tables]
    rows = [
        sok.DistributedEmbedding(sok.FeatureConfig("f", table))(ids) for table, ids in zip(tables, inputs, strict=True)
    ]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))
    model.compile(sok.OptimizerWrapper("sgd"), "mse")
    data = [np.array([[1, 9]])] * 3
    with pytest.raises(tf.errors.OpError) as caught:
        model.fit(data, np.zeros((1, 1)), verbose=0) if way == "fit" else model.predict(data, verbose=0)
    *_, text, location = str(caught.value).rstrip().splitlines()
    assert re.match("ValueError: id 9" if cause == "outside" else "TableFullError: table `.*t` is full", text)
    assert location.lstrip().startswith("[[{{node")
