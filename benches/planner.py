"""The planner's predictions beside steps that were measured on GPUs (`benches/results/gpu.md`, `ranks_gpu.md`), as a table.

python benches/planner.py
"""

import dataclasses

import sok_keras as sok
from sok_keras.planner import H100, H200, Hardware, ParameterConstraints, ShardingPlanner, Topology

_DCN = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]


@dataclasses.dataclass(frozen=True)
class Step:
    """A measured step: its tables, and its milliseconds."""

    name: str
    milliseconds: float
    hotness: list[int]
    batch_size: int
    dim: int
    rows: int
    combiner: str | None = None
    skew: float = 1.05
    optimizer: str = "adam"
    hardware: Hardware = H200
    ranks: int = 1
    is_localized: bool = False

    def placement(self, table: int) -> str:
        if not self.is_localized:
            return "distributed"
        loads = [0] * self.ranks
        for other in sorted(range(len(self.hotness)), key=lambda other: -self.hotness[other]):
            rank = loads.index(min(loads))
            if other == table:
                return f"localized:{rank}"
            loads[rank] += self.hotness[other]
        raise IndexError(table)

    def predicted(self) -> float:
        """Returns the milliseconds of the plan that has the same placements."""
        tables = [
            sok.TableConfig(f"t{i}", None, self.dim, combiner=self.combiner, max_capacity=self.rows, storage="hbm")
            for i in range(len(self.hotness))
        ]
        constraints = {
            f"t{i}": ParameterConstraints(hotness=hotness, skew=self.skew, placements=[self.placement(i)])
            for i, hotness in enumerate(self.hotness)
        }
        optimizer = sok.optimizers.RowWiseAdagrad() if self.optimizer == "row-wise adagrad" else self.optimizer
        planner = ShardingPlanner(Topology(self.ranks, self.hardware), self.batch_size, constraints, optimizer)
        return 1e3 * planner.plan(tables).step_time()


_ONE_HOT = [1] * 26
_MILLION = 1_000_000
STEPS = [
    Step("26 x 65,536, dim 64, Zipf", 0.670, _ONE_HOT, 65_536, 64, _MILLION),
    Step("26 x 65,536, dim 64, uniform", 1.137, _ONE_HOT, 65_536, 64, _MILLION, skew=0.0),
    Step("26 x 16,384, dim 64, Zipf", 0.234, _ONE_HOT, 16_384, 64, _MILLION),
    Step("8 x 20 ids x 16,384, dim 64, sum, Zipf", 0.730, [20] * 8, 16_384, 64, 4 * _MILLION, "sum"),
    Step("10 x 104,857, dim 128, Zipf", 0.726, [1] * 10, 104_857, 128, 1_680_000),
    Step(
        "DCNv2: 214 ids x 6,912, dim 128, row-wise Adagrad",
        0.843,
        _DCN,
        6_912,
        128,
        _MILLION,
        "sum",
        optimizer="row-wise adagrad",
    ),
    Step("26 x 65,536, dim 64, Zipf", 0.834, _ONE_HOT, 65_536, 64, _MILLION, hardware=H100),
    Step("26 x 16,384, dim 64, Zipf", 0.285, _ONE_HOT, 16_384, 64, _MILLION, hardware=H100),
    Step("26 x 65,536, dim 64, Zipf", 1.240, _ONE_HOT, 65_536, 64, _MILLION, ranks=2),
    Step("26 x 16,384, dim 64, Zipf", 0.437, _ONE_HOT, 16_384, 64, _MILLION, ranks=2),
    Step("DCNv2", 1.335, _DCN, 6_912, 128, _MILLION, "sum", optimizer="row-wise adagrad", ranks=2),
    Step(
        "DCNv2, tables on one rank each",
        1.44,
        _DCN,
        6_912,
        128,
        _MILLION,
        "sum",
        optimizer="row-wise adagrad",
        ranks=2,
        is_localized=True,
    ),
    Step("26 x 65,536, dim 64, Zipf", 1.567, _ONE_HOT, 65_536, 64, _MILLION, ranks=4),
    Step("26 x 16,384, dim 64, Zipf", 0.683, _ONE_HOT, 16_384, 64, _MILLION, ranks=4),
    Step("DCNv2", 1.856, _DCN, 6_912, 128, _MILLION, "sum", optimizer="row-wise adagrad", ranks=4),
    Step(
        "DCNv2, tables on one rank each",
        1.77,
        _DCN,
        6_912,
        128,
        _MILLION,
        "sum",
        optimizer="row-wise adagrad",
        ranks=4,
        is_localized=True,
    ),
]

if __name__ == "__main__":
    print("| step, per rank | GPUs | measured, ms | predicted, ms | predicted / measured |\n|---|---|---|---|---|")
    for step in STEPS:
        predicted = step.predicted()
        ratio = predicted / step.milliseconds
        print(
            f"| {step.name} | {step.ranks} {step.hardware.name} | {step.milliseconds:.3f} | {predicted:.3f} | {ratio:.2f} |"
        )
