"""The bridge of PyTorch: tensors of every kind, and where rows lie."""

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import BACKEND, ON_GPU, apply_gradients, assert_close, gradients, tensor, to_numpy
from sok_keras.backend.insertion import Insertion

if BACKEND != "torch":
    pytest.skip("tests the bridge of PyTorch alone", allow_module_level=True)

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def test_tensors_need_not_be_dense():
    def step(strided):
        of = (lambda x: x.T.contiguous().T) if strided else (lambda x: x)
        layer = sok.DynamicEmbedding(2, "uniform", combiner="sum", seed=3)
        layer.build()
        ids, weights = (
            of(tensor(np.arange(12).reshape(4, 3))),
            of(tensor(np.linspace(1, 2, 12, dtype="float32").reshape(4, 3))),
        )
        assert ids.is_contiguous() != strided and weights.is_contiguous() != strided
        upstream = of(tensor(np.arange(8, dtype="float32").reshape(4, 2)))
        loss = lambda weights: (layer(ids, weights, training=True) * upstream).sum()
        found, (of_weights,) = gradients(loss, layer.trainable_variables, [weights])
        apply_gradients(sok.OptimizerWrapper(keras.optimizers.SGD(0.1)), found, layer.trainable_variables)
        return to_numpy(of_weights), layer.get_table().find(np.arange(12))[0]

    for strided, dense in zip(step(True), step(False), strict=True):
        np.testing.assert_array_equal(strided, dense)
    parts = torch.arange(24).reshape(4, 6)
    assert sok.backend.native.are_at([parts, parts[1:2, 1:3], parts[:, 1:1], parts[:1, 2]], None)
    for part in (parts[:, :3], parts.T, parts[0, ::2], torch.arange(1).expand(4)):
        assert not sok.backend.native.are_at([parts, part], None)


def test_core_takes_tensors_of_its_own_kinds_alone():
    native, plan = sok.backend.native, interleaved()
    for kind in (torch.int32, torch.int64, torch.uint32, torch.uint64, torch.float32):
        assert native.are_at([torch.zeros(2, dtype=kind)], None)
    tensors = [torch.zeros(2, dtype=torch.int32)] * 4
    with FakeTensorMode():
        fake = torch.zeros(2, dtype=torch.int32)
    of_others = torch.zeros(2, dtype=torch.int16), torch.zeros(2, device="meta"), fake, np.zeros(2)
    told = "bfloat16 or float32. Received: torch.int16", "PyTorch", "memory of its own", "PyTorch"
    for wrong, what in zip(of_others, told, strict=True):
        with pytest.raises(TypeError, match=what):
            native.pieces_of_rows(plan.handle, [*tensors[:3], wrong])
    assert not any(native.are_at([wrong], None) for wrong in of_others[1:])
    number, rows = torch.zeros(2, dtype=torch.int32), [torch.zeros(2, dim) for dim in (2, 3, 2, 3)]
    native.lookup(plan.handle, False, False, tensors, number, rows, None)
    with pytest.raises(ValueError, match="dense, on Cpu. Received: one on Cpu, not dense"):
        native.lookup(
            plan.handle, False, False, [*tensors[:3], torch.zeros(4, dtype=torch.int32)[::2]], number, rows, None
        )


def interleaved():
    """A plan of four features, in turn of a table of dim 2 and one of dim 3, both on the host."""
    tables = [sok.TableConfig("narrow", None, 2, storage="host"), sok.TableConfig("wide", None, 3, storage="host")]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(f"f{f}", tables[f % 2]) for f in range(4)])
    layer.build()
    return layer._core.plan(tuple((f"f{f}", f % 2, False, "each", False, False, "sum", None) for f in range(4)))


def test_rows_of_a_width_lie_in_one_piece():
    pieces = lambda *shapes: sok.backend.native.pieces_of_rows(
        interleaved().handle, [torch.zeros(shape, dtype=torch.int32) for shape in shapes]
    )
    assert pieces((4,), (5,), (0,), (6,)) == [([4, 2], [4, 0], [0, 2]), ([11, 3], [5, 6], [1, 3])]
    # Of other ranks each has its own.
    assert pieces((), (5, 1), (7,), (6,)) == [
        ([2], [2], [0]),
        ([5, 1, 3], [5], [1]),
        ([7, 2], [7], [2]),
        ([6, 3], [6], [3]),
    ]


def test_rows_of_several_widths():
    tables = [
        sok.TableConfig("narrow", None, 2, initializer="uniform"),
        sok.TableConfig("wide", None, 3, initializer="uniform"),
    ]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(f"f{f}", tables[f % 2]) for f in range(5)])
    ids = [np.arange(4), np.arange(5), np.zeros(0, "int64"), np.arange(6), np.arange(3)]
    for rows, of_feature, table in zip(
        layer(ids, training=True), ids, [*layer.get_tables().values()] * 3, strict=False
    ):
        np.testing.assert_array_equal(to_numpy(rows), table.find(of_feature)[0])


def test_number_of_a_lookup_is_on_the_host_whatever_the_default_device():
    layer = sok.DynamicEmbedding(4)
    ids = tensor(np.arange(3))
    layer.build()
    with torch.device("meta"):
        rows = sok.backend.lookup(
            layer._core.plan((("f", 0, False, "each", False, False, "sum", None),)),
            layer.trigger.value,
            True,
            [(ids,)],
            [None],
            True,
        )
    np.testing.assert_array_equal(to_numpy(rows[0]), layer.get_table().find(np.arange(3))[0])


@pytest.mark.parametrize(
    "storage", [pytest.param("hbm", marks=pytest.mark.skipif(not ON_GPU, reason="needs a GPU")), "host"]
)
def test_a_whole_step_compiles_to_one_graph(storage):
    device, compiler = ("cuda", "inductor") if ON_GPU else ("cpu", "aot_eager")
    layer = sok.DynamicEmbedding(4, seed=2, storage=storage)
    layer.build()
    ids = torch.arange(12, device=device).reshape(4, 3)
    plan = layer._core.plan((("ids", 0, False, "each", False, False, "sum", None),))
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.5))
    optimizer.build(layer.trainable_variables)
    tables, trigger = optimizer._tables, layer.trigger.value

    def update(ticket, trigger):
        norm = sok.backend.commit(tables, torch.ones(1, device=device), [ticket])
        scalars = torch.tensor([0.5, 1.0, 1.0, 1.0], device=device)
        return sok.backend.apply(tables, scalars, norm, [trigger])[0]

    forward = torch.compile(
        lambda ids, trigger: sok.backend.lookup(plan, trigger, True, [(ids,)], [None], Insertion.AT_LOOKUP)[0],
        fullgraph=True,
        backend=compiler,
    )
    apply = torch.compile(update, fullgraph=True, backend=compiler)
    before = layer.get_table().find_or_insert(np.arange(12))[0]
    rows = forward(ids, trigger)
    (ticket,) = torch.autograd.grad((rows * 2.0).sum(), [trigger])
    assert_close(to_numpy(rows.reshape(12, 4)), before)
    new = apply(ticket, trigger.detach())
    assert float(new.detach()[0, 0]) == float(trigger.detach()[0, 0]) + 1
    assert_close(layer.get_table().find(np.arange(12))[0], before - 1.0)
