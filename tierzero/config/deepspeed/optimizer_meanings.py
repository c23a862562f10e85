"""What DeepSpeed's optimizer and scheduler mean here."""

from __future__ import annotations

from dataclasses import dataclass

from .draft import Draft
from .rules import Outcome

_OPTIMIZER, _SCHEDULER = "optimizer.params", "scheduler.params"
_TYPE, _ADAM_W_MODE = "optimizer.type", "optimizer.params.adam_w_mode"
_DECAY = "`tierzero train` decays matrices only; in a script, tz.AdamW decays what its parameter groups say"
_MASTERS_TYPE = "there the moments take the type of the master, which may be fp32 all the same"
_YOURS = "the script builds the {}; its parameters stand there"
_SHIFTED = "the same curve, about two steps ahead: there the first two steps have the smallest rate"


@dataclass(frozen=True)
class Schedule:
    """A scheduler of DeepSpeed: its name here, whether it ends, and where its peak is taken from without a key."""

    name: str
    ends: bool
    peak: float | None = None


_SCHEDULES = {
    "WarmupLR": Schedule("constant", ends=False),
    "WarmupDecayLR": Schedule("linear", ends=True, peak=0.001),
    "WarmupCosineLR": Schedule("cosine", ends=True),
}


def translate_optimizer(draft: Draft) -> None:
    """``optimizer`` and ``scheduler``."""
    _optimizer(draft)
    _scheduler(draft)


def _optimizer(draft: Draft) -> None:
    kind = draft.value(_TYPE)
    if kind is None:
        _left_to_script(draft, _OPTIMIZER, _YOURS.format("optimizer"))
        return
    if not isinstance(kind, str) or kind.lower() not in ("adam", "adamw"):
        draft.refuse(_TYPE, "there are AdamW and Adam, and training would differ; choose one of them")
        return
    decoupled = draft.flag(_ADAM_W_MODE, True) or kind.lower() == "adamw"
    draft.set(_TYPE, "optimizer.name", "adamw" if decoupled else "adam")
    draft.tell(_ADAM_W_MODE, Outcome.MAPPED, f'{kind} with it is "{draft.values["optimizer.name"]}"', "optimizer.name")
    defaults = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}
    for name, default in defaults.items():
        key, target = f"{_OPTIMIZER}.{name}", f"optimizer.{name}"
        if draft.auto(key, target):
            continue
        value = draft.value(key)
        if value is None:
            draft.add(target, default, f"DeepSpeed's {kind} without {name}")
        else:
            draft.set(key, target, value)
    _weight_decay(draft, kind, decoupled)
    key = f"{_OPTIMIZER}.fp32_optimizer_states"
    if draft.flag(key, True):
        draft.tell(key, Outcome.MAPPED, "fp32 is the default", "optimizer.state_dtype")
    else:
        draft.set(key, "optimizer.state_dtype", "bf16", _MASTERS_TYPE)


def _weight_decay(draft: Draft, kind: str, decoupled: bool) -> None:
    key, target = f"{_OPTIMIZER}.weight_decay", "optimizer.weight_decay"
    if draft.auto(key, target):
        return
    decay = draft.number(key)
    if decay is not None:
        draft.set(key, target, float(decay), _DECAY if decay else "")
    elif draft.value(key) is None:
        is_torch = decoupled and draft.flag(f"{_OPTIMIZER}.torch_adam", False)
        draft.add(target, 0.01 if is_torch else 0.0, f"{'torch' if is_torch else 'DeepSpeed'}'s {kind} without it")


def _left_to_script(draft: Draft, section: str, why: str) -> None:
    prefix = tuple(section.split("."))
    for path in draft.leaves:
        if path[: len(prefix)] == prefix and path != prefix:
            draft.tell(".".join(path), Outcome.NOT_NEEDED, why)


