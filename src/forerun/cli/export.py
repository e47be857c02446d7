"""`forerun export`: a run as a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys

from forerun.reporter import LineReporter


def run(args: argparse.Namespace) -> int:
    from forerun.verbs.export.export import export
    from forerun.weights_io.vllm import checklist, serve_command

    exported = export(
        args.run,
        args.to,
        dtype=args.dtype,
        merge=args.merge,
        dense=args.dense,
        step=args.step,
        stage=args.stage,
        gguf=args.gguf,
        push=args.push,
        public=args.public,
        overwrite=args.overwrite,
        code=args.code,
        reporter=LineReporter(sys.stderr),
    )
    print(f"done: {exported.folder}")
    if exported.proof:
        print(f"      {exported.proof}")
    if exported.gguf is not None:
        print(f"      {exported.gguf.path.name}: {exported.gguf.proof}")
        for note in exported.gguf.notes:
            print(f"      note: {note}")
    if exported.upload is not None:
        seen = "private" if exported.upload.is_private else "public"
        print(f"      uploaded ({seen}): {exported.upload.url}")
        if not exported.proof:
            return 0
    if exported.is_custom:
        print(f"      forerun generate {exported.folder} PROMPT --code FOLDER, with the folder of the class's module")
        return 0
    if exported.is_adapter:
        print(f"      peft: PeftModel.from_pretrained(base, {str(exported.folder)!r}); the whole model: --merge")
        print(f"      vLLM: {serve_command(exported.folder)}")
        return 0
    load = f"AutoModelForCausalLM.from_pretrained({str(exported.folder)!r}"
    if exported.inside is None:
        print(f"      transformers: {load})")
    else:
        print(f"      transformers: base = {load}, quantization_config=CompressedTensorsConfig(dequantize=True))")
        print(
            f"      peft: PeftModel.from_pretrained(base, {str(exported.inside)!r}); base alone is without the adapters"
        )
    faults = [f"{name}: {fault}" for name, fault in checklist(exported.folder) if fault is not None]
    print(f"      vLLM: {serve_command(exported.folder)}{''.join(f'; {fault}' for fault in faults)}")
    return 0
