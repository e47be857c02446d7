from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recording_reporter import RecordingReporter

from forerun.cli.main import main
from forerun.data.tokenizer import ByteTokenizer
from forerun.evaluate.scoring import GenerationRequest
from forerun.hardware.mesh import MeshShape
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig
from forerun.nn import spec
from forerun.nn.compute import Compute
from forerun.nn.sharding import stored
from forerun.program.build import make_mesh
from forerun.trained_model.load_model import LoadedModel
from forerun.verbs.evaluate import evaluate_text, language_of, longest_context, opening_of, writer_of

MODEL = Decoder(DecoderConfig(1, 16, 2, 1, 8, 24, 272))
CONTEXT = 20
ONE, EIGHT = MeshShape(1, 1, 1), MeshShape(2, 2, 2)


def loaded(shape: MeshShape = ONE, **changes: Any) -> LoadedModel:
    mesh = make_mesh(shape, jax.devices()[: shape.devices])
    arrays = jax.tree.map(lambda x: x if x.ndim < 2 else x * 8, spec.initial(MODEL.specs(), jax.random.key(1)))
    where = spec.map_specs(lambda s: stored(mesh, s.shape, s.axes), MODEL.specs())
    given: dict[str, Any] = {
        "name": "tiny",
        "model": MODEL,
        "params": jax.device_put(arrays, where),
        "mesh": mesh,
        "compute": Compute(),
        "tokenizer": ByteTokenizer(),
        "eos": frozenset({256}),
        "chat_template": None,
        "special": {},
    }
    return LoadedModel(**given | changes)


def nats(params: Any, ids: list[int]) -> float:
    """By numpy: rows of CONTEXT tokens of one document, each beginning anew."""
    total = 0.0
    for start in range(0, len(ids) - 1, CONTEXT):
        row = np.asarray([ids[start : start + CONTEXT + 1]], np.int32)
        tokens, positions = row[:, :-1], np.arange(row.shape[1] - 1, dtype=np.int32)[None]
        logits = np.asarray(MODEL.apply(params, tokens, jnp.ones_like(tokens), positions, Compute()).logits())[0]
        shares = np.exp(logits.astype(np.float64))
        total -= np.log(shares[np.arange(tokens.shape[1]), row[0, 1:]] / shares.sum(-1)).sum()
    return total


@pytest.mark.parametrize("shape", [ONE, EIGHT], ids=str)
def test_the_loss_of_two_documents(tmp_path: Path, shape: MeshShape) -> None:
    texts = ["The mill stands by the river, — and stood.", "x"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    reporter = RecordingReporter()
    report = evaluate_text(loaded(shape), str(tmp_path), context=CONTEXT, rows=2, reporter=reporter)
    ids = [[*text.encode(), 256] for text in texts]
    assert len(ids[0]) == 45, "the second document begins inside the third row"
    predicted = sum(len(document) - 1 for document in ids)
    assert (report.documents, report.tokens) == (2, predicted)
    wanted = sum(nats(loaded().params, document) for document in ids)
    assert report.loss * report.tokens == pytest.approx(wanted, rel=1e-5)
    assert report.text_bytes == 44 + 1 - 2, "the first byte of each is given"
    assert reporter.updates[-1] == (3, 3)


def test_a_text_shorter_than_the_context_is_one_row(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("abc")
    report = evaluate_text(loaded(), str(file), context=2048, rows=8)
    assert report.loss * report.tokens == pytest.approx(nats(loaded().params, [*b"abc", 256]), rel=1e-5)


def test_what_stands_in_front_of_every_text() -> None:
    class Opened(ByteTokenizer):
        def encode_prompt(self, text: str) -> np.ndarray:
            return np.asarray([7, 8, *self.encode(text).tolist(), 9], np.int32)

    assert opening_of(ByteTokenizer()) == ()
    assert opening_of(Opened()) == (7, 8)
    language = language_of(loaded(tokenizer=Opened(), special={"bos_token": "b"}))
    assert (language.opening, language.prefix, language.prefix_text) == ((7, 8), ord("b"), "b")
    plain = language_of(loaded())
    assert (plain.prefix, plain.prefix_text, plain.render) == (256, None, None)


def test_answers_end_at_a_stop_text_and_not_before() -> None:
    write = writer_of(loaded())
    prompts = [list(b"The mill"), list(b"river and")]
    free = write(prompts, GenerationRequest(max_tokens=12, stop=()))
    assert [len(answer) for answer in free] == [12, 12]
    decode = ByteTokenizer().decode
    stop = decode(free[0][3:5])
    assert stop not in decode(free[0][:4]), "another seed is needed"
    stopped = write(prompts, GenerationRequest(max_tokens=12, stop=(stop,)))
    assert stopped[0] == free[0][:5]
    assert write(prompts, GenerationRequest(max_tokens=12, stop=())) == free


def test_the_context_is_the_checkpoint_s_or_the_run_s(tmp_path: Path) -> None:
    dimensions = {"n_positions": 64, "n_ctx": 32, "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    content = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **dimensions}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert longest_context(str(tmp_path)) == 64
    run = tmp_path / "run"
    run.mkdir()
    model = "{layers: 1, embed: 16, heads: 2, mlp: 24}"
    (run / "job.yaml").write_text(f"name: run\nmodel: {model}\ndata: {{path: x.txt}}\nsequence: 96\nsteps: 1\n")
    assert longest_context(str(run)) == 96


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["runs/x"], "needs --data or --tasks"),
        (["runs/x", "--data", "nowhere.txt"], "--data: nowhere.txt does not exist"),
        (["runs/x", "--data", "nowhere.txt", "--limit", "3"], "--limit is for --tasks"),
        (["runs/x", "--data", "nowhere.txt", "--chat"], "--chat is for --tasks"),
    ],
)
def test_what_is_wrong_is_said_before_any_weight_is_read(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *words]) == 2
    assert what in capsys.readouterr().err
