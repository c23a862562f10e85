"""What bounded a run and what to change, in words: one rule for each cause, each from figures alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from tierzero.planner.machine import MachineProfile
from tierzero.report.ahead import clips_of, tries_of
from tierzero.report.figures import Figures, Typical, typical
from tierzero.runtime.timeline import STALLED
from tierzero.training.text import amount

WORTH_A_WORD = 0.05
"""Share of the time from which on a cause is named."""
_SATURATED = 0.8
"""Share of a drive's time, or of its measured rate, from which on it has nothing more to give."""

_IDLE = 0.5
"""Share of the backward up to which the drive has little to do in it."""
_LOST = 0.8
"""Share of the tries from which on they are nearly always lost."""
_FEWEST_STEPS = 5


@dataclass(frozen=True)
class Finding:
    """A cause: ``share`` of the time that it takes, and what to do about it."""

    rule: str
    share: float
    title: str
    text: str


@dataclass(frozen=True)
class Facts:
    """What the rules go by."""

    run: Figures
    step: Typical
    profile: MachineProfile | None = None

    @property
    def drive_use(self) -> float | None:
        """Share of what the drive can do that the step's bytes take, where a profile says it."""
        drive = self.profile.all_drives() if self.profile is not None else None
        if drive is None:
            return None
        both = 2 * min(self.step.read_bytes, self.step.write_bytes)
        alone = self.step.read_bytes + self.step.write_bytes - both
        rate = drive.read if self.step.read_bytes > self.step.write_bytes else drive.write
        return (both / drive.mixed + alone / rate) / self.step.period_s


Rule = Callable[[Facts], Finding | None]


def findings(run: Figures, profile: MachineProfile | None = None) -> list[Finding]:
    """The largest cause first."""
    facts = Facts(run, typical(run.settled()), profile)
    found = [finding for rule in RULES if (finding := rule(facts)) is not None]
    return sorted(found, key=lambda finding: -finding.share)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def page_in(facts: Facts) -> Finding | None:
    share = facts.step.share(STALLED["nvme_read"])
    if share < WORTH_A_WORD:
        return None
    if not facts.step.read_bytes:
        return Finding(
            "update",
            share,
            "The update",
            f"{_percent(share)} of the time waits for weights whose update is not done. No tier file is read, so it is "
            "the update itself: give the process more cores, or more tokens to each step (train.batch_size).",
        )
    use, busy = facts.drive_use, facts.step.busy
    measured = f"moved {_percent(use)} of what the profile says it can" if use is not None else ""
    seen = measured or f"had requests in flight for {_percent(busy)} of the time"
    start = f"{_percent(share)} of the time waits for page-in. The drive {seen}"
    if (use if use is not None else busy) >= _SATURATED:
        return Finding(
            "drive",
            share,
            "The drive",
            f"{start}: it is the bound. Move fewer bytes (placement.gradients or placement.params to the host, as far "
            "as there is memory), give more tokens to each step (train.batch_size), or add a drive (tiers.nvme).",
        )
    return Finding(
        "staging",
        share,
        "Reading ahead",
        f"{start}: it could do more. More staging memory (tiers.host) lets more of the next step be read during the "
        "backward; tiers.prefetch and io.queue_depth are next.",
    )


def other_half(facts: Facts) -> Finding | None:
    """The drive idles in the backward, and forwards wait for it."""
    halves, run = facts.run.halves, facts.run
    if halves is None or run.overlap != "forward" or not facts.step.read_bytes:
        return None
    clips, known = clips_of(run)
    # What the first unit waits for stays: its gradients come last in the backward.
    waits = halves.forward_waits - facts.step.cold
    if waits < WORTH_A_WORD or halves.backward_use > _IDLE or 2 * clips > known:
        return None
    why = (
        ""
        if not run.is_auto
        else ' ("auto" found too little free there, or no weights and optimizer state that both lie there)'
    )
    acted = f" (clipping acted in {clips} of {known} steps, which it would not serve)" if clips else ""
    return Finding(
        "other half",
        waits,
        "The other half of the step",
        f"Forwards wait for page-in for {_percent(waits)} of the time, not counting their start, and the drive has "
        f"requests in {_percent(halves.backward_use)} of the backward only. "
        f'optimizer.overlap = "both" makes updates there{acted}; '
        + (
            "on durable tiers it takes no more space."
            if run.durable
            else f"it takes twice the space for weights and optimizer state on nvme{why}."
        ),
    )


def cold_start(facts: Facts) -> Finding | None:
    share, steps = facts.step.cold, [step.ahead for step in facts.run.settled()]
    waits = sum(facts.step.share(STALLED[kind]) for kind in STALLED)
    if share < WORTH_A_WORD or 2 * share < waits:
        return None
    text = f"{_percent(share)} of the time waits at the start of a forward, before its first unit can run. "
    needed, read = (median(getattr(step, key) for step in steps) for key in ("start_bytes", "read_ahead_bytes"))
    if facts.step.read_bytes and needed > read:
        text += (
            f"That unit and those around it have {amount(needed)} of state, of which the backward before had room to "
            f"read {amount(read)} ahead: about {amount(needed - read)} more of tiers.host (staging) hold the rest."
        )
    else:
        text += (
            "Their state was asked for in the backward before, so room is not what is missing: what is left is the "
            "drive, the update itself and, on several ranks, the gather."
        )
    return Finding("cold start", share, "The start of the forward", text)


