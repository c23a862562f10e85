"""Parameters whose values are away: they keep shape, dtype and identity, and page their values in when somebody reads
them.

While its unit is not in use a parameter's class is `PagedParameter` and its data a one-element NaN, expanded to the
true shape without memory. The class intercepts every PyTorch function: metadata is answered, reading pages a copy in,
writing is refused with an error that names the parameter and `tierzero.gathered`. During its unit's forward the same
object is an ordinary ``nn.Parameter`` over the gathered buffer, at no cost per operation. (PyTorch's lazy modules
change a parameter's class in the same way.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch._guards import TracingContext

from tierzero.errors import ConfigError, NotResidentError
from tierzero.graphs import out_of_graphs
from tierzero.runtime.transforms import outside_transforms

# fmt: off
_METADATA = frozenset((
    "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "ndim", "names", "itemsize",
    "is_meta", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla", "is_mps",
    "is_xpu", "is_sparse_csr", "is_complex", "is_floating_point", "is_signed", "is_inference", "is_conj",
    "is_neg", "numel", "size", "dim", "nelement", "element_size", "ndimension", "nbytes", "output_nr",
    "_version", "retains_grad", "register_hook", "retain_grad",
    "_backward_hooks", "_post_accumulate_grad_hooks", "__hash__", "__len__", "__dir__",
    "is_shared", "volatile", "name", "has_names", "is_tensor", "is_same_size", "get_device",
    "is_distributed", "_is_view", "_base", "storage_offset", "is_pinned",
))
_LAYOUT = frozenset(("stride", "is_contiguous", "dim_order"))
"""Answered as for the whole parameter: what stands for it has no memory of that layout."""
# fmt: on
_REFUSED = frozenset(
    {
        "data",
        "data_ptr",
        "untyped_storage",
        "storage",
        "_typed_storage",
        "set_",
        "share_memory_",
        "__deepcopy__",
        "__reduce_ex__",
        "detach_",
    }
)
_GRAD = frozenset({"grad", "_grad"})
_GRADIENT: Any = torch.Tensor.grad
"""The attribute itself, also of a class that has another."""
_ITSELF = frozenset({"view_as", "expand_as"})
"""Of a parameter and itself: the way to the node that accumulates its gradient, which is beneath its values."""
_BY_IDENTITY = frozenset({torch.autograd.grad, torch.autograd.backward})
"""Functions that mean the parameter object itself, not its values."""


class ParameterOwner(Protocol):
    """What a parameter that is away asks of the runtime."""

    @property
    def name(self) -> str: ...

    def fetch_copy(self) -> torch.Tensor:
        """The full values in a tensor of its own, without autograd history; raises NotResidentError where that is not
        possible.
        """

    def gradient_for_user(self) -> torch.Tensor | None: ...

    def discard_gradient(self) -> None: ...

    def set_requires_grad(self, wanted: bool) -> None: ...


class _PageIn(torch.autograd.Function):
    """The full values of a parameter that is away; the gradient goes to the parameter itself."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, owner: ParameterOwner) -> torch.Tensor:
        return owner.fetch_copy()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class PagedParameter(nn.Parameter):
    """A parameter that is away. Instances are made by changing an existing parameter's class, never by construction."""

    _tierzero: ParameterOwner

    @classmethod
    @out_of_graphs
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if TracingContext.try_get() is not None:
            _end_graph()
        kwargs = kwargs or {}
        name, kind = _name_and_kind(func)
        with torch._C.DisableTorchFunctionSubclass():
            first = args[0] if args else None
            if func in _BY_IDENTITY:
                return func(*args, **kwargs)
            if name in _GRAD and isinstance(first, PagedParameter):
                return _grad_access(first._tierzero, kind, args)
            if name in ("requires_grad", "requires_grad_") and kind != "__get__" and isinstance(first, PagedParameter):
                return _set_requires_grad(first, bool(args[1]) if len(args) > 1 else kwargs.get("requires_grad", True))
            if name in _METADATA and kind != "__set__":
                return func(*args, **kwargs)
            if name in _LAYOUT and isinstance(first, PagedParameter):
                return func(torch.empty(first.shape, device="meta"), *args[1:], **kwargs)
            if name == "__repr__":
                return _describe(first) if isinstance(first, PagedParameter) else func(*args, **kwargs)
            if name == "register_post_accumulate_grad_hook":
                refuse_accumulate_hook(_first_paged(args, kwargs)._tierzero.name)
            if name in _REFUSED or kind == "__set__":
                _refuse(_first_paged(args, kwargs), name)
            if name in _ITSELF and len(args) == 2 and args[1] is first and isinstance(first, PagedParameter):
                return page_in(first)
            written = _written(name, args, kwargs)
            if written is not None:
                _refuse(written, name)
            return func(*_paged_in(args), **{key: _paged_in(value) for key, value in kwargs.items()})

    # PyTorch offers these to no ``__torch_function__``.

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self, "set_")

    def as_subclass(self, cls: Any) -> Any:
        return page_in(self).as_subclass(cls)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise NotResidentError(
            f"parameter {self._tierzero.name!r} of a sharded model cannot be copied; copy the model before "
            "tierzero.shard, "
            "or load tierzero.full_state_dict(model) into a second one"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotResidentError(
            f"parameter {self._tierzero.name!r} of a sharded model cannot be pickled; save "
            "tierzero.full_state_dict(model) or use "
            "tierzero.save_checkpoint"
        )


class GatheredParameter(nn.Parameter):
    """A parameter inside `tierzero.gathered`: its values are there, its gradient is in the tiers as ever. An ordinary
    parameter would say that it has none, and what clips or steps by ``.grad`` would do nothing. Made as
    `PagedParameter` is.
    """

    _tierzero: ParameterOwner

    @property
    def grad(self) -> torch.Tensor | None:
        return _grad_access(self._tierzero, "__get__", ())

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _grad_access(self._tierzero, "__set__", (self, value))

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> NoReturn:
        refuse_accumulate_hook(self._tierzero.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copied
        return copied


def take_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """What autograd has put at the parameter, which has it no longer."""
    with torch._C.DisableTorchFunctionSubclass():
        found: torch.Tensor | None = _GRADIENT.__get__(parameter)
        _GRADIENT.__set__(parameter, None)
    return found


def _end_graph() -> NoReturn:
    """For PyTorch's compiler, which looks at what a graph is going to use: not at values that are away. It then leaves
    the operation out of its graphs, and running it pages in.
    """
    from torch._dynamo.exc import Unsupported

    raise Unsupported("a parameter whose values TierZero keeps in the tiers", "TierZero parameter that is away")


def _name_and_kind(func: Callable[..., Any]) -> tuple[str, str]:
    """A property arrives as its descriptor's ``__get__`` or ``__set__``; everything else under its own name."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        descriptor = getattr(func, "__self__", None)
        return getattr(descriptor, "__name__", ""), name
    return name, ""


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PagedParameter | None:
    """The parameter that a call would write into, if any."""
    out = kwargs.get("out")
    if isinstance(out, PagedParameter):
        return out
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__delitem__")
    in_place = in_place or (
        name.startswith("__i") and name.endswith("__") and name not in ("__int__", "__index__", "__invert__")
    )
    # Some of torch.nn.init's functions pass the tensor on by keyword.
    first = next(iter((*args, *kwargs.values())), None)
    if not in_place:
        return None
    if isinstance(first, list | tuple):  # torch._foreach_*_
        return next((item for item in first if isinstance(item, PagedParameter)), None)
    return first if isinstance(first, PagedParameter) else None


def _first_paged(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PagedParameter:
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, PagedParameter))


def _paged_in(value: Any) -> Any:
    if isinstance(value, PagedParameter):
        return page_in(value)
    if isinstance(value, list | tuple) and any(isinstance(item, PagedParameter | list | tuple) for item in value):
        items = [_paged_in(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def page_in(parameter: PagedParameter) -> torch.Tensor:
    """The parameter's full values as a tensor of its own, tied to the parameter in autograd where gradients are
    recorded.
    """
    owner = parameter._tierzero
    with outside_transforms():
        if torch.is_grad_enabled() and parameter.requires_grad:
            full: torch.Tensor = _PageIn.apply(parameter, owner)  # type: ignore[no-untyped-call]
            return full
        return owner.fetch_copy()


def _grad_access(owner: ParameterOwner, kind: str, args: tuple[Any, ...]) -> torch.Tensor | None:
    if kind == "__set__":
        if args[1] is not None:
            raise NotResidentError(
                f"the gradient of {owner.name!r} is kept in the tiers and cannot be assigned; set it to None to drop "
                "it, or use tierzero.write_state(parameter, 'gradient', values)"
            )
        owner.discard_gradient()
        return None
    return owner.gradient_for_user()


def _set_requires_grad(parameter: PagedParameter, wanted: bool) -> PagedParameter:
    parameter._tierzero.set_requires_grad(wanted)
    parameter.requires_grad = wanted
    return parameter


def _refuse(parameter: PagedParameter, name: str) -> NoReturn:
    shown = parameter._tierzero.name
    raise NotResidentError(
        f"{name} on parameter {shown!r}: its values are away in the tiers; use `with tierzero.gathered(parameter):` "
        "to read or change them"
    )


def refuse_accumulate_hook(name: str) -> NoReturn:
    """Of a hook that would look for the gradient after it has gone to the tiers."""
    raise ConfigError(
        f"register_post_accumulate_grad_hook on parameter {name!r}: its gradient goes to the tiers as it arrives and "
        "is not in .grad; use register_hook to see or change it, optimizer.overlap = 'backward' to update in the "
        "backward"
    )


def _describe(parameter: PagedParameter) -> str:
    return (
        f"PagedParameter({parameter._tierzero.name!r}, shape={tuple(parameter.shape)}, dtype={parameter.dtype}, "
        f"requires_grad={parameter.requires_grad}, values in the tiers)"
    )


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The data of a parameter that is away: NaN of the full shape, in one element of memory."""
    if shape.numel() == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    fill = float("nan") if dtype.is_floating_point else 0
    return torch.full((), fill, dtype=dtype, device=device).expand(shape)
