"""What the values of a DeepSpeed configuration mean here."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from tierzero.config import Config
from tierzero.config.deepspeed import Outcome, translate
from tierzero.errors import ConfigError
from tierzero.training.schedule import lr_factor

from ..support.deepspeed import nested


def given_in(flat: dict[str, Any]) -> dict[str, Any]:
    """The flat settings of a translation: "section.key" -> value."""
    config = translate(nested(flat)).config
    return {f"{section}.{key}": value for section, values in config.given().items() for key, value in values.items()}


def outcome(flat: dict[str, Any], key: str) -> Outcome:
    return next(entry.outcome for entry in translate(nested(flat)).entries if entry.key == key)


ZERO = "zero_optimization"
OPT, PAR = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"


@pytest.mark.parametrize(
    ("flat", "params", "optimizer", "gradients"),
    [
        ({}, "device", "device", "device"),
        ({f"{ZERO}.stage": 3}, "device", "device", "device"),
        ({f"{ZERO}.stage": 2, f"{OPT}.device": "cpu"}, "device", "host", "host"),
        ({f"{ZERO}.stage": 1, f"{OPT}.device": "cpu"}, "device", "host", "device"),
        ({f"{ZERO}.stage": 2, f"{ZERO}.cpu_offload": True}, "device", "host", "host"),
        ({f"{ZERO}.stage": 2, f"{ZERO}.cpu_offload": False}, "device", "device", "device"),
        ({f"{ZERO}.stage": 3, f"{ZERO}.cpu_offload_param": True}, "host", "device", "device"),
        ({f"{ZERO}.stage": 2, f"{PAR}.device": "cpu"}, "device", "device", "device"),
        ({f"{ZERO}.stage": 3, f"{OPT}.device": "cpu", f"{PAR}.device": "cpu"}, "host", "host", "host"),
        ({f"{ZERO}.stage": 3, f"{OPT}.device": "cpu", f"{OPT}.ratio": 0.3}, "device",
         {"device": 0.7, "host": 0.3}, "host"),
        ({f"{ZERO}.stage": 3, f"{OPT}.device": "cpu", f"{OPT}.ratio": 0.0}, "device", "device", "host"),
        ({f"{ZERO}.stage": 3, f"{OPT}.device": "nvme", f"{OPT}.nvme_path": "/x", f"{PAR}.device": "nvme",
          f"{PAR}.nvme_path": "/x"}, "nvme", "nvme", "host"),
    ],
)  # fmt: skip
def test_offload_is_a_placement(flat: dict[str, Any], params: Any, optimizer: Any, gradients: Any) -> None:
    found = given_in(flat)
    kinds = ("params", "optimizer", "gradients")
    assert {kind: found[f"placement.{kind}"] for kind in kinds} == dict(
        zip(kinds, (params, optimizer, gradients), strict=True)
    )
    assert found["sharding.stage"] == flat.get(f"{ZERO}.stage", 0)


@pytest.mark.parametrize(
    ("flat", "expected"),
    [
        ({"zero_optimization": True}, {"sharding.stage": 1}),
        ({}, {"train.precision": "fp32", "train.grad_clip": 0.0}),
        ({"gradient_clipping": 0.5}, {"train.grad_clip": 0.5}),
        ({"gradient_clipping": 0}, {"train.grad_clip": 0.0}),
        ({"gradient_clipping": "auto"}, {"train.grad_clip": 1.0}),
        ({"bf16.enabled": True, "fp16.enabled": False}, {"train.precision": "bf16"}),
        ({"bf16.enabled": "auto", "fp16.enabled": "auto"}, {"train.precision": "bf16"}),
        ({"bf16.enabled": "auto", "fp16.enabled": True}, {"train.precision": "fp16"}),
        ({"bfloat16.enabled": True}, {"train.precision": "bf16"}),
        ({"data_types.grad_accum_dtype": "float32"}, {"train.grad_dtype": "fp32"}),
        ({"communication_data_type": "fp32", "bf16.enabled": True}, {"train.grad_dtype": "fp32"}),
        ({"steps_per_print": 50}, {"log.every": 50}),
        ({"optimizer.type": "AdamW"}, {"optimizer.name": "adamw", "optimizer.weight_decay": 0.0, "optimizer.lr": 1e-3}),
        ({"optimizer.type": "Adam"}, {"optimizer.name": "adamw", "optimizer.betas": [0.9, 0.999]}),
        ({"optimizer.type": "Adam", "optimizer.params.adam_w_mode": False}, {"optimizer.name": "adam"}),
        ({"optimizer.type": "AdamW", "optimizer.params.adam_w_mode": False}, {"optimizer.name": "adamw"}),
        ({"optimizer.type": "AdamW", "optimizer.params.torch_adam": True}, {"optimizer.weight_decay": 0.01}),
        ({"optimizer.type": "AdamW", "optimizer.params.lr": 2e-4, "scheduler.type": "WarmupLR",
          "scheduler.params.warmup_max_lr": 1e-4, "scheduler.params.warmup_num_steps": 10},
         {"optimizer.lr": 1e-4, "optimizer.schedule": "constant", "optimizer.warmup": 10}),
        ({"scheduler.type": "WarmupDecayLR", "scheduler.params.total_num_steps": 70},
         {"optimizer.schedule": "linear", "train.steps": 70, "optimizer.min_lr_ratio": 0.0, "optimizer.lr": 1e-3,
          "optimizer.warmup": 1000}),
        ({"scheduler.type": "WarmupCosineLR", "scheduler.params.total_num_steps": 70},
         {"optimizer.schedule": "cosine", "optimizer.min_lr_ratio": 0.0001}),
        ({"aio.block_size": 2**20, "aio.queue_depth": 16}, {"io.block_size": 2**20, "io.queue_depth": 16}),
        ({"aio.queue_depth": 128, "aio.intra_op_parallelism": 4}, {"io.queue_depth": 256}),
        ({"aio.thread_count": 2}, {"io.queue_depth": 16}),
        ({"bf16.enabled": True, "bf16.bf16_optimizer_states": True}, {"optimizer.state_dtype": "bf16"}),
        ({"optimizer.type": "Adam", "optimizer.params.fp32_optimizer_states": False},
         {"optimizer.state_dtype": "bf16"}),
    ],
)  # fmt: skip
def test_values_become(flat: dict[str, Any], expected: dict[str, Any]) -> None:
    found = given_in(flat)
    assert {key: found.get(key) for key in expected} == expected


BATCH, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("flat", "ranks", "batch", "micro"),
    [
        ({BATCH: 64}, None, 64, None),
        ({BATCH: 64, STEPS: 1}, None, 64, None),
        ({BATCH: 64, MICRO: 4}, None, 64, 4),
        ({BATCH: 64, MICRO: 4, STEPS: 2}, 8, 64, 4),
        ({BATCH: 64, STEPS: 4}, 2, 64, 8),
        ({MICRO: 3}, None, 3, 3),
        ({MICRO: 4, STEPS: 2}, 8, 64, 4),
        ({MICRO: 3, STEPS: 2, BATCH: "auto"}, 2, 12, 3),
        ({MICRO: "auto", STEPS: "auto", BATCH: "auto"}, 2, None, None),
    ],
)
def test_batches(flat: dict[str, Any], ranks: int | None, batch: int | None, micro: int | None) -> None:
    train = translate(flat, ranks).config.given()["train"]
    assert (train.get("batch_size"), train.get("micro_batch")) == (batch, micro)


@pytest.mark.parametrize(
    ("flat", "said"),
    [
        ({"optimizer.type": "Lamb"}, 'optimizer.type = "Lamb": there are AdamW and Adam'),
        ({f"{ZERO}.zero_quantized_weights": True}, "zero_quantized_weights = true: weights are gathered as they are"),
        ({f"{ZERO}.zenflow.topk_ratio": 0.1}, "zenflow.topk_ratio = 0.1: no update is left out"),
        ({"scheduler.type": "OneCycle"}, 'scheduler.type = "OneCycle": there are WarmupLR'),
        ({"scheduler.type": "WarmupDecayLR"}, "total_num_steps: WarmupDecayLR needs it"),
        ({"optimizer.type": "Adam", "optimizer.params.amsgrad": True}, "amsgrad = true: there is no AMSGrad"),
        ({"bf16.enabled": True, "fp16.enabled": True}, "fp16.enabled = true: so is bf16.enabled"),
        ({"bf16.enabled": True, "bf16.bf16_optimizer_states": 8}, "bf16_optimizer_states = 8: must be true or false"),
        ({f"{ZERO}.stage": 4}, "stage = 4: must be 0, 1, 2 or 3"),
        ({f"{ZERO}.stage": 3, f"{OPT}.device": "nvme"}, "offload_optimizer.nvme_path: must be the folder"),
        ({f"{OPT}.device": "disk"}, 'offload_optimizer.device = "disk": must be "none", "cpu" or "nvme"'),
        ({"gradient_clipping": -1}, "gradient_clipping: train.grad_clip = -1.0: must be a number from 0"),
        ({"optimizer.type": "Adam", "optimizer.params.betas": [0.9]}, "optimizer.params.betas: optimizer.betas = "),
        ({BATCH: 10, MICRO: 4}, "train_batch_size = 10: is no multiple of"),
        ({"fp16": True}, "fp16 = true: must be an object"),
        ({"data_efficiency.enabled": True, "tensor_parallel.autotp_size": 2}, "(as well: tensor_parallel.autotp_size)"),
        ({"compression_training.weight_quantization.shared_parameters.enabled": True}, "weights are not compressed"),
    ],
)  # fmt: skip
def test_what_must_be_changed_is_one_line_with_the_key(flat: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        translate(nested(flat))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flat", "key", "expected"),
    [
        ({f"{ZERO}.overlap_comm": True}, f"{ZERO}.overlap_comm", Outcome.NOT_NEEDED),
        ({f"{ZERO}.zero_hpz_partition_size": 8}, f"{ZERO}.zero_hpz_partition_size", Outcome.DIFFERS),
        ({f"{ZERO}.mics_shard_size": -1}, f"{ZERO}.mics_shard_size", Outcome.NOT_NEEDED),
        ({f"{ZERO}.zero_quantized_gradients": False}, f"{ZERO}.zero_quantized_gradients", Outcome.NOT_NEEDED),
        ({"fp16.enabled": True, "fp16.hysteresis": 2}, "fp16.hysteresis", Outcome.DIFFERS),
        ({"fp16.enabled": False, "fp16.hysteresis": 2}, "fp16.hysteresis", Outcome.NOT_NEEDED),
        ({"tensorboard.enabled": False, "tensorboard.job_name": "x"}, "tensorboard.job_name", Outcome.NOT_NEEDED),
        ({"wandb.enabled": True, "wandb.project": "x"}, "wandb.project", Outcome.DIFFERS),
        ({"data_efficiency.enabled": False, "data_efficiency.seed": 1}, "data_efficiency.seed", Outcome.NOT_NEEDED),
        ({"optimizer.params.lr": "auto", "optimizer.type": "Adam"}, "optimizer.params.lr", Outcome.DIFFERS),
        ({"optimizer.params.lr": 1.0}, "optimizer.params.lr", Outcome.NOT_NEEDED),
        ({"aio.block_size": 1000}, "aio.block_size", Outcome.DIFFERS),
        ({f"{ZERO}.stage": 2, f"{OPT}.device": "nvme", f"{OPT}.nvme_path": "/x"}, f"{OPT}.device", Outcome.DIFFERS),
        ({"train_batch_sizes": 3}, "train_batch_sizes", Outcome.UNKNOWN),
    ],
)  # fmt: skip
def test_what_is_said_of_keys_without_a_value_here(flat: dict[str, Any], key: str, expected: Outcome) -> None:
    assert outcome(flat, key) is expected


def test_an_unknown_key_is_noted_with_the_nearest() -> None:
    translation = translate(
        {ZERO: {"stage": 3, "sub_group_sizes": 1, "offload_optimizer": {"buffer_cnt": 4}}, "qqq": 1}
    )
    unknown = {entry.key: entry.why for entry in translation.having(Outcome.UNKNOWN)}
    assert f"did you mean {ZERO}.sub_group_size?" in unknown[f"{ZERO}.sub_group_sizes"]
    assert f"did you mean {OPT}.buffer_count?" in unknown[f"{OPT}.buffer_cnt"]
    assert "no key of DeepSpeed is like it" in unknown["qqq"]


def test_files_folders_and_the_one_warning(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    offload = {"device": "nvme", "nvme_path": "swap"}
    file.write_text(json.dumps({ZERO: {"stage": 3, "offload_param": offload}, "wandb": {"enabled": True, "team": "x"}}))
    with pytest.warns(UserWarning, match=r"same here: wandb; `tierzero import-config .*ds.json` says how") as caught:
        config = Config.from_deepspeed(file)
    assert len(caught) == 1
    assert Path(caught[0].filename) == Path(__file__)
    assert config.tiers.nvme == [tmp_path / "swap"]
    assert config.override(["train.steps=3"]).tiers.nvme == [tmp_path / "swap"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        relative = Config.from_deepspeed({ZERO: {"stage": 3, "offload_param": {**offload, "nvme_path": Path("swap")}}})
    assert relative.tiers.nvme == [Path.cwd() / "swap"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "is a JSON object, not list"),
        (b'{"fp16": {}, "fp16": {}}', "'fp16' is given twice"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"train_batch_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        translate(file)
    with pytest.raises(ConfigError, match="cannot read"):
        translate(tmp_path / "none.json")


def test_dicts_that_are_none() -> None:
    deep: dict[str, Any] = {}
    deep["again"] = deep
    for values, said in (
        ({"aio": {1: 2}}, "aio: the key 1 is not text"),
        ({"gradient_clipping": 10**5000}, "gradient_clipping: a number of"),
        ({"optimizer": {"type": object()}}, "optimizer.type: object is nothing that JSON holds"),
        (deep, "nested too deeply"),
    ):
        with pytest.raises(ConfigError, match=said):
            translate(values)


def theirs(kind: str, step: int, warmup: int, total: int, end: float) -> float:
    """DeepSpeed's rate in optimizer step ``step`` as a fraction of the peak: its scheduler steps after the update."""
    last = step - 1
    if last < 0:
        return 0.0
    if last < warmup:
        return last / warmup
    if kind == "WarmupDecayLR":
        return max(0.0, (total - last) / max(1, total - warmup))
    if kind == "WarmupCosineLR":
        done = min(1.0, (last - warmup + 1) / max(1, total - warmup))
        return end + (1 - end) * (1 + math.cos(math.pi * done)) / 2
    return 1.0


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_schedules_are_theirs_about_two_steps_ahead(kind: str) -> None:
    params = {"warmup_num_steps": 100, "warmup_type": "linear", "total_num_steps": 1000}
    config = translate({"scheduler": {"type": kind, "params": params}}).config
    ours = lr_factor(config.optimizer, 1000)
    gap = max(abs(ours(step) - theirs(kind, step + 2, 100, 1000, 0.0001)) for step in range(998))
    assert gap < 0.011  # one step of the warm-up


def test_what_a_later_key_says_is_not_said_to_be_added() -> None:
    params = {"total_num_steps": 10, "warmup_max_lr": 1e-4, "warmup_num_steps": 2}
    given_keys = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupDecayLR", "params": params}}
    translation = translate(given_keys)
    added = {each.key: each.value for each in translation.added}
    assert "optimizer.lr" not in added
    assert translation.origin["optimizer.lr"] == "scheduler.params.warmup_max_lr"
    assert added["optimizer.weight_decay"] == 0.0
    del params["warmup_max_lr"]
    assert [each.value for each in translate(given_keys).added if each.key == "optimizer.lr"] == [0.001]
