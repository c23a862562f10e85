"""What DeepSpeed's batch, precision and logging keys mean here."""

from __future__ import annotations

from .draft import Draft
from .rules import Outcome

_DTYPES = {
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "torch.float16", "half"),
    "fp32": ("fp32", "float32", "torch.float32", "float"),
}
_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_CLIP, _PRINT, _COMM, _GRAD = "gradient_clipping", "steps_per_print", "communication_data_type", "grad_accum_dtype"


def translate_training(draft: Draft, ranks: int | None) -> None:
    """Precision, gradients, batches and progress lines. ``ranks``: how many there are, None where nobody said."""
    _precision(draft)
    _moments(draft)
    _grad_dtype(draft)
    _clipping(draft)
    _batches(draft, ranks)
    _progress(draft)


def _precision(draft: Draft) -> None:
    """A switch that says true wins over "auto", and bf16 over fp16 among those that do not."""
    names = ("bf16" if draft.has("bf16") or not draft.has("bfloat16") else "bfloat16", "fp16")
    switches = {name: draft.value(f"{name}.enabled") for name in names}
    for name, value in switches.items():
        if value != "auto":
            switches[name] = draft.flag(f"{name}.enabled", False)
    if all(value is True for value in switches.values()):
        draft.refuse("fp16.enabled", f"so is {names[0]}.enabled; choose one")
    on = [name for name, value in switches.items() if value is True]
    on += [name for name, value in switches.items() if value == "auto"]
    chosen = on[0] if on else None
    if chosen is None:
        draft.add("train.precision", "fp32", "neither bf16 nor fp16 is enabled")
    for name in ("bf16", "bfloat16", "fp16"):
        key = f"{name}.enabled"
        if name != chosen:
            draft.off[name] = f"{name} is off" if chosen is None else f"{chosen} is on instead"
            draft.tell(key, Outcome.NOT_NEEDED, draft.off[name])
            continue
        note = f'"auto" is the Trainer\'s --{name.replace("bfloat", "bf")} there, and counts as true here'
        precision = "fp16" if name == "fp16" else "bf16"
        draft.set(key, "train.precision", precision, note if switches[name] == "auto" else "")


def _moments(draft: Draft) -> None:
    for name in ("bf16", "bfloat16"):
        key = f"{name}.bf16_optimizer_states"
        if name not in draft.off and draft.flag(key, False):
            draft.set(key, "optimizer.state_dtype", "bf16")
        elif name not in draft.off:
            draft.tell(key, Outcome.MAPPED, "fp32 is the default", "optimizer.state_dtype")


def _dtype(draft: Draft, key: str) -> str | None:
    value = draft.value(key)
    if value is None:
        return None
    text = value.lower() if isinstance(value, str) else value
    found = next((name for name, forms in _DTYPES.items() if text in forms), None)
    if found is None:
        draft.refuse(key, 'must be "bf16", "fp16" or "fp32"')
    return found


def _grad_dtype(draft: Draft) -> None:
    """Gradients are accumulated and reduced in one type here, in two there."""
    key = f"data_types.{_GRAD}"
    kept, sent = _dtype(draft, key), _dtype(draft, _COMM)
    if kept is not None:
        draft.set(key, "train.grad_dtype", kept)
    if sent is None:
        return
    if kept is None and sent == draft.values.get("train.precision"):
        draft.tell(_COMM, Outcome.NOT_NEEDED, "it is the precision, in which gradients are reduced", "train.grad_dtype")
    elif kept is None:
        draft.set(_COMM, "train.grad_dtype", sent, "gradients are kept in the type in which they are reduced")
    elif kept == sent:
        draft.tell(_COMM, Outcome.NOT_NEEDED, f"{key} says the same", "train.grad_dtype")
    else:
        why = f"gradients are reduced in the type in which they are kept, {kept}"
        draft.tell(_COMM, Outcome.DIFFERS, why, "train.grad_dtype")


