"""Computing with the averages of the weights: in the tiers they and the masters change places, and back at the end.

Nothing is computed for it but the weight that a master is rounded to, so that every bit comes back. Durable tiers have
the state of their last seal untouched in the other slots meanwhile: the first exchange writes to the ones that no seal
needs, the second writes over that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tierzero.errors import ConfigError
from tierzero.optim.average import exchange_average
from tierzero.runtime.state import GroupState, Piece
from tierzero.runtime.tile_io import OpenTile, Parts
from tierzero.runtime.visits import visit

if TYPE_CHECKING:
    from tierzero.runtime.runtime import Runtime


@contextmanager
def averages_in_use(runtime: Runtime) -> Iterator[None]:
    """Inside, each parameter's average is its master, and its master the average. Every rank must enter and leave it.

    What would change the state inside is refused (`WholeState.refuse_averages`). Raises ConfigError where there are no
    averages, or where weights are in use.
    """
    _check(runtime)
    runtime.flush_to_read()
    _meet(runtime)
    try:
        _exchange(runtime)
        yield
    finally:
        if runtime.is_open and runtime.whole_state.averaged:
            runtime.flush()
            _exchange(runtime)
            _meet(runtime)


def _check(runtime: Runtime) -> None:
    runtime.require_open()
    runtime.whole_state.refuse_averages("averaged: a second one")
    if not any(map(_has_average, runtime.groups())):
        raise ConfigError("averaged: this model keeps no averages of its weights; set optimizer.ema before the start")
    if runtime.in_model_code:
        raise ConfigError("averaged: the model is in a forward or backward; enter it between them")
    if runtime.held_open:
        name = next(iter(runtime.held_open)).name
        raise ConfigError(f"averaged: parameter {name!r} is held by tierzero.gathered; leave that first")


def _meet(runtime: Runtime) -> None:
    """Waits for the other ranks: a gather on one that is elsewhere would mix weights and averages."""
    if runtime.collectives is not None:
        runtime.collectives.barrier()


def _exchange(runtime: Runtime) -> None:
    """Of all parameters on this rank."""
    whole_state = runtime.whole_state
    whole_state.before_edit()
    for unit in runtime.units:
        runtime.pager.forget(unit)
    with runtime.engine.unbroken("while weights and their averages changed places"):
        averaged = [group for group in runtime.groups() if _has_average(group)]
        for group in averaged:
            group.version += 1
        visit(runtime, [slot for group in averaged for slot in group.slots], Parts.STATE, _exchange_piece, whole=True)
        whole_state.averaged = not whole_state.averaged


def _exchange_piece(opened: OpenTile, piece: Piece) -> bool:
    assert opened.weight is not None
    assert opened.group.fmt is not None
    exchange_average(opened.group.fmt, opened.weight[piece.of_tile], opened.cut(piece.of_tile))
    return True


def _has_average(group: GroupState) -> bool:
    return group.fmt is not None and group.fmt.is_averaged
