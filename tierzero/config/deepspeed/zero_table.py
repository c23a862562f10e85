"""DeepSpeed's `zero_optimization` and `aio`: where state lives, and what moves it."""

from __future__ import annotations

from dataclasses import replace

from .rules import KeyRule, differs, mapped, not_needed, refused, section, under

_DERIVED = "derived from the budgets of [tiers] and the model"
_SPEED_ONLY = "an internal choice of the collectives, which changes no result"
_PINNED = "host buffers are always pinned where there is a GPU, within the budget"

_OFFLOAD_OPTIMIZER = under(
    "zero_optimization.offload_optimizer",
    mapped("device", "placement.optimizer placement.gradients", 'cpu: both "host". nvme: "nvme", gradients "host"'),
    mapped("nvme_path", "tiers.nvme", "as a list, one folder per drive; it must exist"),
    mapped("ratio", "placement.optimizer", "a split: that fraction off the device, the rest on it"),
    not_needed("buffer_count", f"the number of staging buffers is {_DERIVED}", "tiers.host tiers.tile"),
    not_needed("pin_memory", _PINNED, "tiers.host"),
    not_needed("pipeline_read", "tiles are always read ahead of their update", "optimizer.overlap"),
    not_needed("pipeline_write", "tiles are always written behind their update", "optimizer.overlap"),
    not_needed("fast_init", "state is made a tile at a time, where it lives, from the start"),
    not_needed(
        "super_offload",
        "the update runs beside the next forward, or beside both halves of the step",
        "optimizer.overlap",
    ),
    not_needed(
        "cpuadam_cores_perc", "the update takes the cores that the rank is bound to, or its share of the node's"
    ),
)

_OFFLOAD_PARAM = under(
    "zero_optimization.offload_param",
    mapped("device", "placement.params", 'cpu: "host". nvme: "nvme"'),
    mapped("nvme_path", "tiers.nvme", "as a list, one folder per drive; it must exist"),
    not_needed("buffer_count", f"the number of buffers is {_DERIVED}", "tiers.device tiers.prefetch"),
    not_needed("buffer_size", f"a buffer is a gathered unit, and their number is {_DERIVED}", "tiers.device"),
    differs(
        "max_in_cpu",
        'a count of elements there; here placement.params = { host = 0.3, nvme = 0.7 }, or "auto" with tiers.host',
        "placement.params tiers.host",
    ),
    not_needed("pin_memory", _PINNED, "tiers.host"),
)

_STAGE_3 = under(
    "zero_optimization",
    not_needed("stage3_prefetch_bucket_size", f"how far ahead weights are read is {_DERIVED}", "tiers.prefetch"),
    not_needed(
        "stage3_param_persistence_threshold",
        "small parameters are gathered together with their unit, not kept by every rank",
        "sharding.min_unit",
    ),
    not_needed(
        "stage3_model_persistence_threshold",
        "no parameter is exempt from sharding, so there is nothing to bound",
        "sharding.reshard_after_forward",
    ),
    not_needed("stage3_max_live_parameters", f"how many weights are gathered at once is {_DERIVED}", "tiers.device"),
    not_needed(
        "stage3_max_reuse_distance",
        "the order of use is recorded, and what comes next stays while there is room",
        "tiers.device sharding.reshard_after_forward",
    ),
    not_needed(
        "stage3_module_granularity_threshold", "small units are joined with their neighbours", "sharding.min_unit"
    ),
    not_needed("stage3_use_all_reduce_for_fetch_params", _SPEED_ONLY),
    not_needed("stage3_allgather_sequential", "a unit is gathered in place, without a bucket to copy to"),
    differs(
        "stage3_gather_16bit_weights_on_model_save",
        "`tierzero export CHECKPOINT FOLDER --dtype bf16`, or tz.export_safetensors, writes whole weights",
        plain=(False,),
    ),
    differs(
        "stage3_gather_fp16_weights_on_model_save",
        "`tierzero export CHECKPOINT FOLDER --dtype fp16`, or tz.export_safetensors, writes whole weights",
        plain=(False,),
    ),
    section(
        differs(
            "leaf_module",
            "modules that are gathered as one: the repeated blocks are, or name them in sharding.units",
            "sharding.units",
        ),
        on=True,
    ),
    not_needed("memory_efficient_linear", "saved weights are handles: no linear layer keeps a gathered weight"),
    not_needed("override_module_apply", "an empty model is filled by tz.shard's init"),
    not_needed("log_trace_cache_warnings", "a changed order of use is followed; stalls are in the metrics"),
)

