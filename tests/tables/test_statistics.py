"""How tables are, in Keras' logs."""

import csv
import importlib.util

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import BACKEND, STEPS, fit, our_embedding, small_model, table_of


def compiled():
    model = small_model(our_embedding())
    model.compile(sok.OptimizerWrapper(keras.optimizers.SGD(0.1)), "mse")
    return model


def test_history_has_what_each_epoch_did():
    model = compiled()
    statistics = sok.callbacks.TableStatistics(per_table=True)
    history = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: history.append(dict(logs)))
    fit(model, epochs=2, callbacks=[statistics, keep])
    name, stats = table_of(model).name, table_of(model).stats()
    for logs in history:
        assert logs[f"{name}/size"] == stats.size == 12
        assert logs[f"{name}/hits"] == 12 * STEPS  # each id is in each batch
        assert logs[f"{name}/refused"] == 0
        assert 0 < logs[f"{name}/occupancy"] <= 1
        assert logs[f"{name}/bytes"] > 0
    assert history[0][f"{name}/inserted"] == 12 and history[1][f"{name}/inserted"] == 0


def test_batches_have_them_without_a_wait():
    model, sizes = compiled(), []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: sizes.append(logs.get(f"{table_of(model).name}/size"))
    )
    fit(model, callbacks=[sok.callbacks.TableStatistics(update_freq=2, per_table=True), keep])
    assert [size is None for size in sizes] == [True, False] * (STEPS // 2)
    assert all(size <= 12 for size in sizes if size is not None)


def test_csv_and_tensorboard_get_them(tmp_path):
    callbacks = [sok.callbacks.TableStatistics(per_table=True), keras.callbacks.CSVLogger(tmp_path / "log.csv")]
    has_board = BACKEND == "tensorflow" and importlib.util.find_spec("tensorboard")
    if has_board:
        callbacks.append(keras.callbacks.TensorBoard(tmp_path / "board"))
    model = compiled()
    fit(model, callbacks=callbacks)
    name = table_of(model).name
    with open(tmp_path / "log.csv") as file:
        assert float(next(csv.DictReader(file))[f"{name}/size"]) == 12
    if has_board:
        written = b"".join(path.read_bytes() for path in (tmp_path / "board").rglob("*tfevents*"))
        assert f"epoch_{name}/size".encode() in written


@pytest.mark.parametrize("update_freq", ["batch", 0, 2.5])
def test_update_freq_is_an_epoch_or_a_number_of_batches(update_freq):
    with pytest.raises(ValueError, match="`update_freq` must be"):
        sok.callbacks.TableStatistics(update_freq)


def test_statistics_of_a_full_table_count_what_was_refused():
    layer = sok.DynamicEmbedding(2, max_capacity=4, check_mode="count")
    layer.get_table().find_or_insert(np.arange(7))
    assert layer.get_table().stats(wait=False).refused == 3


def test_logs_have_few_totals_by_default(tmp_path):
    model, logs = compiled(), []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, of: logs.append(dict(of)))
    fit(model, epochs=2, callbacks=[sok.callbacks.TableStatistics(), keep])
    assert set(logs[0]) == {"loss", "rows", "table_bytes", "new_rows", "refused_rows", "unknown_ids"}
    assert [(of["rows"], of["new_rows"], of["refused_rows"]) for of in logs] == [(12, 12, 0), (12, 0, 0)]
    assert logs[0]["table_bytes"] == table_of(model).stats().bytes


def test_parts_of_a_step_are_logged():
    model, logs = compiled(), []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, of: logs.append(dict(of)))
    fit(model, epochs=2, callbacks=[sok.callbacks.TableStatistics(profile=True), keep])
    assert all(of["find_ms"] > 0 and of["update_ms"] > 0 for of in logs)
    with sok.Profile(model):  # nothing measures any more
        fit(model)


def test_unknown_ids_are_counted_outside_of_training():
    model, seen = compiled(), {}
    known = np.arange(12).reshape(4, 3)
    unknown = np.array([[1, 77, 77], [3, 4, -8]])
    data = (np.concatenate([known, unknown]), np.zeros((6, *model.output_shape[1:]), "float32"))
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.setdefault("epochs", []).append(logs["unknown_ids"]),
    )
    keep.on_test_end = lambda logs=None: seen.update(test=logs["unknown_ids"])
    keep.on_predict_end = lambda logs=None: seen.update(predict=logs["unknown_ids"])
    fit(model)
    statistics = sok.callbacks.TableStatistics()
    fit(model, epochs=2, validation_data=data, callbacks=[statistics, keep])
    assert seen == {"epochs": [3, 3], "test": 3}
    model.evaluate(*data, verbose=0, callbacks=[statistics, keep])
    model.predict(np.concatenate([data[0], unknown]), verbose=0, callbacks=[statistics, keep])
    assert seen == {"epochs": [3, 3], "test": 3, "predict": 6}
    assert table_of(model).stats().unknown_ids == 3 + 3 + 3 + 6
    assert table_of(model).stats().dropped_gradients == 0


@pytest.mark.skipif(
    BACKEND != "tensorflow" or not importlib.util.find_spec("tensorboard"),
    reason="Keras' TensorBoard needs TensorFlow's",
)
def test_tensorboard_gets_each_table(tmp_path):
    model = compiled()
    fit(model, callbacks=[sok.callbacks.TableStatistics(log_dir=tmp_path)])
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*tfevents*"))
    assert f"epoch_{table_of(model).name}/hits".encode() in written


def test_summary_lists_tables():
    lines = []
    model = compiled()
    model.summary(print_fn=lines.append)
    text = "\n".join(lines)
    assert f"  {table_of(model).name}: 12 rows x 4, " in text and "Total of tables: " in text
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    plain.summary(print_fn=lambda line: lines.append(f"plain {line}"))
    assert not any(line.startswith("plain") and "ables" in line for line in lines)


def test_summary_of_static_tables_says_how_many_rows_there_may_be(capsys):
    config = sok.TableConfig("shops", 1000, 8)
    layer = sok.DistributedEmbedding(sok.FeatureConfig("f", config), name="many")
    model = keras.Sequential([keras.Input((2,), dtype="int32"), layer])
    layer.get_tables()["shops"].find_or_insert([1, 2])
    model.summary()
    assert "many/shops: 2 of 1,000 rows x 8" in capsys.readouterr().out
