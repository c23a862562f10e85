"""Adam over sharded state: a ``torch.optim.Optimizer`` whose parameters and moments live in the tiers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tierzero.errors import ConfigError
from tierzero.graphs import out_of_graphs
from tierzero.optim.owner import GroupHyper, OwnedParameter, StepOwner, owned, require_dropping

_UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")


@dataclass(frozen=True)
class _Place:
    """Where a parameter stands in the param groups."""

    group: dict[str, Any]
    position: int

    def holds(self, slot: OwnedParameter, groups: list[dict[str, Any]]) -> bool:
        parameters = self.group["params"]
        here = self.position < len(parameters) and owned(parameters[self.position]) is slot
        return here and any(group is self.group for group in groups)


class _Adam(torch.optim.Optimizer):
    """What AdamW and Adam share. ``decoupled`` says which one a class is."""

    decoupled: bool

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **unsupported: Any,
    ) -> None:
        for name in unsupported:
            if name not in (*_UNSUPPORTED, "foreach", "fused"):
                raise TypeError(f"{type(self).__name__} has no argument {name!r}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _check("the arguments", defaults | unsupported, self.decoupled)
        self._places: dict[OwnedParameter, _Place] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with hyperparameters of their own. An empty group stays a group, as LR schedulers expect.

        Raises ConfigError for a tensor that is not a parameter of a sharded model.
        """
        if isinstance(param_group.get("params"), list | tuple) and not param_group["params"]:
            for name, value in self.defaults.items():
                param_group.setdefault(name, value)
            param_group["params"] = []
            self.param_groups.append(param_group)
            return
        super().add_param_group(param_group)
        _check(f"param group {len(self.param_groups) - 1}", self.param_groups[-1], self.decoupled)
        self._find_places()

    @torch.no_grad()
    @out_of_graphs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Fixes this step's update: hyperparameters, clip factor, gradients. The tiles are updated as
        ``optimizer.overlap`` says;
        whatever reads the weights sees the updated values. Returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._find_places()
        for owner in self._owners():
            owner.step(self._hyper_of, self._owned_by(owner))
        return loss

    @out_of_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, wherever they are. Raises ConfigError with ``set_to_none=False``."""
        require_dropping(set_to_none)
        self._find_places()
        for owner in self._owners():
            owner.zero_grad(self._owned_by(owner))

    def state_dict(self) -> dict[str, Any]:
        """Hyperparameters and step counts. Moments and master weights live in the tiers: `tierzero.save_checkpoint`
        keeps those.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        groups = []
        index = 0
        for group in self.param_groups:
            packed = {key: value for key, value in group.items() if key != "params"}
            packed["params"] = list(range(index, index + len(group["params"])))
            index += len(group["params"])
            groups.append(packed)
        steps = [_required_slot(parameter).step for group in self.param_groups for parameter in group["params"]]
        state = {position: {"step": step} for position, step in enumerate(steps)}
        found: dict[str, Any] = {"state": state, "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            found = after(self, found) or found
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes hyperparameters and step counts back; the moments in the tiers must be those of the same step.

        Raises ConfigError when groups, their sizes or the moments' steps differ.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        saved = copy.deepcopy(state_dict["param_groups"])
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in saved] != sizes:
            raise ConfigError(
                f"optimizer state has param groups of {[len(g['params']) for g in saved]} parameters, the optimizer "
                f"of {sizes}; "
                "build it with the same groups"
            )
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        slots = [_required_slot(parameter) for parameter in parameters]
        for position, slot in enumerate(slots):
            _check_saved(_saved_state(state_dict, position), slot)
        for number, (group, values) in enumerate(zip(self.param_groups, saved, strict=True)):
            _check(f"param group {number}", group | values, self.decoupled)
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
            if isinstance(group.get("betas"), list):
                group["betas"] = tuple(group["betas"])
        for position, slot in enumerate(slots):
            if _saved_state(state_dict, position) is not None:
                slot.state_of = None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _find_places(self) -> None:
        """Takes the groups as they are now: whoever has the optimizer may reorder them and move parameters."""
        before, self._places = self._places, {}
        for group in self.param_groups:
            for position, parameter in enumerate(group["params"]):
                slot = owned(parameter)
                if slot is None:
                    raise ConfigError(
                        f"{type(self).__name__}: a parameter of shape {tuple(parameter.shape)} does not belong to a "
                        "model sharded with tierzero.shard; shard the model first, or use torch.optim for it"
                    )
                self._places[slot] = _Place(group, position)
                if slot not in before:
                    slot.hyper_of = self._hyper_of
        for slot in before.keys() - self._places.keys():
            if slot.hyper_of == self._hyper_of:
                slot.hyper_of = None

    def _hyper_of(self, slot: OwnedParameter) -> GroupHyper | None:
        place = self._places.get(slot)
        if place is not None and not place.holds(slot, self.param_groups):  # a backward may ask before any step
            self._find_places()
            place = self._places.get(slot)
        return None if place is None else _hyper(place.group, self.decoupled)

    def _owners(self) -> list[StepOwner]:
        return list({id(slot.owner): slot.owner for slot in self._places}.values())

    def _owned_by(self, owner: StepOwner) -> list[OwnedParameter]:
        return [slot for slot in self._places if slot.owner is owner]


