"""Machine profiles for tests."""

from __future__ import annotations

from typing import Any

from tierzero.planner.machine import MachineProfile


def machine(**changes: Any) -> MachineProfile:
    """A small machine without a GPU; ``changes`` replace parts of its JSON."""
    value: dict[str, Any] = {
        "format": "tierzero-machine",
        "version": 1,
        "name": "a test's",
        "date": "2026-01-01",
        "source": "made up",
        "host": {"name": "cpu", "cores": 2, "memory_bytes": 16 * 2**30, "copy_bytes": 8e9},
        "compute": {
            "bf16": {
                "matmul": [{"rows": 256, "width": 512, "flops": 1e11}, {"rows": 2048, "width": 512, "flops": 2e11}],
                "attention": [{"length": 64, "flops": 5e10}],
                "pointwise_bytes": 1e10,
            }
        },
        "adam": {"1": 8e8, "2": 1.4e9},
        "drives": [{"name": "drive", "read": 2e9, "write": 2e9, "mixed": 1.6e9}],
    }
    return MachineProfile.from_json({**value, **changes}, "test")