def _scheduler(draft: Draft) -> None:
    kind = draft.value("scheduler.type")
    if kind is None:
        _left_to_script(draft, _SCHEDULER, _YOURS.format("scheduler"))
        return
    schedule = _SCHEDULES.get(kind) if isinstance(kind, str) else None
    if schedule is None:
        why = f"there are {', '.join(_SCHEDULES)}; remove it and use a torch.optim.lr_scheduler in your script"
        draft.refuse("scheduler.type", why)
        return
    draft.set("scheduler.type", "optimizer.schedule", schedule.name, _SHIFTED)
    _steps(draft, schedule)
    _peak(draft, schedule)
    _end(draft, schedule)
    _warmup(draft)


def _steps(draft: Draft, schedule: Schedule) -> None:
    key = f"{_SCHEDULER}.total_num_steps"
    if not schedule.ends:
        draft.tell(key, Outcome.NOT_NEEDED, "a constant rate has no end")
        return
    if draft.auto(key, "train.steps"):
        return
    if draft.value(key) is None:
        draft.refuse(key, f"{draft.value('scheduler.type')} needs it")
        return
    steps = draft.number(key, whole=True)
    if steps is not None:
        draft.set(key, "train.steps", steps)


def _peak(draft: Draft, schedule: Schedule) -> None:
    key = f"{_SCHEDULER}.warmup_max_lr"
    if schedule.name == "cosine":
        draft.tell(key, Outcome.NOT_NEEDED, "WarmupCosineLR goes up to the optimizer's lr")
        return
    own = draft.value(f"{_OPTIMIZER}.lr")
    if draft.value(key) == "auto" and isinstance(own, int | float) and not isinstance(own, bool):
        draft.set(key, "optimizer.lr", float(own), "the optimizer's lr, which whoever fills in has to give too")
        return
    if draft.auto(key, "optimizer.lr"):
        return
    peak = draft.number(key)
    if peak is None and schedule.peak is not None and draft.value(key) is None:
        draft.add("optimizer.lr", schedule.peak, f"DeepSpeed's {draft.value('scheduler.type')} without warmup_max_lr")
    elif peak is not None:
        draft.set(key, "optimizer.lr", peak)
    else:
        return
    if draft.value(f"{_OPTIMIZER}.lr") not in (None, draft.values["optimizer.lr"]):
        why = "the scheduler's warmup_max_lr is used instead, as there"
        draft.tell(f"{_OPTIMIZER}.lr", Outcome.NOT_NEEDED, why, "optimizer.lr")


def _end(draft: Draft, schedule: Schedule) -> None:
    key, target = f"{_SCHEDULER}.cos_min_ratio", "optimizer.min_lr_ratio"
    if schedule.name != "cosine":
        draft.tell(key, Outcome.NOT_NEEDED, "belongs to WarmupCosineLR")
    if schedule.name == "linear":
        draft.add(target, 0.0, "WarmupDecayLR ends at 0")
    if schedule.name != "cosine":
        return
    ratio = draft.number(key)
    if ratio is not None:
        draft.set(key, target, ratio)
    elif draft.value(key) is None:
        draft.add(target, 0.0001, "DeepSpeed's WarmupCosineLR without cos_min_ratio")


def _warmup(draft: Draft) -> None:
    key, kind = f"{_SCHEDULER}.warmup_num_steps", f"{_SCHEDULER}.warmup_type"
    shape = draft.value(kind)
    if shape is not None and shape not in ("log", "linear"):
        draft.refuse(kind, 'must be "log" or "linear"')
        return
    note = "" if shape == "linear" else "the warm-up is linear here and logarithmic there, which rises faster at first"
    draft.tell(kind, Outcome.DIFFERS if note else Outcome.MAPPED, note, "optimizer.warmup")
    if draft.auto(key, "optimizer.warmup"):
        return
    steps = draft.number(key, whole=True)
    if steps is not None:
        draft.set(key, "optimizer.warmup", steps, note)
    elif draft.value(key) is None:
        draft.add("optimizer.warmup", 1000, f"DeepSpeed's warm-up without warmup_num_steps{'; ' if note else ''}{note}")
