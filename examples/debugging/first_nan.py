"""Find the operation that produces the first NaN of a step: python first_nan.py JOB [KEY=VALUE ...].

The step runs on the CPU without jit, one operation after the other. It is slow, but the traceback names the line.
"""

from __future__ import annotations

import sys

import jax
import numpy as np

import forerun as fr


def main(path: str, *overrides: str) -> None:
    program = fr.build(fr.load_job(path, "device=cpu", "devices=1", *overrides))
    state, batch = program.init(), program.batch_at(0)
    for name, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        wrong = ~np.isfinite(np.asarray(leaf, np.float32))
        if wrong.any():  # the first dimension of a layer's weights is the number of the layer
            print(f"not finite: {jax.tree_util.keystr(name)}, first at {np.argwhere(wrong)[0].tolist()}")
    schedule = program.program.placed_schedule()
    with jax.set_mesh(program.mesh), jax.debug_nans(True), jax.disable_jit():
        _, metrics = program.program.step(state, batch, schedule)
    print(f"no NaN: loss {float(metrics.loss):.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