def _clipping(draft: Draft) -> None:
    if draft.auto(_CLIP, "train.grad_clip"):
        return
    limit = draft.number(_CLIP)
    if limit is None:
        draft.add("train.grad_clip", 0.0, "no gradient_clipping, which is no clipping there")
    else:
        draft.set(_CLIP, "train.grad_clip", float(limit))


def _batches(draft: Draft, ranks: int | None) -> None:
    """There the number of ranks is known when the job runs; a file has to name the whole batch."""
    found: dict[str, int | None] = {}
    for key, target in ((_BATCH, "train.batch_size"), (_MICRO, "train.micro_batch"), (_STEPS, "train.batch_size")):
        draft.auto(key, target)
        found[key] = draft.number(key, whole=True)
        number = found[key]
        if number is not None and number < 1:
            draft.refuse(key, "must be 1 or more")
            return
    batch, micro, steps = found[_BATCH], found[_MICRO], found[_STEPS]
    if batch is not None:
        _batch_given(draft, batch, micro, steps, ranks)
    elif micro is not None:
        _micro_given(draft, micro, steps, ranks)
    elif steps is not None:
        why = "set train.batch_size, and train.micro_batch to a rank's share of it divided by this"
        draft.tell(_STEPS, Outcome.DIFFERS, why, "train.batch_size", "train.micro_batch")


def _batch_given(draft: Draft, batch: int, micro: int | None, steps: int | None, ranks: int | None) -> None:
    parts = (micro or 1) * (steps or 1) * (ranks or 1)
    if batch % parts:
        said = f" times {ranks} ranks" if ranks is not None else ""
        draft.refuse(_BATCH, f"is no multiple of {_MICRO} times {_STEPS}{said} = {parts}")
        return
    draft.set(_BATCH, "train.batch_size", batch)
    if micro is not None:
        draft.set(_MICRO, "train.micro_batch", micro)
        why = "follows from train.batch_size and train.micro_batch"
        draft.tell(_STEPS, Outcome.NOT_NEEDED, why, "train.batch_size", "train.micro_batch")
    elif steps is not None and steps > 1:
        note = "" if ranks is not None else "train.micro_batch is for one rank: give --ranks (ranks=), or divide it"
        draft.set(_STEPS, "train.micro_batch", batch // parts, note)
        draft.tell(_MICRO, Outcome.NOT_NEEDED, "follows from the other two", "train.micro_batch")
    else:
        draft.tell(_STEPS, Outcome.NOT_NEEDED, "a rank's whole share at once is the default", "train.micro_batch")


def _micro_given(draft: Draft, micro: int, steps: int | None, ranks: int | None) -> None:
    whole = micro * (steps or 1) * (ranks or 1)
    note = "" if ranks is not None else f"train.batch_size = {whole} is that of one rank: give --ranks (ranks=)"
    draft.put("train.batch_size", whole, _MICRO)
    draft.put("train.micro_batch", micro, _MICRO)
    draft.tell(_MICRO, Outcome.DIFFERS if note else Outcome.MAPPED, note, "train.micro_batch", "train.batch_size")
    if draft.value(_STEPS) != "auto":
        draft.tell(_STEPS, Outcome.MAPPED, "multiplied into train.batch_size", "train.batch_size")
    draft.tell(_BATCH, Outcome.NOT_NEEDED, "follows from the other two and the ranks", "train.batch_size")


def _progress(draft: Draft) -> None:
    value = draft.value(_PRINT)
    if isinstance(value, float) and value == float("inf"):
        draft.tell(_PRINT, Outcome.DIFFERS, "progress is printed: set log.every to a large number", "log.every")
        return
    every = draft.number(_PRINT, whole=True)
    if every is not None and every < 1:
        draft.tell(_PRINT, Outcome.DIFFERS, "progress is printed: set log.every to a large number", "log.every")
    elif every is not None:
        draft.set(_PRINT, "log.every", every)
