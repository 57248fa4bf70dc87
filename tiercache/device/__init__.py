"""The GPU tier: the states of running requests and their idle checkpoints, in an engine's process.

Needs torch and `tiercache_kernels`; nothing else of tiercache imports this package. Everything is on
torch tensors of any device. One thread owns all of it: the one that schedules the engine's steps.
"""

from tiercache.device.blocks import Block, StateBlocks
from tiercache.device.codecs import CODECS, Codec, codec_in, codec_named, encoded
from tiercache.device.gathering import gather
from tiercache.device.journal import Change, CodecJournal
from tiercache.device.lanes import Fence, HostLane, Lane, lane_for
from tiercache.device.outlets import DirectOutlet, ThreadOutlet
from tiercache.device.ownership import (
    REQUANTISED_MAX,
    Checkpoint,
    Ownership,
    Run,
    Standing,
    Turn,
)
from tiercache.device.pages import PagedBlocks
from tiercache.device.placement import LeastRecent, Pinned, Placement
from tiercache.device.pools import ActivePool, CheckpointPool, Seat, Space
from tiercache.device.registering import Registrar, Registration, cuda_registrar
from tiercache.device.resharding import Held, assemble, cover, writes
from tiercache.device.slots import Hold, Private, Shared, Skipped, Slot, Stale
from tiercache.device.staging import Named, Outward, Staging, readable
from tiercache.device.tier import Demoted, DeviceTier, Outlet, Policies, Restored
from tiercache.device.unified import End, UnifiedPool, UnitKind, Usage, slab_for

__all__ = [
    "CODECS",
    "REQUANTISED_MAX",
    "ActivePool",
    "Block",
    "Change",
    "Checkpoint",
    "CheckpointPool",
    "Codec",
    "CodecJournal",
    "Demoted",
    "DeviceTier",
    "DirectOutlet",
    "End",
    "Fence",
    "Held",
    "Hold",
    "HostLane",
    "Lane",
    "LeastRecent",
    "Named",
    "Outlet",
    "Outward",
    "Ownership",
    "PagedBlocks",
    "Pinned",
    "Placement",
    "Policies",
    "Private",
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
    "ThreadOutlet",
    "Turn",
    "UnifiedPool",
    "UnitKind",
    "Usage",
    "assemble",
    "codec_in",
    "codec_named",
    "cover",
    "cuda_registrar",
    "encoded",
    "gather",
    "lane_for",
    "readable",
    "slab_for",
    "writes",
]
