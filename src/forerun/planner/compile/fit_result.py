"""Whether a job fits a slice, and the decision of `unroll: auto` between two such results.

For `unroll: auto`, the step is compiled with and without a loop over the layers. `plan` and `train` call the same
function with the same compiler. So they choose the same program for the same job, devices and versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from forerun.models.model_facts import ModelFacts
from forerun.planner.compile.request import CompileRequest
from forerun.planner.hlo import Module
from forerun.planner.memory import MemoryReport
from forerun.planner.time.step_time import StepTime
from forerun.units import Bytes, Seconds

# The compile time of a program without a loop grows with the number of layers, and a wide layer hides the traffic of
# the loop behind its matmuls. Above these limits, nothing is compiled for the decision.
MOST_LAYERS, MOST_WIDTH = 40, 2048
MARGIN = 0.05  # share of the usable memory that must stay free: samples and validation need memory beside the step
GAIN = 0.02  # by which the step must be shorter, because the program without a loop takes longer to compile


@dataclass(frozen=True)
class AttentionKernel:
    """The attention kernel of a program, and why it is not the platform's own one."""

    kernel: str
    obstacle: str | None = None


@dataclass(frozen=True)
class UnrollChoice:
    """The value that `unroll: auto` got, and why."""

    unrolled: bool
    reason: str


@dataclass(frozen=True)
class FitResult:
    """The result of compiling a job for a slice. Bytes are per device unless noted."""

    question: CompileRequest
    memory: MemoryReport
    fits: bool  # as the TPU compiler decided; for a GPU, whether the peak is within the limit
    compile_seconds: Seconds  # from the start of the compiler's process to its decision
    program: str  # hash of the lowered program
    mesh: str
    flops_per_step: float  # of the model, over all devices; causal attention is counted once
    tokens_per_step: int
    ledger: Mapping[str, Bytes] = field(default_factory=dict)  # contents of the memory; adds up to the peak
    step: StepTime | None = None  # None if the job does not fit
    saved_bytes: int | None = None  # of a checkpoint, over all devices; None: all weights and the optimizer
    attention: AttentionKernel | None = None  # None for a model without attention
    unroll: UnrollChoice | None = None  # None unless the job says `unroll: auto`
    # The scheduled program, if it fits and was compiled now. The cache does not store it.
    module: Module | None = field(default=None, repr=False, compare=False)

    @property
    def slice_name(self) -> str:
        return self.question.slice.name

    @property
    def limit_bytes(self) -> Bytes:
        """Memory of one device that a program can use: of a TPU known to 0.01 GiB, of a GPU the share of `train`."""
        return Bytes(self.question.slice.chip.usable_bytes)

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens_per_step / self.step.mid_seconds if self.step else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs per second as a share of the bf16 peak of the devices in use, as in `train`."""
        peak = self.question.slice.chip.bf16_flops_per_device
        if self.step is None or peak is None:
            return None
        return self.flops_per_step / self.step.mid_seconds / (peak * self.question.devices)

    @property
    def spare_bytes(self) -> Bytes:
        """Unused bytes of HBM; negative if the job does not fit."""
        return Bytes(self.limit_bytes - self.memory.peak_bytes)


def is_open(question: CompileRequest) -> bool:
    """Return whether `unroll` is still to be decided. The teacher's forward pass of `forerun cache` has a loop."""
    return question.job.unroll == "auto" and not question.recording


def decided(question: CompileRequest, judge: Callable[[CompileRequest], FitResult]) -> FitResult:
    """Return the result of the better program of a request with `unroll: auto`.

    Args:
        question: The request.
        judge: Compiles a request with a fixed value.
    """

    def compiled(unrolled: bool) -> FitResult:
        return judge(replace(question, resolved=question.resolved.with_values(unroll=unrolled)))

    looped = compiled(False)
    if (obstacle := _implausible(question)) is not None:
        return replace(looped, question=question, unroll=UnrollChoice(False, obstacle))
    straight = compiled(True)
    choice = _compared(looped, straight)
    seconds = Seconds(looped.compile_seconds + straight.compile_seconds)
    best = straight if choice.unrolled else looped
    return replace(best, question=question, unroll=choice, compile_seconds=seconds)


def _implausible(question: CompileRequest) -> str | None:
    """Return why a program without a loop is not worth a compilation, or None if it is."""
    models = [("the model", question.resolved.model_facts)]
    if question.resolved.step_teacher is not None:  # the teacher's layers run in the same way
        models.append(("the teacher", question.resolved.step_teacher))
    return next((text for name, facts in models if (text := _too_large(name, facts)) is not None), None)


def _too_large(name: str, facts: ModelFacts) -> str | None:
    config = facts.config
    if config is None:
        return f"{name} is a custom class, so the number of its layers is unknown"
    if config.layers > MOST_LAYERS:
        return f"{name} has {config.layers} layers, auto unrolls at most {MOST_LAYERS}"
    if config.embed > MOST_WIDTH:
        return f"{name} is {config.embed} wide, auto unrolls models up to {MOST_WIDTH}"
    return None


def _compared(looped: FitResult, straight: FitResult) -> UnrollChoice:
    """Return the choice between the program with a loop and the one without."""
    limit = Bytes(int(straight.limit_bytes * (1 - MARGIN)))
    peak = straight.memory.peak_bytes
    if not straight.fits or straight.step is None or peak > limit:
        return UnrollChoice(False, f"without a loop the step needs {peak}, and auto allows {limit}")
    if looped.step is None:
        return UnrollChoice(True, f"it needs {peak}, and with a loop the step does not fit")
    before, after = looped.step.mid_seconds, straight.step.mid_seconds
    times = f"{after:.4g} s without a loop, {before:.4g} s with it"
    if after > before * (1 - GAIN):
        return UnrollChoice(False, f"the predicted step is not {GAIN:.0%} shorter: {times}")
    return UnrollChoice(True, f"the predicted step is {times}; it needs {peak} of {straight.limit_bytes}")
