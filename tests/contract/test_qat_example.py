"""examples/qat as its README says it: what it learns, what it writes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from forerun.config.load import load
from forerun.run.train import train
from forerun.track.display.make_display import make_display
from forerun.verbs.export.export import export

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "qat" / "job.yaml"


def test_the_example_learns_and_is_written_as_four_bits(tmp_path: Path) -> None:
    job = load(EXAMPLE, [f"runs={tmp_path / 'runs'}", f"data.store={tmp_path / 'tokens'}", "devices=1"]).job
    with make_display(io.StringIO()) as display:
        finished = train(job, display)
    assert finished is not None
    assert finished.summary["first_loss"] == pytest.approx(5.907, abs=0.01)
    assert finished.summary["final_loss"] == pytest.approx(2.97, abs=0.1)
    exported = export(str(tmp_path / "runs/qat"), str(tmp_path / "out")).folder
    section = json.loads((exported / "config.json").read_text())["quantization_config"]
    assert (section["format"], section["config_groups"]["group_0"]["weights"]["num_bits"]) == ("pack-quantized", 4)
    tensors = load_file(exported / "model.safetensors")
    matrices = [tensor for name, tensor in tensors.items() if name.endswith("_packed")]
    assert len(matrices) == 14
    assert sum(tensor.nbytes for tensor in matrices) == 2 * (4 * 64 * 64 + 3 * 64 * 192) // 2, "half a byte each"
