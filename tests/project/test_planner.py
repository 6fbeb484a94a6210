"""The planner: placements, bytes and times that it predicts, its reports, and what it refuses."""

import dataclasses
import itertools
import pathlib
import re
import runpy

import keras
import numpy as np
import pytest

import sok_keras as sok
from sok_keras import planner
from sok_keras.planner import (
    H100,
    H200,
    Enumerator,
    Hardware,
    ParameterConstraints,
    ShardingPlanner,
    Topology,
    measuring,
)
from sok_keras.planner.costs import state_widths, table_bytes
from sok_keras.planner.search import Problem, search
from sok_keras.planner.workload import power_law, workload_of

GIB = 2**30
CPU = dataclasses.replace(H200, name="CPU", memory=0.0)
BENCH = pathlib.Path(__file__).parents[2] / "benches" / "planner.py"


def table(name="t", rows=1000, dim=16, **arguments):
    return sok.TableConfig(name, None, dim, max_capacity=rows, **arguments)


def medium():
    """The tables of the 'Medium' set of distributed-embeddings: 206 GiB of rows."""
    kinds = [(20, 50, 10**5, 64), (5, 50, 10**7, 64), (1, 50, 10**8, 128), (1, 1, 10**8, 128), (80, 1, 10, 32)]
    kinds += [(60, 1, 1000, 32), (80, 1, 10**5, 64), (24, 1, 200_000, 64), (40, 1, 10**7, 64)]
    tables, constraints = [], {}
    for kind, (number, hotness, rows, dim) in enumerate(kinds):
        for i in range(number):
            tables.append(sok.TableConfig(f"{kind}_{i}", rows, dim, combiner="sum"))
            constraints[f"{kind}_{i}"] = ParameterConstraints(hotness=hotness)
    assert 205 < sum(config.vocabulary_size * config.embedding_dim * 4 for config in tables) / GIB < 207
    return tables, constraints


@pytest.mark.parametrize("optimizer, on_host", [("adagrad", False), ("adam", True)])
def test_a_large_set_of_tables_is_planned(optimizer, on_host):
    tables, constraints = medium()
    topology = Topology(8, dataclasses.replace(H100, memory=80 * GIB))
    plan = ShardingPlanner(topology, 8192, constraints, optimizer).plan(tables)
    report = plan.explain()
    assert len(plan) == 311 and ("host" in {option.storage for option in plan.values()}) == on_host
    for rank in range(8):
        on_device, of_host = plan.rank_bytes(rank)
        assert on_device <= topology.budget and of_host <= topology.host_budget
    assert "3_0" in report and len(report.splitlines()) < 100


def test_a_plan_is_the_best_of_all_where_few_tables_are():
    dice = np.random.default_rng(1)
    for _ in range(30):
        tables, options, ranks = 4, 3, 2
        times = [dice.random((options, ranks)) for _ in range(tables)]
        sizes = [dice.random((options, 2 * ranks)) for _ in range(tables)]
        problem = Problem(times, sizes, np.full(2 * ranks, 2.4))
        possible = {}
        for choice in itertools.product(range(options), repeat=tables):
            of_ranks, of_memories = problem.sums(list(choice))
            if not problem.missing(of_memories).any():
                possible[choice] = of_ranks.max()
        choice, is_exact = search(problem)
        of_ranks, of_memories = problem.sums(choice)
        if possible:
            assert is_exact and not problem.missing(of_memories).any()
            assert of_ranks.max() == pytest.approx(min(possible.values()))
        else:
            assert problem.missing(of_memories).any()


def plans_of_all(planner_of, tables):
    """All plans that fit."""
    options = planner_of.enumerator.enumerate(tables)
    topology = planner_of.enumerator.topology
    for chosen in itertools.product(*options.values()):
        plan = planner.ShardingPlan(topology, 64, dict(zip(options, chosen, strict=True)), options, True)
        used = [plan.rank_bytes(rank) for rank in range(topology.world_size)]
        if max(size for size, _ in used) <= topology.budget and sum(size for _, size in used) <= topology.host_budget:
            yield plan


