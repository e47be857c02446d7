"""Names of keys about models, data and methods in other trainers."""

from __future__ import annotations

from forerun.config.migration import method_values as m
from forerun.config.migration import values as v
from forerun.config.migration.conversion import (
    ForeignKey,
    flag,
    missing,
    number,
    same,
    text,
    unneeded,
    unsupported,
    whole,
)
from forerun.config.migration.source_datasets import converted_datasets
from forerun.config.migration.training_names import ALL, AXOLOTL, SCRIPTS, TRAINER

CONFIG = "config.json"
MODEL = (
    ForeignKey("model_name_or_path model_name model_id base_model pretrained_model_name_or_path checkpoint_path "
               "load_parameters_path initialize_from_hf model_path", f"{ALL}, MaxText, Levanter", "model",
               text("model.name"), "Qwen/Qwen3-0.6B"),
    ForeignKey("model_revision revision_of_model", ALL, "model.revision",
               lambda value, _: unneeded("the main branch is the default") if value == "main"
               else text("model.revision")(value, _), "v1"),
    ForeignKey("num_hidden_layers num_layers n_layer n_layers base_num_decoder_layers", f"{CONFIG}, MaxText",
               "model.layers", whole("model.layers"), 12),
    ForeignKey("hidden_size n_embd d_model base_emb_dim hidden_dim embed_dim", f"{CONFIG}, MaxText", "model.embed",
               whole("model.embed"), 768),
    ForeignKey("num_attention_heads num_heads n_head n_heads base_num_query_heads", f"{CONFIG}, MaxText",
               "model.heads", whole("model.heads"), 12),
    ForeignKey("num_key_value_heads n_kv_heads num_kv_heads base_num_kv_heads", f"{CONFIG}, MaxText",
               "model.kv_heads", whole("model.kv_heads"), 4),
    ForeignKey("intermediate_size ffn_dim base_mlp_dim mlp_dim", f"{CONFIG}, MaxText", "model.mlp",
               whole("model.mlp"), 3072),
    ForeignKey("vocab_size", f"{CONFIG}, MaxText", "model.vocab", whole("model.vocab"), 32000),
    ForeignKey("tie_word_embeddings tie_embeddings", CONFIG, "model.tied", flag("model.tied", True, False), True),
    ForeignKey("rms_norm_eps layer_norm_eps", CONFIG, "model.norm_eps", number("model.norm_eps"), 1e-6),
    ForeignKey("sliding_window", CONFIG, "model.window", whole("model.window"), 4096),
    ForeignKey("h_cycles", SCRIPTS, "model.options", whole("model.options.high_cycles"), 7),
    ForeignKey("l_cycles", SCRIPTS, "model.options", whole("model.options.low_cycles"), 5),
)  # fmt: skip
DATA = (
    ForeignKey("dataset_name dataset dataset_path hf_path train_file train_data train_files data_files hf_train_files "
               "dataset_id train_dataset data_path data_dir", f"{TRAINER}, MaxText, scripts", "data.path",
               v.data_path, "trl-lib/Capybara"),
    ForeignKey("datasets pretraining_dataset", "axolotl, TRL", "data.path", converted_datasets,
               [{"path": "mlabonne/FineTome-100k", "type": "chat_template", "field_messages": "conversations"}]),
    ForeignKey("dataset_text_field text_field text_column train_data_columns", f"{TRAINER}, MaxText", "data.columns",
               lambda value, _: unneeded("text is the standard name") if value == "text"
               else same("data.columns.text")(value, _), "content"),
    ForeignKey("tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_config hf_assets_path",
               f"{TRAINER}, MaxText, torchtitan", "data.tokenizer", text("data.tokenizer"), "tokenizer.json"),
    ForeignKey("chat_template chat_template_path", "axolotl, TRL", "data.chat_template", m.template, "chatml"),
    ForeignKey("tokens added_tokens new_tokens", AXOLOTL, "model.new_tokens", m.new_tokens, ["<think>"]),
    ForeignKey("default_system_message system_prompt", "axolotl, TRL", "data.system", m.system_prompt,
               "You are brief."),
    ForeignKey("val_set_size validation_split eval_split val_split test_size test_split_size validation_size",
               "axolotl, TRL, scripts", "data.validation", v.share_held_out, 0.05),
    ForeignKey("dataset_prepared_path dataset_cache_dir", AXOLOTL, "data.store", text("data.store"), "prepared"),
    ForeignKey("dataset_num_proc dataset_processes preprocessing_num_workers", f"{TRAINER}, axolotl", "data.workers",
               whole("data.workers"), 4),
    ForeignKey("packing sample_packing", "TRL, axolotl", "data.packing", m.packing, True),
    ForeignKey("truncation_mode", "TRL", "data.too_long",
               lambda value, _: same("data.too_long")(value, _) if value in ("keep_start", "keep_end")
               else unsupported("data.too_long is keep_start or keep_end"), "keep_start"),
    ForeignKey("train_on_inputs train_on_prompt", AXOLOTL, "data.loss_on", m.loss_on_inputs, False),
    ForeignKey("assistant_only_loss completion_only_loss train_on_completions_only train_on_responses_only", "TRL",
               "data.loss_on", m.answers_only, True),
    ForeignKey("max_samples max_train_samples num_train_samples train_samples", SCRIPTS, "data.limit",
               lambda value, given: v.to_if_accepted("data.limit", value, "name a part of the files in data.path"),
               1000),
    ForeignKey("worker_buffer_size dataloader_prefetch_factor prefetch_factor prefetch_buffer_size",
               f"{TRAINER}, scripts", "data.prefetch",
               lambda value, given: v.to_if_accepted("data.prefetch", value, "a thread builds batches ahead"), 4),
)  # fmt: skip
METHODS = (
    ForeignKey("adapter use_peft use_lora", "axolotl, TRL", "lora.rank", m.adapter, "lora"),
    ForeignKey("lora_r lora_rank recovery_r r", f"{ALL}, PEFT", "lora.rank", whole("lora.rank"), 16),
    ForeignKey("lora_alpha", f"{ALL}, PEFT", "lora.alpha", number("lora.alpha"), 32),
    ForeignKey("lora_dropout", f"{ALL}, PEFT", "lora.dropout", number("lora.dropout"), 0.05),
    ForeignKey("lora_target_modules target_modules", f"{ALL}, PEFT", "lora.targets", m.targets, ["q_proj", "v_proj"]),
    ForeignKey("lora_target_linear", AXOLOTL, "lora.targets", flag("lora.targets", "all-linear", None), True),
    ForeignKey("use_rslora peft_use_rslora", ALL, "lora.rslora", flag("lora.rslora", True, None), True),
    ForeignKey("use_dora peft_use_dora", ALL, "lora.dora", flag("lora.dora", True, None), True),
    ForeignKey("load_in_4bit", ALL, "lora.base", m.in_four_bits, True),
    ForeignKey("load_in_8bit", ALL, "lora.base", m.in_eight_bits, True),
    ForeignKey("bnb_4bit_quant_type", "TRL", "lora.base", m.quantization_type, "nf4"),
    ForeignKey("lora_model_dir adapter_name_or_path", AXOLOTL, "lora.start", text("lora.start"), "./adapter"),
    ForeignKey("lora_modules_to_save modules_to_save", f"{ALL}, PEFT", "",
               missing("embeddings and the output layer stay frozen next to adapters"), ["embed_tokens"]),
    ForeignKey("qat.weight_dtype", AXOLOTL, "qat.weights", m.integer_type("qat.weights"), "int4"),
    ForeignKey("qat.activation_dtype", AXOLOTL, "qat.activations", m.integer_type("qat.activations"), "int8"),
    ForeignKey("qat.group_size", AXOLOTL, "qat.group", whole("qat.group"), 32),
    ForeignKey("rl rlhf", AXOLOTL, "preferences.loss", m.preference, "dpo"),
    ForeignKey("loss_type dpo_loss_type", "TRL, axolotl", "preferences.loss", m.preference_loss, "sigmoid"),
    ForeignKey("beta", "TRL", "preferences.beta", m.beta, 0.1),
    ForeignKey("dpo_beta rl_beta", "axolotl, scripts", "preferences.beta", number("preferences.beta"), 0.1),
    ForeignKey("label_smoothing dpo_label_smoothing", "TRL, axolotl", "preferences.smoothing", m.smoothing, 0.1),
    ForeignKey("precompute_ref_log_probs", "TRL, axolotl", "preferences.reference", m.reference, True),
    ForeignKey("teacher_model_name_or_path teacher_model kd_teacher", "TRL, scripts", "distil.teacher",
               text("distil.teacher"), "Qwen/Qwen3-4B"),
    ForeignKey("kd_cache_dir", SCRIPTS, "distil.cache",
               lambda value, given: unsupported("name the teacher, too: distil.teacher; `forerun cache` writes it")
               if given.first("teacher_model_name_or_path teacher_model kd_teacher") is None
               else text("distil.cache")(value, given), "caches/L1024_K128"),
    ForeignKey("kd_temperature", "axolotl, scripts", "distil.temperature",
               lambda value, given: unsupported("it needs distil.teacher")
               if given.first("teacher_model_name_or_path teacher_model kd_teacher") is None
               else number("distil.temperature")(value, given), 2.0),
)  # fmt: skip