def lost_tries(facts: Facts) -> Finding | None:
    tries = tries_of(facts.run)
    if tries is None or not tries.lost or tries.tried + len(tries.left_out) < _FEWEST_STEPS:
        return None
    if len(tries.lost) < _LOST * tries.tried:
        return None
    clips, known = clips_of(facts.run)
    cause = (
        f"Clipping acts in {clips} of {known} steps"
        if tries.lost_to_clipping
        else "The hyperparameters change between backward and step, or steps are skipped"
    )
    return Finding(
        "lost tries",
        0.0,
        "Updates ahead of the step",
        f'{cause}, so optimizer.overlap = "both" gains nothing: {len(tries.lost)} of {tries.tried} tries were lost. It '
        f"costs next to nothing ({amount(tries.redone_bytes)} written in vain in the whole run, "
        f'{len(tries.left_out)} steps went without), but twice the space on nvme, which "forward" does not take.',
    )


def host_budget(facts: Facts) -> Finding | None:
    share = facts.step.share(STALLED["host_budget"])
    if share < WORTH_A_WORD:
        return None
    text = (
        f"{_percent(share)} of the time stands in line for staging memory, all of which holds tiles on their way to "
        "the drive. Raise tiers.host"
    )
    host = facts.run.budgets.get("host", 0)
    return Finding("host budget", share, "Host memory", f"{text} (it came to {amount(host)})." if host else f"{text}.")


def page_out(facts: Facts) -> Finding | None:
    share = facts.step.share(STALLED["nvme_write"])
    if share < WORTH_A_WORD:
        return None
    return Finding(
        "writing",
        share,
        "Writing gradients",
        f"{_percent(share)} of the time waits for gradients, or for a flush, to reach their tier. Keep gradients in "
        'host memory (placement.gradients = "host"), or raise tiers.device so that more of them can be on their way.',
    )


def gather(facts: Facts) -> Finding | None:
    share = facts.step.share(STALLED["gather"])
    if share < WORTH_A_WORD:
        return None
    waits = facts.run.gather_waits
    start = f"{_percent(share)} of the time waits for gathers and reductions. "
    if len(waits) > 1 and max(waits.values()) > 2 * min(waits.values()):
        last = min(waits, key=lambda rank: waits[rank])
        return Finding(
            "slow rank",
            share,
            "A slow rank",
            f"{start}Rank {last} waits least: the others wait for it. Look at its timeline, its drive and its cores.",
        )
    return Finding(
        "collectives",
        share,
        "The other ranks",
        f"{start}All ranks wait alike, so it is the network, or reads behind it: larger units (sharding.min_unit), "
        "sharding.reshard_after_forward = false where the weights fit, or a lower sharding.stage move fewer bytes.",
    )


def update_waits(facts: Facts) -> Finding | None:
    share = facts.step.share(STALLED["optimizer"])
    if share < WORTH_A_WORD:
        return None
    advice = (
        'Use optimizer.overlap = "forward", which hides it behind the next forward.'
        if facts.run.overlap == "none"
        else "Something asks for finished weights in every step, such as gradients that arrive before their update "
        "was made: keep evaluation and tz.gathered out of the step."
    )
    return Finding(
        "waiting update", share, "The update", f"{_percent(share)} of the time waits for updates to end. {advice}"
    )


def _spent_on(
    facts: Facts, phase: str, rule: str, title: str, text: str, least: float = WORTH_A_WORD
) -> Finding | None:
    """What a phase took, if it was ``least`` of the time; ``text`` goes on behind the share."""
    share = facts.step.share(phase)
    return Finding(rule, share, title, f"{_percent(share)} of the time {text}") if share >= least else None


def recompute(facts: Facts) -> Finding | None:
    return _spent_on(
        facts,
        "recompute",
        "recompute",
        "Recomputation",
        'runs forwards again for the backward. Where memory is left, activations.recompute = "none" saves it.',
        least=2 * WORTH_A_WORD,
    )


def own_loop(facts: Facts) -> Finding | None:
    return _spent_on(
        facts,
        "other",
        "outside",
        "Outside the model",
        "is inside the step but in no forward or backward of the model: the loss, the data of later micro-batches, or "
        "other work of the loop.",
    )


def between(facts: Facts) -> Finding | None:
    return _spent_on(
        facts,
        "between",
        "between",
        "Between steps",
        "passes between the steps: loading data, validation, checkpoints (checkpoint.async writes them beside the "
        "training), the loop's own bookkeeping.",
    )


def step_call(facts: Facts) -> Finding | None:
    return _spent_on(
        facts,
        "optimizer_step",
        "step call",
        "The call of the optimizer",
        "is in clip_grad_norm_ and optimizer.step() themselves, waits not counted: many small parameters, each with "
        "hyperparameters to fix.",
    )


def computing(facts: Facts) -> Finding | None:
    share = facts.step.share("forward", "backward", "computing")
    if share < 0.5:
        return None
    text = f"{_percent(share)} of the time computes forward and backward"
    if share >= 0.85:
        text += ": that is the bound, and the tiers keep up. Faster steps need faster compute."
    else:
        text += "; the rest is below."
    return Finding("computing", share, "Computing", text)


def uneven(facts: Facts) -> Finding | None:
    times = sorted(step.period_s for step in facts.run.settled())
    if len(times) < 10 or times[-1 - len(times) // 10] < 1.5 * facts.step.period_s:
        return None
    return Finding(
        "uneven",
        0.0,
        "Uneven steps",
        f"One step in ten takes more than {times[-1 - len(times) // 10] / facts.step.period_s:.1f} times the median: "
        "checkpoints, validation, or others on the machine or its drive.",
    )


RULES: tuple[Rule, ...] = (
    computing,
    page_in,
    other_half,
    cold_start,
    host_budget,
    page_out,
    gather,
    update_waits,
    recompute,
    step_call,
    own_loop,
    between,
    uneven,
    lost_tries,
)
