"""Tokenizers of a few hundred tokens, made on the spot, and chat templates of the kinds that are in use."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|head|>", "<s>", "</s>", "[INST]", "[/INST]"]
TEXT = "the quick brown fox jumps over the lazy dog, and then the user and the assistant say Yes. No. hello world\n\n"


@cache
def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen; `<think>` is an added token that is not special."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT] * 4, trainer)
    made.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return made


@cache
def metaspace(scheme: str) -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral: a word begins with ▁, and the first word of a text gets one."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace()
    letters = sorted(set(TEXT + "<|>_[]/!?xIST'"))
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIALS], initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator([TEXT] * 4, trainer)
    return made


def saved(made: tokenizers.Tokenizer, folder: Path) -> str:
    file = folder / "tokenizer.json"
    made.save(str(file))
    return str(file)


TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama": "{{ '<s>' }}{% for m in messages %}{{ '<|head|>' + m.role + '<|head|>\n\n' }}"
    "{{ m.content|trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|head|>\n\n' }}{% endif %}",
    "mistral": "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}{% else %}{{ raise_exception('only two roles') }}"
    "{% endif %}{% endfor %}",
    "words": "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
}
# As Qwen3's: what was thought is kept in the last turn only, where an empty thought stands if there was none.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and loop.last %}"
    "{% if '</think>' in m.content %}{{ m.content }}{% else %}{{ '<think>\n\n</think>\n\n' + m.content }}{% endif %}"
    "{% else %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHATS = [
    [said("user", "hello"), said("assistant", "Yes.")],
    [said("user", "Yes."), said("assistant", "Yes."), said("user", "Yes."), said("assistant", "No.\n\n")],
    [said("user", "Grüße 😀"), said("assistant", "  é😀 the quick\n"), said("user", " "), said("assistant", "日本")],
    [said("user", "a"), said("assistant", "b"), said("user", "c")],
]


def rendered(template: str, messages: list[Any], *, prompt: bool) -> str:
    """By jinja2 alone."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(messages=messages, add_generation_prompt=prompt)
