"""State formats: sizes, and masters in and out of them exactly."""

from __future__ import annotations

import pytest
import torch

from tierzero.errors import ConfigError
from tierzero.optim import formats
from tierzero.optim.formats import load_master, state_format, store_master


def test_bytes_per_parameter() -> None:
    sizes = {fmt.name: fmt.optimizer_bytes(1000) / 1000 for fmt in map(state_format, formats._MASTERS)}
    assert sizes == {"bf16": 10, "fp32": 8, "fp16": 12}
    assert [segment.name for segment in state_format(torch.bfloat16).optimizer] == ["lo", "m", "v"]


def test_untrainable_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="int64"):
        state_format(torch.int64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_master_survives_storing_in_chunks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_CHUNK", 16)
    fmt = state_format(dtype)
    master = torch.cat([torch.randn(100), torch.tensor([0.0, -0.0, 1e-45, 3.4e38, torch.inf, -torch.inf])])
    weight = torch.nn.Parameter(torch.empty(master.numel(), dtype=dtype))
    parts = {segment.name: torch.full((master.numel(),), 5, dtype=segment.dtype) for segment in fmt.optimizer}
    store_master(fmt, master, weight, parts)
    loaded = load_master(fmt, weight, parts)
    assert torch.equal(loaded.view(torch.int32), master.view(torch.int32))
    assert (parts["m"] == 5).all()
    assert (parts["v"] == 5).all()
    if dtype != torch.bfloat16:
        assert torch.equal(weight.detach(), master.to(dtype))
    loaded.zero_()
    assert torch.equal(load_master(fmt, weight, parts), master), "load_master returned the state itself"


def test_bad_tensors_are_named() -> None:
    fmt = state_format(torch.bfloat16)
    weight, parts = torch.zeros(4, dtype=torch.bfloat16), {"lo": torch.zeros(4, dtype=torch.int16)}
    assert load_master(fmt, weight, parts).tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="lacks segment 'lo'"):
        load_master(fmt, weight, {})
    with pytest.raises(ValueError, match="lo must be"):
        load_master(fmt, weight, {"lo": torch.zeros(4)})
    with pytest.raises(ValueError, match="master must be"):
        store_master(fmt, torch.zeros(5), weight, parts)
