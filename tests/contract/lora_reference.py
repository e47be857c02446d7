"""What the tests of LoRA share: tiny checkpoints as transformers writes them, jobs on them, and PEFT's side of it."""

from __future__ import annotations

import io
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray
from torch_loop import job_batches, next_token_loss, training_losses

from forerun.checkpoint.reader import newest_step
from forerun.config.load import load
from forerun.config.schema import Job
from forerun.models.model_facts import model_of
from forerun.nn.compute import Compute
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.train import train
from forerun.run_folder.run_folder import RunFolder
from forerun.track.display.make_display import make_display
from forerun.track.metrics import read_metrics
from forerun.trained_model.load_model import fsdp_mesh, method_params

TEXT = "\n\n".join(f"{n} apples and {n % 7} pears are {n + n % 7} fruits, said the {n % 3}. child." for n in range(60))
ORDINARY = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
STATE_ARRAYS = ("A_log", "dt_bias", "conv1d.weight", "conv.conv.weight", "linear_attn.norm.weight")
GPT2 = {"vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": None}


def checkpoint(folder: Path, family: str = "Qwen3", **more: Any) -> Path:
    import torch
    import transformers

    ordinary = {**GPT2, "eos_token_id": 256} if family == "GPT2" else ORDINARY
    ordinary = {**ordinary, "head_dim": 8} if family == "Qwen3" else ordinary
    config = getattr(transformers, f"{family}Config")(**{**ordinary, **more})
    torch.manual_seed(0)
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)
    with torch.no_grad():  # so large that adapters and biases count
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def job_in(folder: Path, lora: str, *more: str) -> Job:
    (folder / "text.txt").write_text(TEXT)
    (folder / "job.yaml").write_text(
        "name: run\nmodel: ./base\ndata: {path: text.txt, tokenizer: bytes, store: tokens}\nsequence: 48\nbatch: 4\n"
        "micro_batch: 2\nsteps: 20\ndevice: cpu\ndevices: 1\noptimizer: {lr: 4e-3, warmup: 2}\nsample: {tokens: 0}\n"
        f"precision: {{compute: float32}}\nruns: {folder / 'runs'}\nlora: {lora}\ncheckpoint: {{every: 5}}\n"
    )
    return load(folder / "job.yaml", list(more)).job


def trained(job: Job) -> list[dict[str, Any]]:
    """Its lines of figures."""
    with make_display(io.StringIO()) as display:
        assert train(job, display) is not None
    return [line for line in read_metrics(Path(job.runs) / job.name / "metrics.jsonl") if "loss" in line]


def torch_model(folder: Path) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def peft_start(base: Path, to: Path, **config: Any) -> Path:
    """A PEFT folder whose adapters already change something."""
    import peft
    import torch

    torch.manual_seed(1)
    wanted = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
    peft.get_peft_model(torch_model(base), wanted).save_pretrained(to)
    return to


def torch_losses(model: Any, job: Job, rates: list[float]) -> list[float]:
    """Return the losses of torch's AdamW on what learns of `model`."""
    return training_losses(
        model.named_parameters(), job.optimizer, job_batches(job, len(rates)), rates, next_token_loss(model)
    )


def torch_logits(model: Any, ids: NDArray[Any]) -> NDArray[Any]:
    import torch

    with torch.no_grad():
        logits: NDArray[Any] = model.eval()(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
        return logits


def our_logits(run: Path, ids: NDArray[Any]) -> NDArray[Any]:
    """Of the leaves that the run trained, rounding and all, in float32."""
    job = load(run / "job.yaml").job
    model, mesh, folder = model_of(job.model), fsdp_mesh(job), RunFolder(run)
    params = method_params(folder, newest_step(folder.checkpoints(job)), ResolvedJob(job), mesh)
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    return np.asarray(jax.jit(lambda p: model.apply(p, ids, np.ones_like(ids), positions, Compute()).logits())(params))


def rounded(matrix: NDArray[Any], kind: str, block: int) -> NDArray[Any]:
    """[out, in] as a quantized base holds it: every `block` inputs of an output by themselves, value by value."""
    top = {"int8": 127, "int4": 7, "nf4": 1}[kind]
    levels = np.array(NF4 if kind == "nf4" else range(-top, top + 1), np.float32)
    cut = matrix.astype(np.float32).reshape(len(matrix), -1, block, 1)
    scale = np.abs(cut).max(axis=2, keepdims=True) / np.float32(top)
    nearest = np.abs(cut / scale - levels).argmin(axis=-1)
    whole: NDArray[Any] = (levels[nearest] * scale[..., 0]).reshape(matrix.shape)
    return whole


def rest_as(model: Any, kind: str, block: int) -> Any:
    """Return the torch model with the frozen weights of a run whose `lora.base` is `kind`.

    A base in float32 keeps all weights. A quantized base rounds the matrices to `kind` and all else to bfloat16. Arrays
    of layers with a state stay in float32. Routers and gates of shared experts are in bfloat16.
    """
    if kind == "float32":
        return model
    import torch

    outside = ("lm_head", "per_layer_model_projection", "router.proj", "shared_expert_gate")
    inside = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith(outside)
    }
    inputs_first = model.config.model_type == "gpt_oss"  # of the matrices of experts
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(STATE_ARRAYS):
                continue
            if kind != "bfloat16" and name.removesuffix(".weight") in inside:
                parameter.copy_(torch.from_numpy(rounded(parameter.numpy(), kind, block)))
            elif kind != "bfloat16" and ".experts." in name and parameter.ndim == 3:
                for matrix in parameter:
                    by_output = matrix.T if inputs_first else matrix
                    by_output.copy_(torch.from_numpy(rounded(by_output.numpy(), kind, block)))
            else:
                parameter.copy_(parameter.to(torch.bfloat16).to(torch.float32))
    return model


def normal_quantiles() -> list[float]:
    """NF4 as its authors make it: quantiles of a normal distribution, 8 on the right, 7 on the left, and 0."""
    offset, quantile = 0.9677083, NormalDist().inv_cdf
    right = [quantile(offset + (0.5 - offset) * n / 8) for n in range(8)]
    left = [-quantile(offset + (0.5 - offset) * n / 7) for n in range(7)]
    return [value / max(right) for value in sorted([*left, 0.0, *right])]


NF4 = normal_quantiles()
