"""Names of keys elsewhere that forerun does not need, or does not have. Each has the reason."""

from __future__ import annotations

from forerun.config.migration.conversion import (
    Conversion,
    ForeignKey,
    ForeignValues,
    impossible,
    missing,
    nothing,
    unneeded,
)
from forerun.config.migration.method_values import plugins, special_tokens
from forerun.config.migration.training_names import ALL, AXOLOTL, MAXTEXT, TRAINER

XLA = "torch_xla"
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
    ForeignKey("xmp.spawn spawn notebook_launcher launcher torchrun", XLA, "",
               nothing("one process uses all devices of a host"), 8),
    ForeignKey("mark_step xla_mark_step torch_xla_sync sync_every", XLA, "", nothing(_STRATEGY), True),
    ForeignKey("optimizer_step reduce_gradients all_reduce", XLA, "",
               nothing("the compiled step adds the gradients of all devices"), True),
    ForeignKey("rendezvous", XLA, "", nothing("hosts wait for each other where it is needed"), "before_save"),
    ForeignKey("set_to_none zero_grad", XLA, "", nothing("the compiled step has no stored gradients"), False),
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
    ForeignKey("special_tokens", AXOLOTL, "", special_tokens, {"eos_token": "<|im_end|>"}),
    ForeignKey("eos_token eot_tokens add_bos_token", f"{AXOLOTL}, TRL", "",
               missing("the tokenizer of the checkpoint is used unchanged"), ["<|im_end|>"]),
    ForeignKey("trust_remote_code", ALL, "", missing("forerun never runs code of a checkpoint"), True),
    ForeignKey("test_datasets dataset_test_split eval_file validation_file dataset_config", f"{AXOLOTL}, TRL", "",
               missing("data.validation holds out a share of the data", ("", "test")), "test.jsonl"),
    ForeignKey("streaming dataset_streaming", "TRL, axolotl", "",
               missing("files are fetched before the first step"), True),
    ForeignKey("plugins", AXOLOTL, "", plugins, ["axolotl.integrations.spectrum.SpectrumPlugin"]),
    ForeignKey("unfrozen_parameters freeze freeze_mm_modules relora relora_steps lisa_n_layers lora_target_parameters "
               "peft_layers_to_transform loraplus_lr_ratio lr_groups embedding_lr", f"{AXOLOTL}, TRL", "",
               missing("all weights are trained, or the adapters of lora.targets"), ["lm_head"]),
    ForeignKey("learning_rate_schedule_steps decay_ratio decay", MAXTEXT, "",
               missing("the schedule ends with the last step"), 1000),
    _other_training("num_generations num_iterations_per_batch reward_model reward_model_path reward_funcs trl vllm "
                      "reward_weights kto_desirable_weight desirable_weight simpo_gamma orpo_alpha cpo_alpha "
                      "process_reward_model num_labels diffusion"),
)  # fmt: skip
