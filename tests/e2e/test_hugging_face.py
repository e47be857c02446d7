"""docs/how-to/huggingface.md by its own commands: from a name on a hub to a folder that transformers loads.

The hub is a local server that speaks the hub's routes; the client is the real one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "unit" / "hub"))

pytestmark = pytest.mark.torch

PAGE = (ROOT / "docs/how-to/huggingface.md").read_text()
PROMPT = "The gardener"
NEW_TOKENS = 32


def publish(folder: Path) -> None:
    """A tiny Llama with a tokenizer of its own, as transformers writes them."""
    import tokenizers
    import torch
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([text()], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    fast.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def text() -> str:
    lines = [f"The gardener counts {n} apples, {n * n} pears and {n % 7} quinces before the rain." for n in range(300)]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's job and commands, carried out."""
    from hub_server import HubServer

    folder = tmp_path_factory.mktemp("hub")
    publish(folder / "repositories" / "owner" / "name")
    job = re.search(r"```yaml title=\"job.yaml\"\n(.*?)```", PAGE, re.DOTALL)
    commands = re.findall(r"^\$ (forerun .*)$", PAGE, re.MULTILINE)
    assert job
    assert commands == ["forerun export runs/first --to my-model"]
    (folder / "job.yaml").write_text(job[1])
    (folder / "text").write_text(text())
    with HubServer(folder / "repositories") as server:
        env = {
            **os.environ,
            "HF_ENDPOINT": server.endpoint,
            "HF_HOME": str(folder / "cache"),
            "HF_HUB_DISABLE_XET": "1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT / "src"),
            "XDG_CACHE_HOME": str(folder / "xdg"),
        }
        for command in ("forerun train job.yaml optimizer.lr=1e-3", *commands):
            words = [sys.executable, "-m", "forerun", *command.split()[1:]]
            done = subprocess.run(words, cwd=folder, env=env, text=True, capture_output=True)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        asked = [request.path for request in server.requests]
    assert any(path.endswith("model.safetensors") for path in asked)
    (folder / "said").write_text(done.stdout)
    return folder


def test_it_says_what_was_proven(work: Path) -> None:
    said = (work / "said").read_text()
    assert "done: my-model" in said
    assert "to the last bit" in said
    assert "21 of 21 tensors differ from owner/name" in said


def test_transformers_computes_the_same(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax
    import jax.numpy as jnp
    import torch
    import transformers

    from forerun.nn.compute import Compute
    from forerun.trained_model.load_model import load_model

    monkeypatch.chdir(work)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained("my-model", dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained("my-model")
    ours = load_model("./my-model", device="cpu", devices=1, dtype="float32")
    ids = tokenizer(PROMPT)["input_ids"]
    assert ids == ours.tokenizer.encode(PROMPT).tolist()
    assert "user: hello" in tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    answer = theirs.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    with torch.no_grad():
        expected = theirs(answer).logits[0].numpy()

    whole = jnp.asarray(answer.numpy(), jnp.int32)
    positions = jnp.arange(whole.shape[1], dtype=jnp.int32)[None]
    got = jax.jit(lambda p: ours.model.apply(p, whole, jnp.ones_like(whole), positions, Compute()).logits())(
        ours.params
    )[0]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    here = slice(len(ids) - 1, -1)
    got = got.at[:, 0].set(-jnp.inf)  # the end is not among the first tokens, by min_new_tokens
    chosen = np.asarray(jnp.argmax(got, axis=-1))[here]
    second, first = np.sort(expected[here, 1:], axis=-1)[:, -2:].T
    clear = first - second > 2e-4  # nearer ones may change places within the difference that is allowed above
    assert clear.mean() > 0.9
    assert chosen[clear].tolist() == answer[0, len(ids) :].numpy()[clear].tolist(), "the same greedy tokens"


def test_the_folder_is_a_run_of_the_hub_s_commit(work: Path) -> None:
    from forerun.config.load import load

    revision = load(work / "runs/first/job.yaml").job.model.revision
    assert revision is not None
    assert len(revision) == 40
    card = (work / "my-model/README.md").read_text()
    assert "base_model: owner/name" in card
    assert revision in card
