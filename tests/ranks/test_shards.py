"""`sok.shard`: what each rank is given of all kinds of data."""

import itertools

import keras
import numpy as np
import pytest

import sok_keras as sok
from sok_keras import distributed

KINDS = ["arrays", "batches"]
KINDS += {"tensorflow": ["tf.data"], "torch": ["loader"]}.get(keras.backend.backend(), [])
NUM_SAMPLES = [1, 5, 8, 12, 13, 24, 25]
BATCH = 4


class Batches(keras.utils.PyDataset):
    """Batches of arrays."""

    def __init__(self, arrays, batch_size):
        super().__init__()
        self.arrays, self.batch_size = arrays, batch_size

    def __len__(self):
        return -(-len(self.arrays[1]) // self.batch_size)

    def __getitem__(self, index):
        part = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return keras.tree.map_structure(lambda array: array[part], self.arrays)


def data_of(kind, arrays):
    if kind == "arrays":
        return arrays, {"batch_size": BATCH}
    if kind == "batches":
        return Batches(arrays, BATCH), {}
    if kind == "tf.data":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH), {}
    import torch

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return len(arrays[1])

        def __getitem__(self, index):
            return keras.tree.map_structure(lambda array: array[index], arrays)

    return torch.utils.data.DataLoader(Samples(), batch_size=BATCH), {}


def batches_of(data):
    numbers = range(data.num_batches) if isinstance(data, keras.utils.PyDataset) else None
    batches = [data[number] for number in numbers] if numbers else list(data)
    return [keras.tree.map_structure(np.asarray, tuple(batch)) for batch in batches]


def shards_of(kind, arrays, world_size, monkeypatch):
    """The batches of each rank."""
    shards = []
    monkeypatch.setattr(distributed, "world_size", lambda: world_size)
    monkeypatch.setattr(distributed, "of_rank_0", lambda value: value)
    for rank in range(world_size):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        data, options = data_of(kind, arrays)
        sharded = sok.shard(data, **options)
        shards.append(batches_of(sharded))
        assert len(sharded) == len(shards[-1])
    return shards


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_samples", NUM_SAMPLES)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_get_equal_batches_and_each_sample_counts_once(kind, num_samples, world_size, monkeypatch):
    ids = np.arange(num_samples)
    arrays = ({"ids": np.stack([ids, -ids], 1)}, ids[:, None])
    shards = shards_of(kind, arrays, world_size, monkeypatch)
    assert {len(batches) for batches in shards} == {-(-num_samples // (BATCH * world_size))}
    seen = []
    for step in zip(*shards, strict=True):
        assert len({len(weights) for _, _, weights in step}) == 1
        for x, y, weights in step:
            assert weights.dtype == "float32" and set(weights) <= {0.0, 1.0} and len(weights) <= BATCH
            np.testing.assert_array_equal(x["ids"], np.concatenate([y, -y], 1))
            seen.extend(y[weights == 1, 0])
        filled = sum(int((weights == 0).sum()) for _, _, weights in step)
        assert filled < world_size
    assert sorted(seen) == ids.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_samples_are_kept(kind, monkeypatch):
    arrays = (np.arange(13), np.arange(13.0), np.arange(13, dtype="float32") + 2)
    batches = itertools.chain(*shards_of(kind, arrays, 3, monkeypatch))
    weights = {float(target): weight for _, y, w in batches for target, weight in zip(y, w, strict=True) if weight}
    assert weights == {float(target): target + 2 for target in range(13)}


def test_batches_of_arrays_are_those_of_one_rank_in_parts(monkeypatch):
    arrays = (np.arange(40), np.arange(40))
    for shards, width in zip(zip(*shards_of("arrays", arrays, 2, monkeypatch), strict=True), itertools.repeat(8)):
        y = np.concatenate([y for _, y, _ in shards])
        np.testing.assert_array_equal(y, np.arange(y[0], y[0] + width))


def test_shuffled_arrays_have_another_order_each_epoch(monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    orders = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        data = sok.shard((np.arange(32), np.arange(32)), batch_size=4, shuffle=True, seed=3)
        for _ in range(2):
            orders.append(np.concatenate([y for _, y, _ in batches_of(data)]).tolist())
            data.on_epoch_end()
    first, second = orders[0] + orders[2], orders[1] + orders[3]
    assert sorted(first) == sorted(second) == list(range(32))
    assert orders[0] != orders[1] and first != list(range(32))


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="PyTorch's own")
def test_a_shuffling_loader_draws_alike_on_all_ranks(monkeypatch):
    import torch

    samples = torch.utils.data.TensorDataset(torch.arange(20), torch.arange(20))
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "of_rank_0", lambda seed: 5)
    shards = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        torch.manual_seed(rank)
        loader = torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True, num_workers=rank)
        shards.append(sok.shard(loader))
    epochs = [[int(y) for shard in shards for _, y, w in batches_of(shard) for y, w in zip(y, w, strict=True) if w]]
    epochs += [[int(y) for shard in shards for _, y, w in batches_of(shard) for y, w in zip(y, w, strict=True) if w]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 2 and epochs[0] != epochs[1]


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="PyTorch's own")
def test_a_loader_without_length_is_refused():
    import torch

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(ValueError, match="Let an `IterableDataset` give each rank samples of its own"):
        sok.shard(torch.utils.data.DataLoader(Stream()))


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's own")
def test_a_dataset_without_an_end_and_ragged_batches(monkeypatch):
    import tensorflow as tf

    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    ragged = tf.ragged.constant([[1], [2, 3], [], [4], [5, 6, 7]])
    dataset = tf.data.Dataset.from_tensor_slices((ragged, tf.range(5))).batch(2)
    (x, y, w), (last_x, _, last_w) = sok.shard(dataset)
    assert x.to_list() == [[], [4]] and y.numpy().tolist() == [2, 3] and w.numpy().tolist() == [1, 1]
    assert last_x.to_list() == [[5, 6, 7]] and last_w.numpy().tolist() == [0]
    endless = sok.shard(dataset.repeat())
    assert len(list(endless.take(7))) == 7


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (np.arange(3), {}, "`data` must be"),
        ("data", {}, "`data` must be"),
        ((np.arange(3),), {}, "must be `\\(x, y\\)` or `\\(x, y, sample_weight\\)`"),
        ((np.arange(3), np.arange(4)), {}, "same number of samples"),
        ((np.zeros(0), np.zeros(0)), {}, "no samples"),
        ((np.arange(3), np.arange(3)), {"batch_size": 0}, "`batch_size` must be at least 1"),
        (Batches((np.arange(3), np.arange(3)), 2), {"batch_size": 2}, "are for arrays"),
    ],
)
def test_other_data_is_refused(data, options, words):
    with pytest.raises(ValueError, match=words):
        sok.shard(data, **options)