@pytest.mark.parametrize("seed", range(8))
def test_plans_are_exact_also_with_tables_that_belong_to_a_rank(seed):
    dice = np.random.default_rng(seed)
    names = ["a", "b", "c", "d"]
    constraints = {name: ParameterConstraints(hotness=int(dice.integers(1, 12)), storages=["hbm"]) for name in names}
    constraints["a"] = dataclasses.replace(constraints["a"], placements=["localized:0"])
    tables = [table(name, 10**6, 64) for name in names]
    planner_of = ShardingPlanner(Topology(2, H200), 8192, constraints)
    plan = planner_of.plan(tables)
    best = min(other.step_time() for other in plans_of_all(planner_of, tables))
    assert plan.is_exact and plan.step_time() == pytest.approx(best, rel=1e-9)


def test_launches_count_where_a_storage_is_chosen():
    tables = [table("a", storage="host"), table("b")]
    planner_of = ShardingPlanner(Topology(1, H200), 16)
    plan = planner_of.plan(tables)
    assert plan["b"].storage == "host" and plan.is_exact
    assert plan.step_time() == min(other.step_time() for other in plans_of_all(planner_of, tables))


def test_a_plan_is_found_where_moving_one_table_after_the_other_is_not_enough():
    large = [table("a", 7 * 10**6, 64), table("b", 5 * 10**6, 64), table("c", 3 * 10**6, 64)]
    small = [table(f"t{i}", 100, 64) for i in range(40)]
    topology = Topology(1, H200, memory=3.05e9, host_memory=1.45e9)
    plan = ShardingPlanner(topology, 64).plan(large + small)
    on_device, on_host = plan.rank_bytes(0)
    assert on_device <= topology.budget and on_host <= topology.host_budget


def test_a_table_of_one_rank_may_have_all_memory_of_the_host():
    config = table(rows=10**9, dim=64, placement="localized:0", storage="host")
    topology = Topology(8, H200)
    plan = ShardingPlanner(topology, 64).plan([config])
    assert topology.host_budget / 8 < plan.rank_bytes(0)[1] < topology.host_budget


def test_tables_of_hosts_are_exchanged_by_the_network():
    slow = dataclasses.replace(H200, network=1e8)
    fast, of_slow = (
        ShardingPlanner(Topology(2, hardware), 4096).plan([table(rows=10**6, storage="host")])
        for hardware in (H200, slow)
    )
    assert of_slow.step_time() > 2 * fast.step_time()


def test_tables_in_two_storages_are_for_two_layers():
    features = {name: sok.FeatureConfig(name, table(name, 10**7, 64), (8, 1), (8, 64)) for name in ("rarely", "often")}
    constraints = {"rarely": ParameterConstraints(hotness=0.01), "often": ParameterConstraints(hotness=10)}
    topology = Topology(1, H200, memory=9 * GIB)
    plan = ShardingPlanner(topology, 4096, constraints, "adam").plan(features)
    with pytest.raises(ValueError, match="must have one `storage`.*plan.split"):
        plan.apply(features)
    parts = plan.split(features)
    assert {storage: list(some) for storage, some in parts.items()} == {"hbm": ["often"], "host": ["rarely"]}
    layer = sok.DistributedEmbedding(parts["host"])
    assert layer({"rarely": np.zeros((8, 1), "int32")})["rarely"].shape == (8, 64)
    assert plan.split(list(features.values()))["hbm"][0].table.storage == "hbm"
    with pytest.raises(ValueError, match="must not be nested"):
        plan.split({"a": features})


