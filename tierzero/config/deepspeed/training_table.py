"""DeepSpeed's keys of the training itself: batches, precision, optimizer, schedule, and sections of other features."""

from __future__ import annotations

from .rules import KeyRule, differs, mapped, not_needed, refused, section, under

_SCALER = "tz.LossScaler(model, {}) in a script; `tierzero train` uses its default, {}"
_PARALLEL = "every rank is a data-parallel rank here, so batches would differ; set it to 1"
_METRICS = "log.metrics writes one JSON object per step, for any tool to read"

_BATCH: tuple[KeyRule, ...] = (
    mapped("train_batch_size", "train.batch_size", "the same: samples per step over all ranks"),
    mapped("train_micro_batch_size_per_gpu", "train.micro_batch train.batch_size", "per rank, times accumulation"),
    mapped("gradient_accumulation_steps", "train.batch_size train.micro_batch", "follows from the two, as there"),
    mapped("gradient_clipping", "train.grad_clip", "the same; absent or 0: off, so train.grad_clip = 0.0 is written"),
    not_needed("managed_gradient_accumulation", "a script's own loop decides: call step() after the last backward"),
    refused(
        "gradient_allreduce_op",
        "gradients are averaged over the ranks here; set it to mean and scale the loss",
        plain=("mean", "MEAN"),
    ),
    not_needed("prescale_gradients", "the ranks' mean, divided before the sum in fp16 and after it else"),
    not_needed("gradient_predivide_factor", "the ranks' mean, divided before the sum in fp16 and after it else"),
    refused(
        "sequence_parallel_size",
        _PARALLEL,
        plain=(1,),
    ),
    refused("sparse_gradients", "was removed there as well: embedding gradients are dense; remove it"),
    differs("dataloader_drop_last", "your script's DataLoader has drop_last", plain=(False,)),
    not_needed("vocabulary_size", "only a check there; `tierzero train` has model.vocab", "model.vocab"),
)

_PRECISION = (
    *under("bf16", mapped("enabled", "train.precision", '"bf16"; without it and without fp16: "fp32"')),
    *under("bfloat16", mapped("enabled", "train.precision", "the old name of bf16")),
    *under("fp16", mapped("enabled", "train.precision", '"fp16", with a dynamic loss scale')),
    *(
        rule
        for name in ("bf16", "bfloat16")
        for rule in under(
            name,
            not_needed("immediate_grad_update", "gradients are added as they arrive", "train.grad_dtype"),
            differs(
                "check_grad_overflow",
                "a bf16 step is not skipped; the norm that tz.clip_grad_norm_ returns shows what is not finite",
                plain=(False,),
            ),
            refused("bf16_master_weights_and_grads", "the master is exact fp32, in 12 bytes in all; set it to false"),
            mapped("bf16_optimizer_states", "optimizer.state_dtype", 'true: "bf16"'),
        )
    ),
    *under(
        "fp16",
        not_needed("auto_cast", "inputs are always cast to the model's precision", "train.precision"),
        differs("loss_scale", "the scale is dynamic; a constant one is not kept", plain=(0,)),
        differs("initial_scale_power", _SCALER.format("init_scale=2**n", "2**16"), plain=(16,)),
        differs("loss_scale_window", _SCALER.format("growth_interval=n", "2000"), plain=(2000,)),
        differs("hysteresis", "the scale backs off at every overflow, as with 1", plain=(1,)),
        not_needed("consecutive_hysteresis", "the scale backs off at every overflow"),
        differs("min_loss_scale", "the scale has no floor"),
        refused("fp16_master_weights_and_grads", "the master is fp32; set it to false"),
    ),
    *under(
        "data_types",
        mapped("grad_accum_dtype", "train.grad_dtype", "the same type"),
        not_needed("param_dtype", "the same as the precision there, too", "train.precision"),
        differs("buffer_dtype", "buffers keep the type that the module gives them"),
        differs("keep_in_fp32_modules", "a model of mixed types keeps them: build those modules in fp32"),
    ),
    mapped("communication_data_type", "train.grad_dtype", "gradients are kept and reduced in one type"),
    not_needed("seq_parallel_communication_data_type", "acts with sequence parallelism only, which is refused"),
    section(
        refused("torch_autocast", 'weights are in the precision of forward and backward; use "bf16": {"enabled": true}')
    ),
    section(refused("amp", 'was removed there as well; use "bf16": {"enabled": true}')),
)

_OPTIMIZER = under(
    "optimizer",
    mapped("type", "optimizer.name", "Adam is AdamW unless adam_w_mode is false, as there; others are refused"),
    not_needed("legacy_fusion", "the update is one pass over memory"),
)

