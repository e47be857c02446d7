"""GPT-2: learned positions, biases in all layers, and matrices with the inputs first."""

from __future__ import annotations

from forerun.models.decoder_config import Gpt2Config
from forerun.models.families import base
from forerun.models.families.settings import Settings
from forerun.models.keys import fused, tensor

_LAYER = "transformer.h.{}."


def read(s: Settings) -> Gpt2Config:
    s.only("activation_function", "gelu_new", "gelu_pytorch_tanh", default="gelu_new")
    s.only("scale_attn_weights", True, default=True)
    s.only("scale_attn_by_inverse_layer_idx", False, default=False)
    s.only("add_cross_attention", False, default=False)
    s.only("tie_word_embeddings", True, default=True)
    for name in base.DROPOUTS:
        s.take(name)
    embed = s.need("n_embd")
    return Gpt2Config(
        layers=s.need("n_layer"),
        embed=embed,
        heads=s.need("n_head"),
        mlp=s.take("n_inner", 4 * embed),
        vocab=s.need("vocab_size"),
        positions=s.need("n_positions"),
        norm_eps=float(s.take("layer_norm_epsilon", 1e-5)),
    )


TABLE = (
    tensor("transformer.wte.weight", "embed", "V E"),
    tensor("transformer.wpe.weight", "positions", "P E"),
    tensor(_LAYER + "ln_1.weight", "blocks.attention_norm", "E"),
    tensor(_LAYER + "ln_1.bias", "blocks.attention_norm_bias", "E"),
    fused(
        _LAYER + "attn.c_attn.weight",
        ("blocks.query", "E (HD)"),
        ("blocks.key", "E (HD)"),
        ("blocks.value", "E (HD)"),
        along=1,
    ),
    fused(
        _LAYER + "attn.c_attn.bias",
        ("blocks.query_bias", "(HD)"),
        ("blocks.key_bias", "(HD)"),
        ("blocks.value_bias", "(HD)"),
    ),
    tensor(_LAYER + "attn.c_proj.weight", "blocks.out", "(HD) E"),
    tensor(_LAYER + "attn.c_proj.bias", "blocks.out_bias", "E"),
    tensor(_LAYER + "ln_2.weight", "blocks.mlp_norm", "E"),
    tensor(_LAYER + "ln_2.bias", "blocks.mlp_norm_bias", "E"),
    tensor(_LAYER + "mlp.c_fc.weight", "blocks.up", "E F"),
    tensor(_LAYER + "mlp.c_fc.bias", "blocks.up_bias", "F"),
    tensor(_LAYER + "mlp.c_proj.weight", "blocks.down", "F E"),
    tensor(_LAYER + "mlp.c_proj.bias", "blocks.down_bias", "E"),
    tensor("transformer.ln_f.weight", "norm", "E"),
    tensor("transformer.ln_f.bias", "norm_bias", "E"),
)
FAMILY = base.Family("gpt2", "GPT2LMHeadModel", read, TABLE)