def test_tables_go_to_the_host_where_that_costs_least():
    rarely, often = table("rarely", 10**7, 64), table("often", 10**7, 64)
    constraints = {"rarely": ParameterConstraints(hotness=0.01), "often": ParameterConstraints(hotness=10)}
    topology = Topology(1, H200, memory=9 * GIB)
    plan = ShardingPlanner(topology, 4096, constraints, "adam").plan([rarely, often])
    assert plan["rarely"].storage == "host" and plan["often"].storage == "hbm"
    assert "GiB would be missing on the device of rank 0" in plan.explain()


def test_tables_that_do_not_fit_say_how_many_bytes_are_missing_where():
    topology = Topology(2, H200, memory=2 * GIB, host_memory=2 * GIB)
    planner_of_two = ShardingPlanner(topology, 64, optimizer="adam")
    with pytest.raises(ValueError, match="The tables do not fit. Missing: ") as error:
        planner_of_two.plan([table(rows=10**7, dim=64)])
    assert "There are 2.0 GiB for tables on each device and 2.0 GiB on each host" in str(error.value)
    # 10^7 records of 768 bytes, and an index.
    missing = sum(float(size) for size in re.findall(r"([\d.]+) GiB on (?:the device|host)", str(error.value)))
    assert 7.1 < missing + 2 < 8.2 or 3.5 < missing / 2 + 2 < 4.2


@pytest.mark.parametrize("dim, optimizer", [(1, None), (10, "adam"), (64, "adagrad"), (16, "ftrl"), (8, "lion")])
@pytest.mark.parametrize("rows", [30_000, 300_000])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"is_static": True},
        {"embedding_dtype": "float16", "stochastic_rounding": True},
        {"trainable": False},
        {"eviction": "lru"},
    ],
)
def test_bytes_of_a_table_on_the_host_are_those_that_it_reports(dim, optimizer, rows, more):
    if "eviction" in more:
        more = {**more, "max_capacity": 10**6}
    is_static = more.get("is_static", False)
    arguments = {name: value for name, value in more.items() if name != "is_static"}
    config = sok.TableConfig("t", rows if is_static else None, dim, combiner="sum", storage="host", **arguments)
    layer = sok.DistributedEmbedding({"f": sok.FeatureConfig("f", config, (1, 1), (1, dim))})
    layer.build({"f": (1, 1)})
    if optimizer:
        sok.OptimizerWrapper(keras.optimizers.get(optimizer)).build(layer.trainable_variables)
    of_layer = layer.get_tables()["t"]
    keys = np.arange(rows) if is_static else np.arange(rows) * 7919 - 5
    of_layer.assign(keys, np.zeros((rows, dim), "float32"), insert=True)
    states = state_widths(config, optimizer and keras.optimizers.get(optimizer))
    # Parts of a small index double one after the other.
    tolerance = 0.02 if rows > 100_000 else 0.15
    assert table_bytes(config, rows, states, "host") == pytest.approx(of_layer.stats().bytes, rel=tolerance)


def test_measured_steps_are_predicted_within_a_quarter():
    for step in runpy.run_path(str(BENCH))["STEPS"]:
        assert 0.75 < step.predicted() / step.milliseconds < 1.25, step.name


