"""The GPU tier: the states of running requests and their idle checkpoints, in an engine's process.

Needs torch and `tiercache_kernels`; nothing else of tiercache imports this package. Everything is on
torch tensors of any device. One thread owns all of it: the one that schedules the engine's steps.
"""

from tiercache.device.blocks import Block, StateBlocks
from tiercache.device.cabinet import Cabinet, Stats, Terms
from tiercache.device.codecs import CODECS, Codec, codec_in, codec_named, encoded
from tiercache.device.engine_states import EngineStates
from tiercache.device.gathering import gather
from tiercache.device.handles import Checkpoint, Run, Standing, Turn
from tiercache.device.index import Entry, Index, Prompt
from tiercache.device.journal import Change, CodecJournal
from tiercache.device.lanes import Fence, HostLane, Lane, lane_for
from tiercache.device.leaving import Demoted, Outlet
from tiercache.device.marked import MarkedTier
from tiercache.device.outlets import DirectOutlet, ThreadOutlet
from tiercache.device.ownership import REQUANTISED_MAX, Ownership
from tiercache.device.pages import PagedBlocks
from tiercache.device.placement import (
    PLACEMENTS,
    CostAware,
    LeastRecent,
    Pinned,
    Placement,
    Policies,
    Worth,
    placement_named,
)
from tiercache.device.pools import ActivePool, CheckpointPool, Seat, Space
from tiercache.device.registering import Registrar, Registration, cuda_registrar
from tiercache.device.resharding import Held, assemble, cover, writes
from tiercache.device.slots import Hold, Private, Shared, Skipped, Slot, Stale
from tiercache.device.staging import Named, Outward, Staging, readable
from tiercache.device.tier import DeviceTier, Restored
from tiercache.device.unified import End, UnifiedPool, UnitKind, Usage, slab_for

__all__ = [
    "CODECS",
    "PLACEMENTS",
    "REQUANTISED_MAX",
    "ActivePool",
    "Block",
    "Cabinet",
    "Change",
    "Checkpoint",
    "CheckpointPool",
    "Codec",
    "CodecJournal",
    "CostAware",
    "Demoted",
    "DeviceTier",
    "DirectOutlet",
    "End",
    "EngineStates",
    "Entry",
    "Fence",
    "Held",
    "Hold",
    "HostLane",
    "Index",
    "Lane",
    "LeastRecent",
    "MarkedTier",
    "Named",
    "Outlet",
    "Outward",
    "Ownership",
    "PagedBlocks",
    "Pinned",
    "Placement",
    "Policies",
    "Private",
    "Prompt",
    "Registrar",
    "Registration",
    "Restored",
    "Run",
    "Seat",
    "Shared",
    "Skipped",
    "Slot",
    "Space",
    "Staging",
    "Stale",
    "Standing",
    "StateBlocks",
    "Stats",
    "Terms",
    "ThreadOutlet",
    "Turn",
    "UnifiedPool",
    "UnitKind",
    "Usage",
    "Worth",
    "assemble",
    "codec_in",
    "codec_named",
    "cover",
    "cuda_registrar",
    "encoded",
    "gather",
    "lane_for",
    "placement_named",
    "readable",
    "slab_for",
    "writes",
]
