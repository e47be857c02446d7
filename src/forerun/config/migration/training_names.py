"""Names of keys about training in TRL, transformers, axolotl, MaxText, Levanter, torchtitan and common scripts."""

from __future__ import annotations

from forerun.config.migration import tracker_values as trackers
from forerun.config.migration import values as v
from forerun.config.migration.batch_sizes import ACCUMULATION, GLOBAL, PER_DEVICE, batch
from forerun.config.migration.conversion import ForeignKey, flag, missing, number, steps, text, whole

TRAINER = "transformers, TRL"
AXOLOTL = "axolotl"
MAXTEXT = "MaxText"
LEVANTER = "Levanter"
TITAN = "torchtitan"
SCRIPTS = "scripts"
ALL = "transformers, TRL, axolotl"

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
    ForeignKey("report_to log_with loggers", TRAINER, "track.to", trackers.tracker, "tensorboard"),
    ForeignKey("use_tensorboard enable_tensorboard", "axolotl, torchtitan", "track.to",
               trackers.own_tracker("tensorboard"), True),
    ForeignKey("use_mlflow", AXOLOTL, "track.to", trackers.own_tracker("mlflow"), True),
    ForeignKey("mlflow_tracking_uri", AXOLOTL, "track.url", text("track.url"), "http://127.0.0.1:5000"),
    ForeignKey("mlflow_experiment_name", AXOLOTL, "track.experiment", text("track.experiment"), "sft"),
    ForeignKey("wandb use_wandb", AXOLOTL, "track.to", trackers.own_tracker("wandb"), True),
    ForeignKey("wandb_project", AXOLOTL, "track.project", trackers.project("wandb"), "my-project"),
    ForeignKey("wandb_entity", AXOLOTL, "track.entity", text("track.entity"), "my-team"),
    ForeignKey("wandb_mode", AXOLOTL, "", trackers.wandb_mode, "offline"),
    ForeignKey("use_comet comet_project_name", AXOLOTL, "track.to", trackers.own_tracker("comet"), True),
    ForeignKey("use_trackio", AXOLOTL, "track.to", trackers.own_tracker("trackio"), True),
    ForeignKey("trackio_project_name", AXOLOTL, "track.project", trackers.project("trackio"), "my-project"),
    ForeignKey("project", TRAINER, "track.project", text("track.project"), "my-project"),
    ForeignKey("use_swanlab swanlab_project", AXOLOTL, "track.to", trackers.own_tracker("swanlab"), True),
)  # fmt: skip
