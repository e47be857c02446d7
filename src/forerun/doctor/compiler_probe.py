"""A tiny program, compiled by the GPU compiler in a child process: `python -m forerun.doctor.compiler_probe`.

The compiler needs no GPU. A compiler that aborts or hangs ends only the child, not `forerun doctor`.
"""

from __future__ import annotations

from forerun.doctor.child_process import ending_of, run_module

MACHINE = "h100-1"
PASSED = "forerun-compiled"


def failure_of_gpu_compiler(timeout_seconds: float = 120, command: tuple[str, ...] | None = None) -> str | None:
    """Return why the GPU compiler cannot compile a tiny program, or None if it can."""
    done = run_module("forerun.doctor.compiler_probe", timeout_seconds, command, JAX_PLATFORMS="cpu")
    if done is None:
        return f"no result within {timeout_seconds:g} s"
    return None if PASSED in done.stdout.split() else f"it {ending_of(done)}"


def _compile_tiny_program() -> None:
    """Compile the addition of a number for one GPU."""
    import jax

    from forerun.hardware.slices import slice_named
    from forerun.planner.compile.installed_compilers import compile_only_topology

    device = compile_only_topology(slice_named(MACHINE)).devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    number = jax.ShapeDtypeStruct((8,), "float32", sharding=place)
    jax.jit(lambda x: x + 1).trace(number).lower(lowering_platforms=("cuda",)).compile()


if __name__ == "__main__":
    _compile_tiny_program()
    print(PASSED)
