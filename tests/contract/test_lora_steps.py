"""LoRA beside PEFT + torch: the same first adapters (a PEFT folder), the same batches, twenty steps, and back
again as a PEFT folder that gives the logits of forerun's own state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_reference import checkpoint, job_in, peft_start, rest_as, torch_logits, torch_losses, torch_model, trained

from forerun.trained_model.load_model import load_model
from forerun.verbs.export.export import export

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

IDS = np.frombuffer(b"7 apples and 3 pears are 10 fruits", np.uint8)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("rank: 4", {"target_modules": "all-linear"}),
    "rslora": (
        "rank: 4, rslora: true, targets: [q_proj, v_proj]",
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    ),
    "qlora": ("rank: 4, base: nf4, block: 16", {"target_modules": "all-linear"}),
    "dora": ("rank: 4, dora: true, alpha: 6", {"target_modules": ALL, "use_dora": True, "lora_alpha": 6}),
}


def our_logits(run: Path) -> np.ndarray[Any, Any]:
    import jax

    loaded = load_model(str(run), device="cpu", devices=1)
    with jax.set_mesh(loaded.mesh):
        ids = IDS[None].astype(np.int32)
        where = np.arange(ids.shape[1], dtype=np.int32)[None]
        out = loaded.model.apply(loaded.params, ids, np.ones_like(ids), where, loaded.compute)  # type: ignore[arg-type]
        return np.asarray(out.logits()[0])


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_follow_peft(kind: str, tmp_path: Path) -> None:
    import peft

    ours, theirs = KINDS[kind]
    base = checkpoint(tmp_path / "base", tie_word_embeddings=kind == "lora")
    first = peft_start(base, tmp_path / "first", **{"r": 4, "lora_alpha": 16, **theirs})
    resting = "" if kind == "qlora" else ", base: float32"
    job = job_in(tmp_path, f"{{{ours}{resting}, start: first}}")
    rows = trained(job)

    def resting_model() -> Any:
        return rest_as(torch_model(base), "nf4", 16) if kind == "qlora" else torch_model(base)

    model = peft.PeftModel.from_pretrained(resting_model(), first, is_trainable=True)
    expected = torch_losses(model, job, [row["lr"] for row in rows])
    assert expected[0] - expected[-1] > 0.2, "it has learned nothing: that would prove little"
    np.testing.assert_allclose([row["loss"] for row in rows], expected, rtol=1e-4)

    run = tmp_path / "runs" / "run"
    done = export(str(run), str(tmp_path / "peft"))
    assert done.is_adapter
    assert "bit for bit" in done.proof
    again = peft.PeftModel.from_pretrained(resting_model(), tmp_path / "peft")
    np.testing.assert_allclose(torch_logits(again, IDS), our_logits(run), atol=2e-5)
    np.testing.assert_allclose(torch_logits(again, IDS), torch_logits(model, IDS), atol=5e-3)
    if kind == "lora":
        export(str(run), str(tmp_path / "merged"), merge=True)
        np.testing.assert_allclose(torch_logits(torch_model(tmp_path / "merged"), IDS), our_logits(run), atol=2e-5)