def test_different_ids_are_counted_from_the_power_law_and_from_samples():
    dice = np.random.default_rng(0)
    probabilities = np.arange(1, 20_001) ** -1.05
    ids = dice.choice(20_000, 50_000, p=probabilities / probabilities.sum())
    counts, each = power_law(20_000, 1.05)
    assert counts.sum() == 20_000 and (counts * each).sum() == pytest.approx(1)
    by_law = workload_of(table(rows=20_000), [], ParameterConstraints())
    assert by_law.distinct(50_000) == pytest.approx(len(np.unique(ids)), rel=0.03)
    config = sok.TableConfig("t", None, 4)
    of_samples = workload_of(config, [], ParameterConstraints(samples=ids.reshape(-1, 5), num_rows=20_000))
    # More than there are, because ids that were not seen are not all alike.
    assert 1 <= of_samples.distinct(50_000) / len(np.unique(ids)) < 1.25
    # The ids that are still to come count, too.
    few = workload_of(config, [], ParameterConstraints(samples=np.arange(1000), num_rows=10**9))
    assert few.distinct(65_536) > 60_000
    of_samples = workload_of(config, [], ParameterConstraints(samples=ids.reshape(-1, 5), growth=1.5))
    assert of_samples.hotness == 5 and of_samples.num_rows == int(np.ceil(len(np.unique(ids)) * 1.5))
    assert of_samples.distinct(10_000) == pytest.approx(len(np.unique(ids[:10_000])), rel=0.25)
    lists = workload_of(config, [], ParameterConstraints(samples=[[2**60 + 1, 2**60 + 2, 3], [3], []]))
    assert lists.hotness == pytest.approx(4 / 3) and lists.num_rows == 3
    bounded = workload_of(table(rows=1000), [], ParameterConstraints(samples=np.arange(5000)))
    assert bounded.num_rows == 1000


def test_features_say_how_many_ids_and_outputs_a_table_has():
    shared = table(dim=8)
    features = {
        "bags": sok.FeatureConfig("bags", shared, (32, 5), (32, 8)),
        "single": sok.FeatureConfig("single", shared, (32, 1), (32, 8)),
    }
    load = workload_of(shared, list(features.values()), ParameterConstraints())
    assert load.hotness == 6 and load.bags == 2
    sequences = [sok.FeatureConfig("s", shared, (32, 10, 5), (32, 10, 8))]
    load = workload_of(shared, sequences, ParameterConstraints())
    assert load.hotness == 50 and load.bags == 10
    plan = ShardingPlanner(Topology(2, H200), 32).plan(features)
    applied = plan.apply(features)
    assert applied["bags"].table is applied["single"].table is not shared
    assert shared.placement == "auto" and applied["bags"].table.placement == plan["t"].placement


def test_a_plan_is_applied_to_configs_that_stay_as_they_are():
    configs = [table("large", 10**6, 32), sok.TableConfig("small", 7, 8)]
    plan = ShardingPlanner(Topology(4, H200), 1024, optimizer="adam").plan(configs)
    large, small = plan.apply(configs)
    assert (large.placement, large.storage) == (plan["large"].placement, plan["large"].storage)
    assert configs[0].placement == configs[1].placement == "auto" and configs[0].storage == "auto"
    assert large.max_capacity == 10**6 and small.vocabulary_size == 7
    with pytest.raises(ValueError, match="Received: table 'other'"):
        plan.apply([table("other")])


def test_what_a_config_says_is_kept_and_constraints_come_first():
    fixed = table("fixed", placement="localized:1", storage="host")
    plan = ShardingPlanner(Topology(2, H200), 64).plan([fixed])
    assert (plan["fixed"].placement, plan["fixed"].storage) == ("localized:1", "host")
    constraints = {"fixed": ParameterConstraints(placements=["distributed"], storages=["hbm"])}
    plan = ShardingPlanner(Topology(2, H200), 64, constraints).plan([fixed])
    assert (plan["fixed"].placement, plan["fixed"].storage) == ("distributed", "hbm")


def test_tables_of_one_rank_each_are_spread_over_the_ranks():
    names = [f"t{i}" for i in range(6)]
    owners = ["localized:0", "localized:1", "localized:2"]
    constraints = {name: ParameterConstraints(placements=owners, hotness=4) for name in names}
    plan = ShardingPlanner(Topology(3, H200), 4096, constraints, "adam").plan([table(name, 10**5) for name in names])
    assert sorted(option.placement for option in plan.values()) == sorted(owners * 2)
    assert plan.is_exact


