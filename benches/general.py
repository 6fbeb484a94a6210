"""A step of an optimizer that the core has no formula for, over the same step of Adam by the core's formula, in one run.

    make bench                              # or: python benches/general.py [--backends jax torch]

The optimizer is a subclass of Keras' Adam, so it is the same arithmetic: in the core, or by Keras' own `update_step` on pieces of the
rows. Layer and `OptimizerWrapper` without a model, as in `benches/bridge.py`: 26 features, one id each, dim 64, Zipf 1.05. The
environment variable BATCH sets the samples of a step.
"""

import work

CASE, DIM = "onehot", 64


def main():
    parser = work.parser(__doc__, rounds=3, runs=4)
    parser.add_argument("--backends", nargs="+", default=work.BACKENDS)
    arguments = parser.parse_args()
    rows = [work.in_own_process(measure, name, arguments, backend=name) for name in arguments.backends]
    columns = ["backend", "formula ms", "update_step ms", "update_step / formula", "range"]
    about = f"26 features x {work.BATCH:,} samples, one id each, dim {DIM}; each step is waited for."
    work.report("Keras' own `update_step` over the core's formula", arguments, about, work.table(columns, rows))


def measure(name, arguments):
    import keras

    from keras_step import our_step
    from native_step import native

    class OwnAdam(keras.optimizers.Adam):
        """The wrapper knows no formula of a subclass."""

    native.set_num_threads(arguments.threads)
    steps = {"formula": our_step(CASE, DIM), "update_step": our_step(CASE, DIM, OwnAdam(1e-3))}
    times = work.in_turns(steps, arguments.rounds, arguments.runs)
    return [name, *map(work.ms, times.values()), *work.ratio(times["update_step"], times["formula"])]


if __name__ == "__main__":
    main()