_OPTIMIZER_PARAMS = under(
    "optimizer.params",
    mapped("lr", "optimizer.lr", "the same; absent: 0.001, as there"),
    mapped("betas", "optimizer.betas", "the same; absent: [0.9, 0.999], as there"),
    mapped("eps", "optimizer.eps", "the same; absent: 1e-8, as there"),
    mapped("weight_decay", "optimizer.weight_decay", "the same; absent: 0.0, as there (torch's AdamW: 0.01)"),
    mapped("adam_w_mode", "optimizer.name", 'false with type Adam: "adam"'),
    not_needed("torch_adam", "one update for device and host; it sets the default of weight_decay only"),
    refused("bias_correction", "bias correction is part of the update; set it to true", plain=(True,)),
    refused("amsgrad", "there is no AMSGrad; set it to false"),
    refused("maximize", "the loss is minimized; negate it"),
    mapped("fp32_optimizer_states", "optimizer.state_dtype", 'false: "bf16"'),
    refused("max_grad_norm", "is no parameter of an optimizer; use gradient_clipping", "train.grad_clip", plain=(0,)),
    not_needed("foreach", "the update is one pass over memory"),
    not_needed("fused", "the update is one pass over memory"),
    not_needed("capturable", "the update is one pass over memory"),
    not_needed("differentiable", "the update is not differentiated"),
    not_needed("set_grad_none", "gradients live in the tiers; `.grad` is empty"),
    not_needed("overlap_step", "what the update runs beside", "optimizer.overlap"),
)

_SCHEDULER = under(
    "scheduler",
    mapped("type", "optimizer.schedule", "WarmupLR: constant. WarmupDecayLR: linear. WarmupCosineLR: cosine"),
)

_SCHEDULER_PARAMS = under(
    "scheduler.params",
    mapped("total_num_steps", "train.steps", "the same number"),
    mapped("warmup_max_lr", "optimizer.lr", "instead of the optimizer's lr, as there"),
    mapped("warmup_num_steps", "optimizer.warmup", "the same number; absent: 1000, as there"),
    mapped("cos_min_ratio", "optimizer.min_lr_ratio", "the same; absent: 0.0001, as there"),
    differs("warmup_min_lr", "the warm-up starts at lr / (warmup + 1)", "optimizer.warmup", plain=(0, "auto")),
    differs("warmup_min_ratio", "the warm-up starts at lr / (warmup + 1)", "optimizer.warmup", plain=(0,)),
    mapped("warmup_type", "optimizer.warmup", "linear; log, the default there, rises faster at first and is noted"),
    differs("last_batch_iteration", "a resumed run goes on by its checkpoint", plain=(-1,)),
)

_ACTIVATIONS = under(
    "activation_checkpointing",
    differs(
        "partition_activations",
        'activations stay on their rank; activations.recompute = "unit" keeps least per unit',
        "activations.recompute",
        plain=(False,),
    ),
    differs(
        "cpu_checkpointing",
        'activations stay on the device in this version; activations.recompute = "sqrt" keeps least',
        "activations.recompute placement.activations",
        plain=(False,),
    ),
    differs("number_checkpoints", "activations.recompute = k keeps every k-th unit's input", "activations.recompute"),
    not_needed("contiguous_memory_optimization", "inputs of units are kept as autograd keeps them"),
    not_needed("synchronize_checkpoint_boundary", "nothing has to be synchronized by hand"),
    not_needed("profile", _METRICS, "log.metrics"),
)

_CHECKPOINT = (
    *under(
        "checkpoint",
        not_needed("tag_validation", "the ranks of a checkpoint are one folder, which appears whole or not at all"),
        differs(
            "load_universal", "checkpoints of DeepSpeed are not read; import weights by safetensors", plain=(False,)
        ),
        differs("use_node_local_storage", "checkpoint.dir must be seen by all ranks", "checkpoint.dir", plain=(False,)),
        not_needed("checkpoint_serialization", "a format of its own, with checksums"),
        section(not_needed("parallel_write", "every rank always writes its own part at the same time")),
        section(not_needed("writer", "checkpoint.async writes beside the training", "checkpoint.async")),
    ),
    section(
        differs("datastates_ckpt", "set checkpoint.async = true, or save with background=True", "checkpoint.async"),
        on=True,
    ),
    section(differs("nebula", "set checkpoint.async = true, or save with background=True", "checkpoint.async")),
)