def test_the_report_shows_ranks_tables_parts_and_what_was_rejected():
    plan = ShardingPlanner(Topology(2, H200), 512, optimizer="adam").plan(
        [table("users", 10**6, 32), table("items", 10**6, 32)]
    )
    report = plan.explain()
    assert report.startswith("2 tables on 2 x H200, 512 samples a rank: ") and str(plan) == report
    for text in ("exchange", "rank   1 |", "users", "rejected", "localized, hbm", "the step would take"):
        assert text in report
    parts = plan.parts(0)
    assert list(parts) == ["fixed", "lookup", "update", "exchange", "host"]
    assert plan.step_time(0) == pytest.approx(sum(parts.values())) and plan.step_time() == max(
        map(plan.step_time, (0, 1))
    )


def test_what_was_measured_is_compared_with_the_plan():
    plan = ShardingPlanner(Topology(1, H200), 512).plan([table("users", 10**6, 32)])
    report = plan.compare({"step": 2 * plan.step_time(), "bytes": {"users": plan.table_bytes("users")}})
    assert re.search(r"^step .* 0\.500$", report, re.MULTILINE)
    assert re.search(r"^bytes of users .* 1\.000$", report, re.MULTILINE)
    two = ShardingPlanner(Topology(2, H200), 512).plan([sok.TableConfig("days", 7, 8, placement="replicated")])
    assert " 1.000\n" in two.compare({"bytes": {"days": two.table_bytes("days") / 2}})
    with pytest.raises(ValueError, match='must hold "step", "bytes" or both'):
        plan.compare({"bytes": {}})
    with pytest.raises(ValueError, match="must hold positive numbers"):
        plan.compare({"step": "1"})
    with pytest.raises(ValueError, match="bytes of \\['other'\\]"):
        plan.compare({"bytes": {"other": 1}})
    with pytest.raises(ValueError, match='must hold "step", "bytes" or both'):
        plan.compare({"stop": 1})


def test_the_hardware_at_hand_is_measured_and_plans_for_hosts_need_no_gpu():
    hardware = planner.measure("here", size=2**20)
    assert hardware.name == "here" and hardware.host_gather > 1e5 and hardware.host_memory > GIB
    if hardware.memory == 0:
        plan = ShardingPlanner(Topology(1, hardware), 32, optimizer="adam").plan([table()])
        assert plan["t"].storage == "host" and plan.parts(0)["host"] > 0
    two = ShardingPlanner(Topology(2, CPU), 32, optimizer="adam").plan([table(rows=10**6)])
    assert {option.storage for option in two.values()} == {"host"}


def test_a_device_is_measured_by_lookups_of_tables():
    # The device is what the backend runs on.
    hardware = measuring._with_device(H200, 2**22)
    figures = hardware.copy, hardware.gather, hardware.launch, hardware.host_link
    assert all(figure > 0 for figure in figures)
    assert figures != (H200.copy, H200.gather, H200.launch, H200.host_link)


