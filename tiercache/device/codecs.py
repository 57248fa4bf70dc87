"""How an idle checkpoint is held: as it is, or in fewer bytes.

A codec names the bytes that it makes, and its name is part of an object's key. Only recurrent states
are ever encoded, and they are recognised by their axes, never by their shape: with d_k == d_v a
transposed state has the same shape and would be quantised along the wrong axis without any test of
quality noticing. Convolution and integer states stay as they are in every codec.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

import torch

import tiercache_kernels as kernels
from tiercache.errors import LayoutError
from tiercache.state import NATIVE, Part, Tensor

_REDUCED: Final = {("head", "value", "key"): 1, ("channel", "key"): 1}
"""The axes of a recurrent state, and the one along which a scale is shared."""

_SUSPECT: Final = ("head", "key", "value")
_WIDE: Final = "float32"
_FLOAT: Final = ("float16", "bfloat16", "float32")
SCALE_DTYPE: Final = "float32"
"""Of every scale, whatever the state's: float16 would lose channels whose largest value is small."""


class Codec(Protocol):
    """One way to hold a state. `lossy`: what comes back differs from what went in."""

    @property
    def name(self) -> str:
        """Its name in keys: an identifier that says everything needed to read the bytes."""
        ...

    @property
    def lossy(self) -> bool:
        """Whether what comes back differs from what went in."""
        ...

    def forms(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that hold `tensor`; itself alone when it is left as it is."""
        ...

    def encode(
        self,
        source: torch.Tensor,
        source_slots: torch.Tensor,
        targets: Sequence[torch.Tensor],
        target_slots: torch.Tensor,
    ) -> None:
        """Write native slots `[layers, slots, *shape]` into the slots of `forms`."""
        ...

    def decode(
        self,
        sources: Sequence[torch.Tensor],
        source_slots: torch.Tensor,
        target: torch.Tensor,
        target_slots: torch.Tensor,
    ) -> None:
        """Write slots of `forms` into native slots."""
        ...


class Native:
    """Bytes as the engine holds them."""

    name = NATIVE
    lossy = False

    def forms(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return `tensor` itself."""
        return (tensor,)

    def encode(
        self,
        source: torch.Tensor,
        source_slots: torch.Tensor,
        targets: Sequence[torch.Tensor],
        target_slots: torch.Tensor,
    ) -> None:
        """Copy."""
        (target,) = targets
        kernels.copy_slots(source, source_slots, target, target_slots)

    def decode(
        self,
        sources: Sequence[torch.Tensor],
        source_slots: torch.Tensor,
        target: torch.Tensor,
        target_slots: torch.Tensor,
    ) -> None:
        """Copy."""
        (source,) = sources
        kernels.copy_slots(source, source_slots, target, target_slots)


class Bf16(Native):
    """Recurrent states that are wider, rounded to bfloat16."""

    name = "bf16"
    lossy = True

    def forms(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return `tensor` in bfloat16 when it is a wider recurrent state."""
        if _is_recurrent(tensor) and tensor.dtype == _WIDE:
            return (replace(tensor, dtype="bfloat16"),)
        return (tensor,)


class Int8(Native):
    """Recurrent states as symmetric INT8 with one float32 scale per (head, key), shared along the
    value axis; for states of channels, which have no value axis, one per channel."""

    name = "int8"
    lossy = True

    def forms(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return numbers and scales when `tensor` is a recurrent state of floats."""
        if not _is_recurrent(tensor) or tensor.dtype not in _FLOAT:
            return (tensor,)
        axis = _REDUCED[tensor.axes]
        shape = (*tensor.shape[:axis], 1, *tensor.shape[axis + 1 :])
        return (
            replace(tensor, name=f"{tensor.name}.qdata", dtype="int8"),
            replace(tensor, name=f"{tensor.name}.scale", dtype=SCALE_DTYPE, shape=shape),
        )

    def encode(
        self,
        source: torch.Tensor,
        source_slots: torch.Tensor,
        targets: Sequence[torch.Tensor],
        target_slots: torch.Tensor,
    ) -> None:
        """Quantise."""
        if len(targets) == 1:
            super().encode(source, source_slots, targets, target_slots)
            return
        qdata, scale = targets
        kernels.quantise(
            _headed(source), source_slots, _headed(qdata), _headed(scale), target_slots
        )

    def decode(
        self,
        sources: Sequence[torch.Tensor],
        source_slots: torch.Tensor,
        target: torch.Tensor,
        target_slots: torch.Tensor,
    ) -> None:
        """Dequantise, once."""
        if len(sources) == 1:
            super().decode(sources, source_slots, target, target_slots)
            return
        qdata, scale = sources
        kernels.dequantise(
            _headed(qdata), _headed(scale), source_slots, _headed(target), target_slots
        )


CODECS: Final[Mapping[str, Codec]] = {codec.name: codec for codec in (Native(), Bf16(), Int8())}
"""Every codec, by name."""


def codec_named(name: str) -> Codec:
    """Return the codec called `name`; LayoutError when this build has none."""
    found = CODECS.get(name)
    if found is None:
        raise LayoutError(f"no codec {name!r}; there are {', '.join(CODECS)}")
    return found


def encoded(codec: Codec, part: Part) -> Part:
    """Return what `codec` makes of a snapshot part; an equal part when it leaves it as it is.

    The first form of every tensor stands in the order of the layout, further ones (scales) after all
    of them. Units and ranges of shards stay as they were.
    """
    forms = [codec.forms(tensor) for tensor in part.tensors]
    first = tuple(form[0] for form in forms)
    rest = tuple(tensor for form in forms for tensor in form[1:])
    return replace(part, tensors=first + rest)


def codec_in(codec: Codec, part: Part) -> str:
    """Return the codec's name in the keys of `part`: "native" when it leaves the part as it is."""
    return codec.name if encoded(codec, part) != part else NATIVE


def _is_recurrent(tensor: Tensor) -> bool:
    if tensor.axes == _SUSPECT:
        raise LayoutError(
            f"tensor {tensor.name!r} has its axes as {tensor.axes}: scales along its last axis but one "
            f"would be along keys. A canonical state is (head, value, key)"
        )
    return tensor.axes in _REDUCED


def _headed(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` with five axes, as the kernels take it: states of channels have four."""
    return tensor if tensor.dim() == 5 else tensor.unsqueeze(-1)
