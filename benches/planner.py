"""The planner's predictions beside steps that were measured on GPUs (`benches/results/gpu.md`, `ranks_gpu.md`), as a table.

python benches/planner.py
"""

import dataclasses

import sok_keras as sok
from sok_keras.planner import H100, H200, Hardware, ParameterConstraints, ShardingPlan, ShardingPlanner, Topology

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
    bytes_of_table: int = 0

    def placements(self) -> list[str]:
        """Returns the placement of each table. Tables on one rank are dealt out so that ranks have about as many ids each."""
        placements, loads = ["distributed"] * len(self.hotness), [0] * self.ranks
        if self.is_localized:
            for table in sorted(range(len(self.hotness)), key=lambda table: -self.hotness[table]):
                rank = loads.index(min(loads))
                placements[table] = f"localized:{rank}"
                loads[rank] += self.hotness[table]
        return placements

    def plan(self) -> ShardingPlan:
        """Returns the plan that has the same placements."""
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
        return planner.plan(tables)

    def predicted(self) -> float:
        """Returns the milliseconds of a step."""
        return 1e3 * self.plan().step_time()

    def predicted_bytes(self) -> float:
        """Returns the bytes of a table."""
        return self.plan().table_bytes("t0")


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


def other(
    milliseconds: float, name: str, hotness: int, tables: int, batch_size: int, dim: int, rows: int, **arguments
) -> Step:
    combiner = "sum" if hotness > 1 else None
    return Step(name, milliseconds, [hotness] * tables, batch_size, dim, rows, combiner, **arguments)


# Shapes to which no constant was fitted (`crates/cuda/benches/shapes.rs`, `ranks.rs`), and the bytes of a table on one GPU.
OTHERS = [
    other(0.356, "12 x 32,768, dim 128, Zipf", 1, 12, 32_768, 128, 2 * _MILLION, bytes_of_table=3_108_912_452),
    other(0.161, "40 x 8,192, dim 32, Zipf", 1, 40, 8_192, 32, _MILLION // 2, bytes_of_table=202_094_212),
    other(0.256, "16 x 10 ids x 8,192, dim 16, sum, Zipf", 10, 16, 8_192, 16, 3 * _MILLION, bytes_of_table=631_587_268),
    other(
        0.376, "6 x 131,072, dim 32, uniform", 1, 6, 131_072, 32, 5 * _MILLION, skew=0.0, bytes_of_table=2_012_433_156
    ),
    other(0.369, "4 x 5 ids x 16,384, dim 256, sum, Zipf", 5, 4, 16_384, 256, _MILLION, bytes_of_table=3_090_626_756),
    other(0.610, "12 x 32,768, dim 128, Zipf", 1, 12, 32_768, 128, 2 * _MILLION, ranks=2),
    other(0.405, "40 x 8,192, dim 32, Zipf", 1, 40, 8_192, 32, _MILLION // 2, ranks=2),
    other(0.547, "16 x 10 ids x 8,192, dim 16, sum, Zipf", 10, 16, 8_192, 16, 3 * _MILLION, ranks=2),
    other(0.792, "6 x 131,072, dim 32, uniform", 1, 6, 131_072, 32, 5 * _MILLION, skew=0.0, ranks=2),
    other(0.740, "4 x 5 ids x 16,384, dim 256, sum, Zipf", 5, 4, 16_384, 256, _MILLION, ranks=2),
]


def print_steps(steps) -> None:
    print("| step, per rank | GPUs | measured, ms | predicted, ms | predicted / measured |\n|---|---|---|---|---|")
    for step in steps:
        predicted = step.predicted()
        ratio = predicted / step.milliseconds
        print(
            f"| {step.name} | {step.ranks} {step.hardware.name} | {step.milliseconds:.3f} | {predicted:.3f} | {ratio:.2f} |"
        )


if __name__ == "__main__":
    print_steps(STEPS)
    print()
    print_steps(OTHERS)
    print("\n| table | bytes measured | predicted | predicted / measured |\n|---|---|---|---|")
    for step in (step for step in OTHERS if step.bytes_of_table):
        measured, predicted = step.bytes_of_table, step.predicted_bytes()
        print(f"| {step.rows:,} x {step.dim}, Adam | {measured:,} | {predicted:,.0f} | {predicted / measured:.5f} |")