def test_ranks_of_many_hosts_send_by_the_network():
    one_host, many = Topology(8, H200), Topology(8, H200, ranks_per_host=4)
    assert one_host.link("hbm") == H200.link and many.link("hbm") == H200.network == one_host.link("host")
    assert many.host_budget == one_host.host_budget and (many.num_hosts, many.host_of(5)) == (2, 1)
    times = [ShardingPlanner(topology, 4096).plan([table(rows=10**6)]).step_time() for topology in (one_host, many)]
    assert times[0] < times[1]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Topology(0), "`world_size` must be a positive int. Received: world_size=0"),
        (lambda: Topology(2, ranks_per_host=0), "`ranks_per_host`"),
        (lambda: Topology(1, memory=-1), "`memory` must be a number of bytes"),
        (lambda: dataclasses.replace(H200, copy=0.0), "`copy` must be a positive number. Received: copy=0.0"),
        (lambda: dataclasses.replace(H200, launch=-1.0), "`launch`"),
        (lambda: ParameterConstraints(hotness=0), "`hotness` must be a positive number"),
        (lambda: ParameterConstraints(skew=-1), "`skew`"),
        (lambda: ParameterConstraints(placements=["nowhere"]), "`placement` must be one of"),
        (lambda: ParameterConstraints(storages=["disk"]), "`storage` must be one of"),
        (lambda: ParameterConstraints(storages="host"), "`storages` must be a list"),
        (lambda: ParameterConstraints(placements=[]), "`placements` must be a list with at least one"),
        (lambda: ParameterConstraints(num_rows=0.5), "`num_rows` must be a positive int"),
        (lambda: ParameterConstraints(growth=float("inf")), "`growth` must be a positive number"),
        (lambda: Topology(2, "H200"), "`hardware` must be a `Hardware`"),
        (lambda: ShardingPlanner(), "Either `topology` or `enumerator` must be given"),
        (
            lambda: ShardingPlanner(Topology(1), enumerator=Enumerator(Topology(2), 8)),
            "`enumerator` must be given alone",
        ),
        (
            lambda: ShardingPlanner(Topology(1), constraints={"t": {}}).plan([table()]),
            "must hold `ParameterConstraints`",
        ),
        (
            lambda: ShardingPlanner(Topology(1), constraints={"t": ParameterConstraints(num_rows=2000)}).plan(
                [table()]
            ),
            "`num_rows` of table 't' must be at most 1000",
        ),
        (
            lambda: ShardingPlanner(Topology(1), constraints={"t": ParameterConstraints(samples=[0.5])}).plan(
                [table()]
            ),
            "must hold ids",
        ),
        (lambda: Enumerator(Topology(1), 0), "`batch_size` must be a positive int"),
        (lambda: planner.measure(size=10), "`size` must be an int of at least"),
        (lambda: ShardingPlanner(Topology(1)).plan([]), "at least one table"),
        (lambda: ShardingPlanner(Topology(1)).plan(["t"]), "must hold `TableConfig` or `FeatureConfig`"),
        (lambda: ShardingPlanner(Topology(1)).plan([table(), table()]), "two with the name 't'"),
        (
            lambda: ShardingPlanner(Topology(1)).plan([sok.TableConfig("t", None, 4)]),
            "table 't' is dynamic: set `num_rows`",
        ),
        (
            lambda: ShardingPlanner(Topology(1), constraints={"u": ParameterConstraints()}).plan([table()]),
            "constraints of \\['u'\\]",
        ),
        (lambda: ShardingPlanner(Topology(2)).plan([table(placement="localized:2")]), "the topology has 2 ranks"),
        (lambda: ShardingPlanner(Topology(1, CPU)).plan([table(storage="hbm")]), "topology's ranks have none"),
        (
            lambda: ShardingPlanner(
                Topology(2), constraints={"t": ParameterConstraints(placements=["replicated"])}
            ).plan([table()]),
            'cannot be "replicated"',
        ),
        (
            lambda: ShardingPlanner(Topology(1), constraints={"t": ParameterConstraints(samples=[])}).plan([table()]),
            "must hold ids",
        ),
    ],
)
def test_bad_input_is_refused_with_the_rule_and_what_came(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_program_of_the_page_runs(capsys):
    page = (BENCH.parents[1] / "docs" / "planner.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(program, "docs/planner.md", "exec"), names)
    assert "3 tables on 2 x H200" in capsys.readouterr().out
    assert names["tables"][2].placement == "replicated" and names["plan"]["users"].storage == "host"


def test_hardware_can_be_given():
    slow = Hardware("slow", 8 * GIB, 1e11, 1e9, 1e-4, 1e10, 1e-4, 64 * GIB, 1e8, 1e-4, 1e10, 1e9)
    fast, of_slow = (
        ShardingPlanner(Topology(2, hardware), 65_536).plan([table(rows=10**6)]) for hardware in (H200, slow)
    )
    assert of_slow.step_time() > 2 * fast.step_time()
