"""The keys of a job are a promise: a new or a lost one is a conscious change of this list."""

from __future__ import annotations

from forerun.config import keys

KEYS = """
name seed device devices sequence batch micro_batch steps epochs attention loss_chunk log_every runs
model.name model.layers model.embed model.heads model.kv_heads model.head_dim model.mlp model.vocab model.tied
model.qkv_bias model.qk_norm model.window model.rope_theta model.norm_eps model.options
model.rope_scaling.factor model.rope_scaling.low model.rope_scaling.high model.rope_scaling.original
data.path data.tokenizer
optimizer.lr optimizer.schedule optimizer.warmup optimizer.final_lr optimizer.weight_decay optimizer.b1 optimizer.b2
optimizer.eps optimizer.clip optimizer.ema
mesh.data mesh.fsdp mesh.tp
remat.policy remat.keep remat.offload
precision.params precision.compute
checkpoint.every checkpoint.keep
sample.prompt sample.tokens
"""


def test_the_keys_of_a_job_are_frozen() -> None:
    assert sorted(keys.leaf_keys()) == sorted(KEYS.split())


def test_the_shorthands_are_frozen() -> None:
    assert keys.shorthands() == {"model": "name", "data": "path", "remat": "policy"}
