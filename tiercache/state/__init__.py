"""The vocabulary: keys, layouts, boundaries. Pure values; imports nothing of ours but errors."""

from tiercache.state.boundary import Boundary, resolve, resumable
from tiercache.state.care import Care, Hint
from tiercache.state.keys import NATIVE, Chain, GivenChain, Key, Label, Namespace
from tiercache.state.layout import Kind, Layout, Part, Shard, Tensor
from tiercache.state.place import Extent, Piece
from tiercache.state.record import Record

__all__ = [
    "NATIVE",
    "Boundary",
    "Care",
    "Chain",
    "Extent",
    "GivenChain",
    "Hint",
    "Key",
    "Kind",
    "Label",
    "Layout",
    "Namespace",
    "Part",
    "Piece",
    "Record",
    "Shard",
    "Tensor",
    "resolve",
    "resumable",
]
