"""The native step that the benches compare with calls the core as the bridges do."""

import sys
from pathlib import Path

import numpy as np
import pytest

from reference import BACKEND

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benches"))


@pytest.mark.skipif(BACKEND != "torch", reason="the native step takes tensors of PyTorch")
def test_native_step_trains():
    from native_step import NativeStep, work

    def rows_after(way):
        step = NativeStep(2, 4, samples=8)
        step.fill([20, 30])
        step.take([[np.arange(24).reshape(8, 3), 20 + np.arange(16).reshape(8, 2)]])
        step.run(0, way)
        return [table.find(work.raw(np.arange(50)))[0] for table in step.tables], [len(table) for table in step.tables]

    (held, sizes), (merged, _), (before, known) = map(rows_after, ("held", "merged", "fwd"))
    assert sizes == [24, 30] and known == [20, 30]
    np.testing.assert_array_equal(held, merged)
    moved = [(now != then).any(axis=1).sum() for now, then in zip(held, before, strict=True)]
    assert moved == [24, 16]
