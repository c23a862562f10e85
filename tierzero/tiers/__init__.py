"""Where bytes live: budgets, page-aligned buffers, tier files, the I/O engine and the tiered store."""

from __future__ import annotations

from tierzero.tiers.allocator import PAGE, Allocator, HostAllocator, page_round
from tierzero.tiers.cloning import Cloner
from tierzero.tiers.directory import TierDirectory, free_bytes
from tierzero.tiers.engine import IoEngine, Priority, Request
from tierzero.tiers.file import Direct, Piece
from tierzero.tiers.flat_file import FlatFile
from tierzero.tiers.memory import Buffer, MemoryPool
from tierzero.tiers.objects import Extent, Lease, Residency, StoredObject
from tierzero.tiers.store import TieredStore
from tierzero.tiers.striped_file import StripedFile
from tierzero.tiers.tier import Tier

__all__ = [
    "PAGE",
    "Allocator",
    "Buffer",
    "Cloner",
    "Direct",
    "Extent",
    "FlatFile",
    "HostAllocator",
    "IoEngine",
    "Lease",
    "MemoryPool",
    "Piece",
    "Priority",
    "Request",
    "Residency",
    "StoredObject",
    "StripedFile",
    "Tier",
    "TierDirectory",
    "TieredStore",
    "free_bytes",
    "page_round",
]
