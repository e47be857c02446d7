"""Names of keys and values in other trainers. An error about an unknown name can then suggest the right one."""

from __future__ import annotations

# Our key: the names in other trainers (last part of the name, lower case, underscores). Misspelled names such as
# `btach` are found without this table.
_KEYS = {
    "optimizer.name": "optim optimizer_type optimizer_name opt_type",
    "optimizer.lr": "learning_rate peak_lr max_lr base_lr",
    "optimizer.warmup": "warmup_ratio warmup_steps num_warmup_steps lr_warmup_steps",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type scheduler lr_schedule",
    "optimizer.final_lr": "min_lr min_lr_ratio",
    "optimizer.clip": "max_grad_norm grad_clip gradient_clipping clip_grad clip_norm gradient_clip_val",
    "optimizer.weight_decay": "wd",
    "optimizer.b1": "beta1 adam_beta1",
    "optimizer.b2": "beta2 adam_beta2",
    "optimizer.eps": "adam_epsilon epsilon",
    "batch": "batch_size global_batch_size train_batch_size",
    "micro_batch": "micro_batch_size per_device_train_batch_size gradient_accumulation_steps grad_accum accumulation",
    "sequence": "max_length max_seq_length max_seq_len seq_length seq_len sequence_length block_size context_length "
    "context cutoff_len",
    "steps": "max_steps num_steps total_steps train_steps max_iters num_train_steps",
    "epochs": "num_train_epochs num_epochs max_epochs",
    "model": "model_name model_name_or_path model_id base_model pretrained_model_name_or_path checkpoint_path",
    "data.path": "dataset dataset_name dataset_path train_file train_data datasets",
    "data.tokenizer": "tokenizer_name tokenizer_path",
    "data.validation": "val_set_size validation_split eval_split val_split test_size",
    "lora.rank": "lora_r r",
    "lora.alpha": "lora_alpha",
    "lora.targets": "target_modules lora_target_modules",
    "checkpoint.every": "save_steps save_every save_interval",
    "checkpoint.keep": "save_total_limit",
    "validation.every": "eval_steps eval_every eval_interval",
    "log_every": "logging_steps log_interval",
    "precision.compute": "dtype torch_dtype bf16 fp16 compute_dtype",
    "remat": "gradient_checkpointing activation_checkpointing",
    "runs": "output_dir out_dir",
    "seed": "random_seed",
    "track.to": "report_to wandb",
    "preferences.beta": "dpo_beta",
}
KEYS = {alias: key for key, names in _KEYS.items() for alias in names.split()}
VALUES = {
    "device": {"cuda": "gpu", "nvidia": "gpu", "rocm": "gpu", "amd": "gpu", "mps": "cpu", "x86": "cpu", "host": "cpu"},
    "precision.params": {"fp32": "float32", "bf16": "bfloat16", "f32": "float32", "float": "float32"},
    "precision.compute": {"fp32": "float32", "bf16": "bfloat16", "f32": "float32", "float": "float32"},
    "optimizer.schedule": {
        "cosine_with_warmup": "cosine",
        "none": "constant",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "wsd",
        "cosine_with_restarts": "cosine_restarts",
        "cosine_with_min_lr": "cosine",
        "rsqrt": "inverse_sqrt",
    },
}


def key_alias(name: str) -> str | None:
    """Return the key that `name` of another trainer means, or None. `name` may be an option such as --learning-rate."""
    plain = name.rpartition(".")[2].lstrip("-").replace("-", "_").lower()
    return KEYS.get(plain)


def value_alias(key: str, value: object) -> str | None:
    """Return the value of `key` that `value` of another trainer means, or None."""
    return VALUES.get(key, {}).get(str(value).lower())