_ZERO = under(
    "zero_optimization",
    mapped("stage", "sharding.stage", "the same number; absent: 0, as there"),
    mapped("cpu_offload", "placement.optimizer placement.gradients", 'the old form of offload_optimizer: "host"'),
    mapped("cpu_offload_param", "placement.params", 'the old form of offload_param: "host"'),
    not_needed("cpu_offload_use_pin_memory", _PINNED, "tiers.host"),
    not_needed("sub_group_size", f"the size of a tile is {_DERIVED}", "tiers.tile"),
    not_needed("overlap_comm", "gathers and reductions always run beside the computation"),
    not_needed("contiguous_gradients", "gradients are reduced from one flat bucket per unit", "sharding.units"),
    not_needed("reduce_scatter", _SPEED_ONLY, "sharding.stage"),
    not_needed("reduce_bucket_size", "a bucket is the gradients of one unit", "sharding.min_unit"),
    not_needed("use_multi_rank_bucket_allreduce", _SPEED_ONLY),
    not_needed("allgather_partitions", _SPEED_ONLY),
    not_needed("allgather_bucket_size", "what is gathered together is a unit", "sharding.units sharding.min_unit"),
    not_needed("round_robin_gradients", "every rank copies its own shard, whose parts are equal"),
    not_needed("compute_grad_norm", "the norm is taken where tz.clip_grad_norm_ asks for it", "train.grad_clip"),
    differs(
        "load_from_fp32_weights",
        "checkpoints of DeepSpeed are not read; export weights to safetensors, which `tierzero import` takes",
        plain=(True,),
    ),
    not_needed("elastic_checkpoint", "every checkpoint loads at any number of ranks"),
    not_needed("pipeline_loading_checkpoint", "a checkpoint is streamed into the tiers"),
    differs(
        "ignore_unused_parameters",
        "a parameter without a gradient does not step, as in PyTorch; there is no check",
        plain=(True,),
    ),
    not_needed("legacy_stage1", "all stages are one engine", "sharding.stage"),
    not_needed("parameter_alignment", "how shards are aligned is not for the user to care about"),
    not_needed("enable_sanity_checks", "ranks always compare what they are about to do", "io.verify"),
    not_needed("save_muon_momentum_buffer_in_memory", "acts with the Muon optimizer only, which is refused"),
)

_COMMUNICATION = under(
    "zero_optimization",
    differs(
        "zero_hpz_partition_size",
        "give tz.shard a mesh of (nodes, ranks per node): all state is then sharded inside a node, with a copy on each",
        plain=(0, 1),
    ),
    differs(
        "mics_shard_size",
        "give tz.shard a mesh of (replicas, ranks that share): state is sharded in a group, with a copy in each",
        plain=(-1, 0),
    ),
    differs(
        "mics_hierarchical_params_gather",
        "gathers stay inside the group of tz.shard's mesh; see mics_shard_size",
        plain=(False,),
    ),
    refused("zero_quantized_weights", "weights are gathered as they are, so training would differ; set it to false"),
    refused("zero_quantized_nontrainable_weights", "frozen weights are not quantized here; set it to false"),
    refused("zero_quantized_gradients", "gradients are reduced as they are, so training would differ; set it to false"),
    section(
        refused("zeropp_loco_param", "there is no quantized reduction whose error could be fed back; remove it"),
        on=True,
    ),
    section(
        refused("zenflow", "no update is left out or late here, so training would differ; remove the section"),
        on=True,
    ),
)

_AIO = under(
    "aio",
    mapped("block_size", "io.block_size", "the same bytes, if they are a multiple of 4096"),
    mapped("queue_depth", "io.queue_depth", "requests in flight per path: times the threads, at most 256"),
    mapped("intra_op_parallelism", "io.queue_depth", "multiplied into the queue depth"),
    mapped("thread_count", "io.queue_depth", "the old name of intra_op_parallelism"),
    not_needed("single_submit", "every request is its own", "io.queue_depth"),
    not_needed("overlap_events", "requests are always taken as they complete", "io.queue_depth"),
    differs("use_gds", "files are read into pinned host memory and copied from there", "io.direct", plain=(False,)),
)

_SHORT = tuple(
    replace(rule, path=(*rule.path[:-1], rule.path[-1].removeprefix("stage3_")))
    for rule in _STAGE_3
    if rule.path[-1].startswith("stage3_") and not rule.path[-1].endswith("fp16_weights_on_model_save")
)
"""DeepSpeed takes these without their prefix as well."""

ZERO_RULES: tuple[KeyRule, ...] = (
    *_ZERO,
    *_STAGE_3,
    *_SHORT,
    *_OFFLOAD_OPTIMIZER,
    *_OFFLOAD_PARAM,
    *_COMMUNICATION,
    *_AIO,
)