_LOGGING: tuple[KeyRule, ...] = (
    mapped("steps_per_print", "log.every", "the same number, where there is no terminal"),
    not_needed("wall_clock_breakdown", "every step's time and stalls are measured; see log.metrics", "log.metrics"),
    not_needed("memory_breakdown", "bytes per tier are in log.metrics and tz.stats", "log.metrics"),
    not_needed("dump_state", "tz.stats shows the placement and what lies where"),
    not_needed("log_level", "notes go to standard error"),
    *(section(differs(name, _METRICS, "log.metrics")) for name in ("tensorboard", "wandb", "csv_monitor", "comet")),
    section(differs("flops_profiler", "PyTorch's profiler works on the sharded model, a plain nn.Module")),
    section(differs("comms_logger", "comm_bytes and the stalls are in every line of log.metrics", "log.metrics")),
    section(not_needed("timers", "every step's time is in log.metrics", "log.metrics")),
)

_OPTIMIZERS_ALLOWED: tuple[KeyRule, ...] = (
    not_needed("zero_allow_untested_optimizer", "the optimizers are TierZero's own", "optimizer.name"),
    not_needed("zero_force_ds_cpu_optimizer", "the update runs where the state lives", "placement.optimizer"),
    not_needed("disable_allgather", "weights are gathered ahead of their use at every stage", "sharding.stage"),
    not_needed("disable_python_gc", "your script decides: gc.disable()"),
)

_REFUSED_DATA = "changes what the model sees or which layers run, so training would differ; remove it"

_OTHER: tuple[KeyRule, ...] = (
    section(
        differs(
            "autotuning",
            "there is little to tune: buffers follow from the budgets; the rest is in tiers and io",
            "tiers.tile io.block_size",
        )
    ),
    section(not_needed("compile", "acts with deepcompile only")),
    *under("compile", differs("deepcompile", "see train.compile; it changes speed only", plain=(False,))),
    section(differs("hybrid_engine", "generate under torch.no_grad with the model as it is")),
    section(differs("pipeline", "there is no pipeline parallelism; a plain nn.Module is sharded"), on=True),
    not_needed("use_data_before_expert_parallelism", "acts with expert parallelism only, which is refused"),
    section(refused("elasticity", "sets batch sizes by itself; give train_batch_size instead and remove it")),
    section(not_needed("tensor_parallel", "acts with several ranks for one copy of the model only, which is refused")),
    *under("tensor_parallel", refused("autotp_size", _PARALLEL, plain=(0, 1))),
    *under("tensor_parallel.tp", refused("tp_size", _PARALLEL, plain=(0, 1))),
    section(refused("expert_parallel", "experts are sharded like all weights, not sent tokens; remove it")),
    section(refused("weight_quantization", "weights are not quantized; remove it"), on=True),
    section(refused("compression_training", "weights are not compressed; remove it")),
    section(refused("quantize_training", "weights are not quantized; remove it")),
    section(refused("eigenvalue", "belongs to quantized training, which there is none of; remove it")),
    section(refused("progressive_layer_drop", _REFUSED_DATA)),
    section(refused("curriculum_learning", _REFUSED_DATA)),
    section(refused("data_efficiency", _REFUSED_DATA)),
    section(refused("sparse_attention", "attention is the model's own; remove it"), on=True),
    not_needed("graph_harvesting", "was removed there as well"),
)

TRAINING_RULES: tuple[KeyRule, ...] = (
    *_BATCH,
    *_PRECISION,
    *_OPTIMIZER,
    *_OPTIMIZER_PARAMS,
    *_SCHEDULER,
    *_SCHEDULER_PARAMS,
    *_ACTIVATIONS,
    *_CHECKPOINT,
    *_LOGGING,
    *_OPTIMIZERS_ALLOWED,
    *_OTHER,
)

AUTO: dict[str, tuple[str, object]] = {
    "train_batch_size": ("per_device_train_batch_size", None),
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", None),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", None),
    "gradient_clipping": ("max_grad_norm", 1.0),
    "bf16.enabled": ("bf16", None),
    "bfloat16.enabled": ("bf16", None),
    "fp16.enabled": ("fp16", None),
    "optimizer.params.lr": ("learning_rate", 5e-5),
    "optimizer.params.betas": ("adam_beta1 and adam_beta2", [0.9, 0.999]),
    "optimizer.params.eps": ("adam_epsilon", 1e-8),
    "optimizer.params.weight_decay": ("weight_decay", 0.0),
    "scheduler.params.warmup_max_lr": ("learning_rate", 5e-5),
    "scheduler.params.warmup_num_steps": ("warmup_steps", 0),
    "scheduler.params.total_num_steps": ("max_steps", None),
}
"""Keys that Hugging Face's Trainer fills in where they are "auto": its argument, and what that is by default."""
