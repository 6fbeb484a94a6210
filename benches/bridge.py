"""What a step costs through each backend, over the native entry points that its bridge calls, in one run.

    python benches/bridge.py [--backends jax torch]

The layer and `OptimizerWrapper(Adam)`, without a model: TensorFlow in a `tf.function`, JAX jitted, PyTorch eager; one-hot, dim 64,
the batches of step.py. Its gradients are held (TensorFlow, PyTorch) or merged (JAX), and so are those of the native step beside
it. Page faults tell what fresh output buffers cost: the native step writes into the same ones again. With
`SOK_KEEP_FREED_MEMORY=0` it is seen what they cost where glibc gives memory back after each step.
"""

import resource

import work

CASE, DIM = "onehot", 64


def main():
    parser = work.parser(__doc__, runs=8)
    parser.add_argument("--backends", nargs="+", default=work.BACKENDS)
    arguments = parser.parse_args()
    rows = [work.in_own_process(measure, name, arguments, backend=name) for name in arguments.backends]
    columns = ["backend", "bridge ms", "native held ms", "native merged ms", "bridge / held", "range"]
    columns += ["bridge / merged", "range", "page faults a step"]
    work.report("A step through the backends over the native step", arguments, work.table(columns, rows))


def measure(name, arguments):
    from keras_step import our_step
    from native_step import criteo_step, native

    native.set_num_threads(arguments.threads)
    native_step, faults = criteo_step(CASE, DIM), []
    bridge_step = our_step(CASE, DIM)

    def bridge(number):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        bridge_step(number)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    steps = {
        "bridge": bridge,
        "held": lambda number: native_step.run(number, "held"),
        "merged": lambda number: native_step.run(number, "merged"),
    }
    times = work.in_turns(steps, arguments.rounds, arguments.runs)
    ratios = [*work.ratio(times["bridge"], times["held"]), *work.ratio(times["bridge"], times["merged"])]
    return [name, *map(work.ms, times.values()), *ratios, sorted(faults)[len(faults) // 2]]


if __name__ == "__main__":
    main()
