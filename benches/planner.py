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

    def placements(self) -> list[str]:
        """Returns the placement of each table. Tables on one rank are dealt out so that ranks have about as many ids each."""
        placements, loads = ["distributed"] * len(self.hotness), [0] * self.ranks
        if self.is_localized:
            for table in sorted(range(len(self.hotness)), key=lambda table: -self.hotness[table]):
                rank = loads.index(min(loads))
                placements[table] = f"localized:{rank}"
                loads[rank] += self.hotness[table]
        return placements

    def predicted(self) -> float:
        """Returns the milliseconds of the plan that has the same placements."""
        tables = [
            sok.TableConfig(f"t{i}", None, self.dim, combiner=self.combiner, max_capacity=self.rows, storage="hbm")
            for i in range(len(self.hotness))
        ]
        constraints = {
            f"t{i}": ParameterConstraints(hotness=hotness, skew=self.skew, placements=[placement])
            for i, (hotness, placement) in enumerate(zip(self.hotness, self.placements(), strict=True))
        }
        optimizer = sok.optimizers.RowWiseAdagrad() if self.optimizer == "row-wise adagrad" else self.optimizer
        planner = ShardingPlanner(Topology(self.ranks, self.hardware), self.batch_size, constraints, optimizer)
        return 1e3 * planner.plan(tables).step_time()


_MILLION = 1_000_000


def one_hot(milliseconds: float, batch_size: int = 65_536, skew: float = 1.05, **arguments) -> Step:
    ids = "uniform" if skew == 0 else "Zipf"
    return Step(
        f"26 x {batch_size:,}, dim 64, {ids}", milliseconds, [1] * 26, batch_size, 64, _MILLION, skew=skew, **arguments
    )


def dcn(milliseconds: float, **arguments) -> Step:
    name = "DCNv2: 214 ids x 6,912, dim 128, row-wise Adagrad"
    name += ", tables on one rank each" if arguments.get("is_localized") else ""
    return Step(name, milliseconds, _DCN, 6_912, 128, _MILLION, "sum", optimizer="row-wise adagrad", **arguments)


STEPS = [
    one_hot(0.670),
    one_hot(1.137, skew=0.0),
    one_hot(0.234, 16_384),
    Step("8 x 20 ids x 16,384, dim 64, sum, Zipf", 0.730, [20] * 8, 16_384, 64, 4 * _MILLION, "sum"),
    Step("10 x 104,857, dim 128, Zipf", 0.726, [1] * 10, 104_857, 128, 1_680_000),
    dcn(0.843),
    one_hot(0.834, hardware=H100),
    one_hot(0.285, 16_384, hardware=H100),
    one_hot(1.240, ranks=2),
    one_hot(0.437, 16_384, ranks=2),
    dcn(1.335, ranks=2),
    dcn(1.44, ranks=2, is_localized=True),
    one_hot(1.567, ranks=4),
    one_hot(0.683, 16_384, ranks=4),
    dcn(1.856, ranks=4),
    dcn(1.77, ranks=4, is_localized=True),
]

if __name__ == "__main__":
    print("| step, per rank | GPUs | measured, ms | predicted, ms | predicted / measured |\n|---|---|---|---|---|")
    for step in STEPS:
        predicted = step.predicted()
        ratio = predicted / step.milliseconds
        print(
            f"| {step.name} | {step.ranks} {step.hardware.name} | {step.milliseconds:.3f} | {predicted:.3f} | {ratio:.2f} |"
        )
