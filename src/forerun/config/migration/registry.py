"""All names of keys in TRL, transformers, axolotl, MaxText, Levanter, torchtitan and common scripts.

Each name has the conversion of its values, or the reason why forerun does not need it or does not have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from forerun.config.migration import method_values as m
from forerun.config.migration import values as v
from forerun.config.migration.conversion import (
    Conversion,
    ForeignKey,
    ForeignValues,
    accepts,
    flag,
    impossible,
    missing,
    nothing,
    number,
    plain_name,
    same,
    steps,
    text,
    unneeded,
    unsupported,
    whole,
)
from forerun.config.migration.source_datasets import converted_datasets
from forerun.config.migration.values import ACCUMULATION, GLOBAL, PER_DEVICE, batch

TRAINER = "transformers, TRL"
AXOLOTL = "axolotl"
MAXTEXT = "MaxText"
SCRIPTS = "scripts"
ALL = "transformers, TRL, axolotl"
# Names that are a section in some trainers and a value in others.
_SECTIONS = ("optimizer", "lr_scheduler", "spawn")

BATCH = (
    ForeignKey(PER_DEVICE, f"{ALL}, MaxText, torchtitan, DeepSpeed", "batch", batch, 4),
    ForeignKey(ACCUMULATION, f"{ALL}, Lightning", "micro_batch", batch, 8),
    ForeignKey(f"{GLOBAL} batch_size", "Levanter, torchtitan, scripts", "batch", batch, 64),
    ForeignKey("max_length max_seq_length max_seq_len seq_length seq_len sequence_len sequence_length block_size "
               "context_length max_context_length context cutoff_len max_target_length train_seq_len model_max_length "
               "max_position_embeddings", f"{ALL}, MaxText, Levanter, torchtitan", "sequence", whole("sequence"), 2048),
    ForeignKey("max_steps num_steps total_steps train_steps max_iters num_train_steps num_iterations training_steps",
               f"{ALL}, Levanter", "steps", steps("steps"), 1000),
    ForeignKey("num_train_epochs num_epochs max_epochs n_epochs train_epochs", ALL, "epochs", v.epochs, 3),
    ForeignKey("epochs", SCRIPTS, "epochs", v.epochs, 3),
    ForeignKey("steps", "MaxText, torchtitan", "steps", steps("steps"), 1000),
)  # fmt: skip
OPTIMIZER = (
    ForeignKey("learning_rate lr peak_lr max_lr base_lr", f"{ALL}, MaxText, Levanter", "optimizer.lr",
               number("optimizer.lr"), 2e-5),
    ForeignKey("optim optimizer optim_type optimizer_type opt_type optimizer_name", f"{ALL}, MaxText", "optimizer.name",
               v.optimizer, "adamw_torch"),
    ForeignKey("lr_scheduler_type lr_scheduler scheduler lr_schedule lr_scheduler_name decay_type", f"{ALL}, Levanter",
               "optimizer.schedule", v.schedule, "cosine"),
    ForeignKey("lr_scheduler_kwargs", TRAINER, "optimizer.final_lr", v.schedule_arguments, {"min_lr_rate": 0.1}),
    ForeignKey("warmup_ratio warmup_steps num_warmup_steps lr_warmup_steps warmup_steps_fraction warmup_fraction",
               f"{ALL}, MaxText, torchtitan", "optimizer.warmup", v.warmup, 0.1),
    ForeignKey("min_lr eta_min lr_min", "axolotl, scripts", "optimizer.final_lr", v.final_lr, 0),
    ForeignKey("min_lr_ratio cosine_min_lr_ratio min_lr_rate learning_rate_final_fraction min_lr_factor "
               "cosine_learning_rate_final_fraction", "axolotl, Levanter, MaxText, torchtitan", "optimizer.final_lr",
               number("optimizer.final_lr"), 0.1),
    ForeignKey("max_grad_norm grad_clip gradient_clipping clip_grad clip_norm gradient_clip_val grad_clip_norm "
               "gradient_clipping_threshold max_norm gradient_clip_norm", f"{ALL}, MaxText, torchtitan",
               "optimizer.clip", v.clip, 1.0),
    ForeignKey("weight_decay wd adam_weight_decay", f"{ALL}, MaxText", "optimizer.weight_decay",
               number("optimizer.weight_decay"), 0.01),
    ForeignKey("adam_beta1 beta1 adam_b1", f"{ALL}, MaxText", "optimizer.b1", number("optimizer.b1"), 0.9),
    ForeignKey("adam_beta2 beta2 adam_b2", f"{ALL}, MaxText", "optimizer.b2", number("optimizer.b2"), 0.999),
    ForeignKey("adam_epsilon epsilon adam_eps", f"{ALL}, MaxText", "optimizer.eps", number("optimizer.eps"), 1e-8),
    ForeignKey("ema use_ema ema_decay ema_rate", SCRIPTS, "optimizer.ema", v.ema, True),
)  # fmt: skip
PRECISION = (
    ForeignKey("bf16 bfloat16 use_bf16", ALL, "precision.compute", v.bf16, True),
    ForeignKey("fp16 float16 use_fp16 half_precision", ALL, "precision.compute", v.fp16, True),
    ForeignKey("dtype torch_dtype compute_dtype forward_dtype mixed_precision_param bnb_4bit_compute_dtype",
               "TRL, MaxText, torchtitan, scripts", "precision.compute", v.dtype("precision.compute"), "bfloat16"),
    ForeignKey("weight_dtype param_dtype master_dtype", MAXTEXT, "precision.params", v.dtype("precision.params"),
               "float32"),
    ForeignKey("mp mixed_precision", "Levanter, accelerate", "precision.compute", v.mixed_precision,
               "p=f32,c=bfloat16"),
    ForeignKey("gradient_checkpointing use_gradient_checkpointing activation_checkpointing remat_policy "
               "activation_checkpoint.mode gradient_checkpointing_enable", f"{ALL}, MaxText, torchtitan",
               "remat.policy", v.remat, True),
)  # fmt: skip
DEVICE = (
    ForeignKey("device_type accelerator backend_type hardware pjrt_device", "MaxText, scripts, Lightning", "device",
               v.device, "cuda"),
    ForeignKey("use_tpu tpu", SCRIPTS, "device", v.device_switch("tpu"), True),
    ForeignKey("use_cpu no_cuda", TRAINER, "device", v.device_switch("cpu"), True),
    ForeignKey("nprocs num_processes num_chips tpu_num_cores nproc_per_node num_devices tpu_num_devices gpu_count",
               "torch_xla, accelerate, torchrun", "devices", v.device_number, 8),
    ForeignKey("ici_fsdp_parallelism data_parallel_shard_degree dp_shard_size mesh_fsdp fsdp_size fsdp_parallelism",
               "MaxText, torchtitan, axolotl", "mesh.fsdp", v.axis("mesh.fsdp"), -1),
    ForeignKey("ici_data_parallelism data_parallel_replicate_degree dp_replicate_size mesh_data dp_size",
               "MaxText, torchtitan, axolotl", "mesh.data", v.axis("mesh.data"), 2),
    ForeignKey("ici_tensor_parallelism tensor_parallel_degree tensor_parallel_size mesh_tp tp_size model_parallelism",
               "MaxText, torchtitan, axolotl", "mesh.tp", v.axis("mesh.tp"), 2),
    ForeignKey("ici_sequence_parallelism ici_context_parallelism context_parallel_size context_parallel_degree "
               "sequence_parallel_degree sequence_parallel_size", "MaxText, axolotl, torchtitan", "",
               v.one("write mesh.context, and the batch over all devices"), 1),
    ForeignKey("ici_expert_parallelism expert_parallel_degree expert_parallel_size", "MaxText, torchtitan, axolotl", "",
               v.one("write mesh.expert, and the batch over all devices"), 1),
    ForeignKey("ici_pipeline_parallelism pipeline_parallel_degree pipeline_parallel_size",
               "MaxText, torchtitan, axolotl", "", v.one("forerun has the axes data, fsdp and tp"), 1),
    ForeignKey("dcn_data_parallelism dcn_fsdp_parallelism dcn_tensor_parallelism num_slices", MAXTEXT, "",
               v.one("set mesh.slices to the number of slices"), 1),
)  # fmt: skip
RUN = (
    ForeignKey("save_steps save_every save_interval checkpoint_interval checkpoint_period checkpoint_every "
               "checkpoint.interval checkpointer.save_interval", f"{ALL}, MaxText, torchtitan", "checkpoint.every",
               v.every("checkpoint.every", "save_strategy"), 500),
    ForeignKey("save_strategy", ALL, "checkpoint.every",
               v.strategy("checkpoint.every", "forerun chooses the interval"), "epoch"),
    ForeignKey("saves_per_epoch", AXOLOTL, "checkpoint.every",
               missing("checkpoint.every counts steps; without it, forerun chooses the interval"), 1),
    ForeignKey("save_total_limit keep_latest_k max_to_keep", f"{ALL}, torchtitan", "checkpoint.keep",
               steps("checkpoint.keep"), 2),
    ForeignKey("load_best_model_at_end", TRAINER, "checkpoint.keep_best",
               flag("checkpoint.keep_best", 1, None, "the best checkpoint is kept: forerun export RUN --step best"),
               True),
    ForeignKey("checkpoint_dir checkpoint_folder", SCRIPTS, "checkpoint.folder", text("checkpoint.folder"),
               "checkpoints"),
    ForeignKey("eval_steps eval_every eval_interval steps_per_eval val_check_interval", f"{ALL}, Levanter, MaxText",
               "validation.every", v.every("validation.every", "eval_strategy evaluation_strategy"), 100),
    ForeignKey("eval_strategy evaluation_strategy", ALL, "validation.every",
               v.strategy("validation.every", "it is checkpoint.every, or 100"), "epoch"),
    ForeignKey("evals_per_epoch", AXOLOTL, "validation.every",
               missing("validation.every counts steps; without it, it is checkpoint.every, or 100"), 4),
    ForeignKey("early_stopping_patience", AXOLOTL, "validation.patience", steps("validation.patience"), 3),
    ForeignKey("logging_steps log_interval log_freq log_period log_every_n_steps", f"{ALL}, MaxText, torchtitan",
               "log_every", v.every("log_every", "logging_strategy"), 10),
    ForeignKey("output_dir out_dir base_output_directory dump_folder save_dir", f"{ALL}, MaxText, torchtitan", "runs",
               v.output_folder, "./outputs/lora-out"),
    ForeignKey("run_name wandb_name wandb_run_name", f"{ALL}, MaxText", "name", v.run_name, "first-run"),
    ForeignKey("seed random_seed manual_seed init_weights_seed", ALL, "seed", whole("seed"), 42),
    ForeignKey("report_to log_with loggers", TRAINER, "track.to", v.tracker, "tensorboard"),
    ForeignKey("use_tensorboard enable_tensorboard", "axolotl, torchtitan", "track.to",
               v.own_tracker("tensorboard"), True),
    ForeignKey("use_mlflow", AXOLOTL, "track.to", v.own_tracker("mlflow"), True),
    ForeignKey("mlflow_tracking_uri", AXOLOTL, "track.url", text("track.url"), "http://127.0.0.1:5000"),
    ForeignKey("mlflow_experiment_name", AXOLOTL, "track.experiment", text("track.experiment"), "sft"),
    ForeignKey("wandb use_wandb", AXOLOTL, "track.to", v.own_tracker("wandb"), True),
    ForeignKey("wandb_project", AXOLOTL, "track.project", v.project("wandb"), "my-project"),
    ForeignKey("wandb_entity", AXOLOTL, "track.entity", text("track.entity"), "my-team"),
    ForeignKey("wandb_mode", AXOLOTL, "", v.wandb_mode, "offline"),
    ForeignKey("use_comet comet_project_name", AXOLOTL, "track.to", v.own_tracker("comet"), True),
    ForeignKey("use_trackio", AXOLOTL, "track.to", v.own_tracker("trackio"), True),
    ForeignKey("trackio_project_name", AXOLOTL, "track.project", v.project("trackio"), "my-project"),
    ForeignKey("project", TRAINER, "track.project", text("track.project"), "my-project"),
    ForeignKey("use_swanlab swanlab_project", AXOLOTL, "track.to", v.own_tracker("swanlab"), True),
)  # fmt: skip


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
    ForeignKey("train_on_inputs train_on_prompt", AXOLOTL, "data.loss_on",
               flag("data.loss_on", "all", "answers"), False),
    ForeignKey("assistant_only_loss completion_only_loss train_on_completions_only train_on_responses_only", "TRL",
               "data.loss_on", flag("data.loss_on", "answers", "all"), True),
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


_KERNEL = "attention: auto chooses the kernel"
_LOADER = "a thread of forerun builds batches ahead of the step"
_SHARDING = "mesh.fsdp splits weights and optimizer state over all devices by default"
_SHAPES = "all rows have the length of `sequence`: shapes never change"
_STRATEGY = "the step is compiled by XLA as one program"


def _other_training(name: str) -> ForeignKey:
    return ForeignKey(
        name, "TRL", "", lambda value, given: impossible("forerun has no training by rewards or diffusion"), 8
    )


def _data_seed(value: object, given: ForeignValues) -> Conversion:
    same = given.first("seed") in (None, value)
    return unneeded("seed also decides the order of the data") if same else Conversion(
        note="seed decides weights and the order of the data together", outcome="unsupported")  # fmt: skip


UNNEEDED = (
    ForeignKey("xmp.spawn spawn notebook_launcher launcher torchrun", "torch_xla", "",
               nothing("one process uses all devices of a host"), 8),
    ForeignKey("mark_step xla_mark_step torch_xla_sync sync_every", "torch_xla", "", nothing(_STRATEGY), True),
    ForeignKey("optimizer_step reduce_gradients all_reduce", "torch_xla", "",
               nothing("the compiled step adds the gradients of all devices"), True),
    ForeignKey("rendezvous", "torch_xla", "", nothing("hosts wait for each other where it is needed"), "before_save"),
    ForeignKey("set_to_none zero_grad", "torch_xla", "", nothing("the compiled step has no stored gradients"), False),
    ForeignKey("loss_scale use_grad_scaler grad_scaler fp16_opt_level fp16_backend half_precision_backend", ALL, "",
               nothing("bfloat16 needs no loss scaling"), True),
    ForeignKey("tf32 bf16_full_eval fp16_full_eval torch_compile torch_compile_backend torch_compile_mode compile jit "
               "jit_mode_eval", ALL, "", nothing(_STRATEGY), True),
    ForeignKey("dataloader_num_workers num_workers dataloader_pin_memory dataloader_persistent_workers pin_memory "
               "dataloader_drop_last drop_last dataloader_in_order persistent_workers "
               "dataloader_multiprocessing_context", ALL, "", nothing(_LOADER), 0),
    ForeignKey("flash_attention attn_implementation xformers_attention sdp_attention flash_attn use_flash_attention_2 "
               "sdpa_attention flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_optimum "
               "eager_attention flex_attention gemma4_hybrid_attn_impl fused_attn_kernel s2_attention", ALL, "",
               nothing(_KERNEL), True),
    ForeignKey("use_liger_kernel liger_kernel_config liger_rope liger_rms_norm liger_glu_activation liger_layer_norm "
               "liger_fused_linear_cross_entropy cut_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
               "unsloth_lora_mlp unsloth_cross_entropy_loss use_kernels liger_cross_entropy liger_rms_norm_gated "
               "chunked_cross_entropy", ALL, "", nothing("XLA fuses operations, and loss_chunk limits the logits"),
               True),
    ForeignKey("fsdp fsdp_config fsdp_version deepspeed fsdp_min_num_params parallelism_config zero_stage "
               "fsdp_transformer_layer_cls_to_wrap ddp ddp_find_unused_parameters ddp_bucket_cap_mb ddp_backend "
               "ddp_broadcast_buffers ddp_static_graph ddp_timeout accelerator_config local_rank device_map "
               "torchdistx_path low_cpu_mem_usage split_batches", ALL, "", nothing(_SHARDING), "full_shard auto_wrap"),
    ForeignKey("pad_to_sequence_len pad_to_multiple_of padding_free group_by_length length_column_name eval_packing "
               "eval_sample_packing padding sample_packing_eff_est total_num_tokens packing_strategy "
               "sample_packing_seq_len_multiplier sample_packing_bin_size pad_token pretrain_multipack_attn "
               "max_packed_sequence_len resize_token_embeddings_to_32x", ALL, "", nothing(_SHAPES), True),
    ForeignKey("shuffle shuffle_dataset dataloader_shuffle shuffle_merged_datasets shuffle_seed", ALL, "",
               nothing("the order is always shuffled, from `seed`"), True),
    ForeignKey("resume_from_checkpoint auto_resume_from_checkpoints resume ignore_data_skip overwrite_output_dir "
               "restore_callback_states_from_checkpoint enable_checkpointing async_checkpointing save_only_model "
               "save_safetensors save_on_each_node enable_jit_checkpoint", f"{ALL}, MaxText", "",
               nothing("the same command resumes; checkpoints are written in the background"), True),
    ForeignKey("per_device_eval_batch_size eval_batch_size eval_accumulation_steps eval_delay eval_on_start "
               "prediction_loss_only eval_do_concat_batches eval_use_gather_object include_for_metrics "
               "batch_eval_metrics eval_table_size eval_max_new_tokens do_eval do_train do_predict label_names "
               "metric_for_best_model greater_is_better", ALL, "",
               nothing("evaluations use the batch of the training; the lowest loss is the best"), 8),
    ForeignKey("gradient_checkpointing_kwargs auto_find_batch_size torch_empty_cache_steps skip_memory_metrics "
               "use_cache average_tokens_across_devices activation_offloading full_determinism disable_dropout "
               "remove_unused_columns dataset_kwargs skip_prepare_dataset strict bnb_4bit_quant_storage "
               "use_bnb_nested_quant bnb_4bit_use_double_quant bnb_config_kwargs local_files_only "
               "precompute_ref_batch_size ignore_bias_buffers", ALL, "",
               nothing("it has no counterpart and no effect on the result"), True),
    ForeignKey("logging_dir logging_strategy logging_first_step logging_nan_inf_filter log_level log_level_replica "
               "log_on_each_node disable_tqdm include_num_input_tokens_seen trackio_space_id trackio_bucket_id "
               "trackio_static_space_id debug wandb_watch wandb_log_model wandb_run_id "
               "loss_watchdog_threshold loss_watchdog_patience", ALL, "",
               nothing("the run's folder has all metrics; the guard watches the loss"), "steps"),
    ForeignKey("model_type tokenizer_type tokenizer_use_fast use_fast tokenizer_legacy is_llama_derived_model "
               "task_type lora_task_type bias lora_fan_in_fan_out processor_type is_mistral_derived_model "
               "base_model_config cls is_falcon_derived_model is_qwen_derived_model tokenizer_use_mistral_common",
               f"{AXOLOTL}, PEFT", "",
               nothing("the checkpoint's config.json decides"), "AutoModelForCausalLM"),
    ForeignKey("hub_token hf_use_auth_token token use_auth_token", ALL, "",
               nothing("the hub's own login is used: HF_TOKEN, or `hf auth login`"), True),
    ForeignKey("from_scratch", "scripts", "",
               nothing("model decides: owner/name has trained weights, a named size has random weights"), True),
    ForeignKey("dataset_type dataset_train_split train_split hf_name dataset_format", f"TRL, {MAXTEXT}", "",
               nothing("the ending of a file decides; of a dataset on the hub, forerun reads the split train"), "hf"),
    ForeignKey("data_seed", TRAINER, "seed", _data_seed, 42),
    ForeignKey("profiler profile_steps use_profiler tensorboard_dir", MAXTEXT, "",
               nothing("`forerun plan` shows where time and memory go"), True),
)  # fmt: skip
MISSING = (
    ForeignKey("neftune_noise_alpha", ALL, "", missing("forerun adds no noise to embeddings"), 5),
    ForeignKey("label_smoothing_factor", TRAINER, "", missing("the loss has no label smoothing"), 0.1),
    ForeignKey("push_to_hub hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision "
               "push_dataset_to_hub", ALL, "",
               missing("forerun export RUN --push owner/name uploads a run after the training",
                       (False, "", "every_save")), "me/model"),
    ForeignKey("optim_args optim_target_modules", TRAINER, "", missing("the optimizer section has all arguments"),
               "betas=0.9"),
    ForeignKey("train_sampling_strategy", TRAINER, "",
               missing("the order of the data is random", ("random",)), "group_by_length"),
    ForeignKey("rpo_alpha ld_alpha loss_weights", "TRL", "",
               missing("preferences has loss, beta, smoothing and reference"), 0.5),
    ForeignKey("liger_loss f_divergence_type f_alpha_divergence_coef use_weighting "
               "discopop_tau sync_ref_model ref_model_mixup_alpha ref_model_sync_steps reference_free "
               "router_aux_loss_coef", "TRL", "",
               missing("preferences has loss, beta, smoothing and reference",
                       (False, 0, 0.0, "reverse_kl", 0.5, 0.05, 0.6, 512, 0.001)), 0.7),
    ForeignKey("max_prompt_length max_completion_length", "TRL", "",
               missing("`sequence` limits a pair; data.too_long decides what is cut"), 512),
    ForeignKey("special_tokens", AXOLOTL, "", m.special_tokens, {"eos_token": "<|im_end|>"}),
    ForeignKey("eos_token eot_tokens add_bos_token", f"{AXOLOTL}, TRL", "",
               missing("the tokenizer of the checkpoint is used unchanged"), ["<|im_end|>"]),
    ForeignKey("trust_remote_code", ALL, "", missing("forerun never runs code of a checkpoint"), True),
    ForeignKey("test_datasets dataset_test_split eval_file validation_file dataset_config", f"{AXOLOTL}, TRL", "",
               missing("data.validation holds out a share of the data", ("", "test")), "test.jsonl"),
    ForeignKey("streaming dataset_streaming", "TRL, axolotl", "",
               missing("files are fetched before the first step"), True),
    ForeignKey("plugins", AXOLOTL, "", m.plugins, ["axolotl.integrations.spectrum.SpectrumPlugin"]),
    ForeignKey("unfrozen_parameters freeze freeze_mm_modules relora relora_steps lisa_n_layers lora_target_parameters "
               "peft_layers_to_transform loraplus_lr_ratio lr_groups embedding_lr", f"{AXOLOTL}, TRL", "",
               missing("all weights are trained, or the adapters of lora.targets"), ["lm_head"]),
    ForeignKey("learning_rate_schedule_steps decay_ratio decay", MAXTEXT, "",
               missing("the schedule ends with the last step"), 1000),
    _other_training("num_generations num_iterations_per_batch reward_model reward_model_path reward_funcs trl vllm "
                      "reward_weights kto_desirable_weight desirable_weight simpo_gamma orpo_alpha cpo_alpha "
                      "process_reward_model num_labels diffusion"),
)  # fmt: skip
GROUPS: Mapping[str, tuple[ForeignKey, ...]] = {
    "Batch and length": BATCH,
    "Optimizer": OPTIMIZER,
    "Precision and memory": PRECISION,
    "Devices": DEVICE,
    "Run": RUN,
    "Model": MODEL,
    "Data": DATA,
    "Methods": METHODS,
    "Not needed": UNNEEDED,
    "Not available": MISSING,
}


@cache
def names() -> dict[str, ForeignKey]:
    """Return all names with their keys."""
    return {name: key for group in GROUPS.values() for key in group for name in key.names.split()}


def foreign_key(path: str) -> ForeignKey | None:
    """Return the entry of a name such as `learning_rate`, `training.seq_len` or `--learning-rate`, or None."""
    plain = plain_name(path)
    return names().get(plain) or names().get(plain.rpartition(".")[2])


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted name and its value. A section is entered if no trainer has a key of its name."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and (foreign_key(path) is None or plain_name(name) in _SECTIONS):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def surroundings(tree: Mapping[str, Any], devices: int | None = None) -> ForeignValues:
    """Return all values of a configuration by their plain names, without sections."""
    return ForeignValues({plain_name(path.rpartition(".")[2]): value for path, value in leaves(tree)}, devices)


def convert_value(path: str, value: Any, given: ForeignValues) -> Conversion | None:
    """Return what a key of another trainer means, or None for an unknown name.

    The schema accepts the settings of the result: a value that it rejects is unsupported.
    """
    key = foreign_key(path)
    if key is None:
        return None
    if value is None or value == "":
        return unneeded("it is not set")
    found = key.convert(value, given)
    if any(name.startswith("lora.") for name in found.settings) and _is_without_adapter(given):
        return unneeded(m.NO_LORA)
    if found.outcome == "converted" and not accepts(found.settings):
        return unsupported(f"{' or '.join(found.settings)} does not accept this value")
    return replace(found, settings=dict(found.settings))


def _is_without_adapter(given: ForeignValues) -> bool:
    """Return whether a configuration has a switch for adapters that is off."""
    return bool({"adapter", "use_peft"} & set(given.values)) and not m.uses_adapter(given)