class AdamW(_Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019) over the parameters of a sharded model.

    Arguments, defaults of ``betas`` and ``eps``, and results are those of ``torch.optim.AdamW``; state is fp32
    whatever the weights are. ``lr`` and the others are read from ``param_groups`` at every step, so that
    ``torch.optim.lr_scheduler`` works as usual. The tiers hold one set of moments: another optimizer over the same
    parameters begins with fresh ones at its first step, and the one before it can no longer step them.
    """

    decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **unsupported: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **unsupported)


class Adam(_Adam):
    """Adam (Kingma and Ba, 2015), weight decay added to the gradient (L2), as ``torch.optim.Adam``."""

    decoupled = False


def _hyper(values: dict[str, Any], decoupled: bool) -> GroupHyper:
    """The hyperparameters of a param group. Raises ConfigError for what is no number."""
    try:
        beta1, beta2 = values["betas"]
        return GroupHyper(
            float(values["lr"]),
            float(beta1),
            float(beta2),
            float(values["eps"]),
            float(values["weight_decay"]),
            decoupled,
        )
    except (KeyError, TypeError, ValueError, RuntimeError):
        shown = ", ".join(f"{name}={values.get(name)!r}" for name in ("lr", "betas", "eps", "weight_decay"))
        raise ConfigError(f"{shown}: these must be numbers, betas a pair of them") from None


def _check(where: str, values: dict[str, Any], decoupled: bool) -> None:
    """Raises ConfigError, with ``where``, for hyperparameters that are unsupported or define no update."""
    try:
        unsupported = next((name for name in _UNSUPPORTED if values.get(name)), None)
        if unsupported is not None:
            raise ConfigError(f"{unsupported} is not supported; leave it out or use torch.optim")
        _hyper(values, decoupled).at(1)
    except ConfigError as error:
        raise ConfigError(f"{where} of the optimizer: {error}") from None


def _saved_state(state_dict: dict[str, Any], position: int) -> dict[str, Any] | None:
    """JSON turns the positions into text."""
    found: dict[str, Any] | None = state_dict["state"].get(position, state_dict["state"].get(str(position)))
    return found


def _check_saved(saved: dict[str, Any] | None, slot: OwnedParameter) -> None:
    if saved is None:
        return
    if saved.keys() != {"step"}:
        raise ConfigError(
            f"optimizer state for parameter {slot.name!r} has {', '.join(saved)}: it is another optimizer's, and "
            "moments cannot be taken from a state dict; use tierzero.load_checkpoint, or begin with fresh ones"
        )
    if int(saved["step"]) != slot.step:
        raise ConfigError(
            f"optimizer state of step {int(saved['step'])} for parameter {slot.name!r}, whose moments in the tiers are "
            f"of step {slot.step}; moments are not in a state dict: use tierzero.load_checkpoint"
        )


def _required_slot(parameter: torch.Tensor) -> OwnedParameter:
    slot = owned(parameter)
    assert slot is not None
    return slot
