"""Buffers and dtypes: nothing but the parameters is converted, whichever way the model was built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tierzero as tz

from ..support.oracle import TIERS, config, sharded
from ..support.rank_pool import RankPool
from ..support.zoo import DIM, Normed, vectors


class Rotary(nn.Module):
    """A non-persistent fp32 table, an int64 and a bool buffer."""

    table: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        angle = torch.arange(1000.0)[:, None] / 10000 ** (torch.arange(DIM) / DIM)
        self.register_buffer("table", angle.sin(), persistent=False)
        self.register_buffer("positions", torch.arange(1000))
        self.register_buffer("mask", torch.arange(1000) % 3 == 0)
        self.mix = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.positions[: len(x)]
        return self.mix(x + self.table[rows].to(x.dtype)) * self.mask[rows, None]


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_buffers_are_those_of_a_plain_build(precision: str, empty: bool, tmp_path: Path) -> None:
    wanted = dict(Rotary().named_buffers())
    if empty:
        with tz.empty_init():
            model = Rotary()
    else:
        model = Rotary()
    with sharded(model, config(tmp_path, train={"precision": precision})):
        assert model(vectors(0, 0)).dtype is {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float)
        found = dict(model.named_buffers())
        assert found.keys() == wanted.keys()
        for name, buffer in wanted.items():
            assert found[name].dtype == buffer.dtype, name
            assert torch.equal(found[name], buffer), name
        assert tz.full_state_dict(model).keys() == Rotary().state_dict().keys()
        assert model.state_dict().keys() == Rotary().state_dict().keys()


@pytest.mark.parametrize("recompute", ["none", "unit"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_batch_norm_trains_and_keeps_its_statistics(precision: str, recompute: str, tmp_path: Path) -> None:
    settings = config(tmp_path, train={"precision": precision}, activations={"recompute": recompute})
    model, plain = Normed(), Normed()
    with sharded(model, settings):
        with torch.no_grad():
            plain.load_state_dict(tz.full_state_dict(model))
        optimizer = tz.AdamW(model.parameters(), lr=1e-2)
        trained = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for step in range(6):
            for each, its in ((model, optimizer), (plain, trained)):
                loss = each(vectors(step, 0, rows=64)).float().square().mean()
                loss.backward()
                its.step()
                its.zero_grad()
        norm, other = model.layers[1], plain.layers[1]
        assert norm.running_mean.dtype is torch.float32
        assert norm.weight.dtype is torch.float32
        assert int(norm.num_batches_tracked) == 6
        tolerance = 1e-5 if precision == "fp32" else 0.05
        torch.testing.assert_close(norm.running_mean, other.running_mean, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(norm.running_var, other.running_var, rtol=tolerance, atol=tolerance)
        x = vectors(50, 0)
        torch.testing.assert_close(
            model.eval()(x).float(), plain.eval()(x), rtol=tolerance, atol=tolerance if precision == "fp32" else 0.1
        )


class Mixed(nn.Module):
    """bf16 base, fp32 norm and adapter, and a frozen table of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).to(torch.bfloat16)
        self.norm = nn.LayerNorm(DIM)
        self.adapter = nn.Linear(DIM, DIM)
        self.table = nn.Parameter(torch.arange(DIM), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.base(x.to(torch.bfloat16)).float()
        return self.norm(h + self.adapter(x.float())) * (self.table % 3)


@pytest.mark.parametrize("tier", TIERS)
def test_mixed_dtypes_stay_apart(tier: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Mixed()
    torch.manual_seed(0)
    with sharded(Mixed(), config(tmp_path, tier, train={"precision": "bf16"})) as model:
        assert [p.dtype for p in model.parameters()] == [p.dtype for p in plain.parameters()]
        for _ in range(2):
            x = vectors(0, 0)
            have, want = model(x), plain(x)
            assert torch.equal(have, want)
            have.square().mean().backward()
            want.square().mean().backward()
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            if other.grad is not None:
                torch.testing.assert_close(tz.read_state(parameter, "gradient"), other.grad, rtol=1e-2, atol=1e-3)
            assert torch.equal(tz.full_state_dict(model)[name], other.detach()), name
        tz.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2).step()
        changed = tz.full_state_dict(model)
        for name, other in plain.named_parameters():
            assert torch.equal(changed[name], other.detach()) == (name == "table"), name


FROZEN = (torch.float64, torch.float8_e4m3fn, torch.int8, torch.uint16, torch.bool)


def _of_all_types() -> nn.Module:
    model = nn.Linear(DIM, DIM)
    for dtype in FROZEN:
        table = torch.arange(7).to(dtype)
        model.register_parameter(f"table_{str(dtype)[6:]}", nn.Parameter(table, requires_grad=False))
    return model


def frozen_types(rank: int, size: int, nvme: str, tier: str) -> None:
    with sharded(_of_all_types(), config(Path(nvme), tier)) as model:
        model(vectors(0, rank)).sum().backward()
        state = tz.full_state_dict(model)
        for name, parameter in _of_all_types().named_parameters():
            if not parameter.requires_grad:
                assert state[name].dtype is parameter.dtype
                assert torch.equal(state[name].view(torch.uint8), parameter.view(torch.uint8)), name
                with tz.gathered(model.get_parameter(name)):
                    assert torch.equal(model.get_parameter(name).view(torch.uint8), parameter.view(torch.uint8)), name


@pytest.mark.parametrize("tier", TIERS)
def test_frozen_weights_of_any_type_on_two_ranks(tier: str, tmp_path: Path, two_ranks: RankPool) -> None:
    """Backends move few types: gloo neither 8-bit floats nor unsigned integers."""
    two_ranks.run(frozen_types, str(tmp_path), tier)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.float8_e4m3fn])
def test_unsupported_dtypes_are_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    model.odd = nn.Parameter(torch.ones(3).to(dtype))
    with pytest.raises(tz.ConfigError, match=r"'odd'"):
        tz.shard(model, config(tmp_path))
    assert list(tmp_path.iterdir()) == []
