"""What the ops ask of their arguments, refused with a message before a byte moves.

Inside one slot or page a tensor is dense, with nothing between its elements; layers and slots may lie
any distance apart, so that a pool can be a view of one large buffer. Slots on the CPU are checked: in
range, and no target twice. Slots that are on the device already are trusted, since looking at them
would wait for it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tiercache_kernels.segments import Segments

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (torch.float32, torch.bfloat16)
"""Never float16: a channel of magnitude 2e-6 would get the scale zero and be lost."""

LEADING_AXES = 2
"""`[layers, slots, ...]`: the axes before those of one slot."""


def quantised(floats: Tensor, qdata: Tensor, scale: Tensor) -> None:
    """Check the three tensors of `quantise` and `dequantise`."""
    dtype(floats, "floating-point state", FLOATS)
    dtype(qdata, "qdata", (torch.int8,))
    dtype(scale, "scale", SCALES)
    if floats.ndim != 5:
        raise ValueError(f"state is [layers, slots, heads, d_v, d_k], not {shape(floats)}")
    layers, _, heads, d_v, d_k = floats.shape
    if not layers * heads * d_v * d_k:
        raise ValueError(f"state {shape(floats)} has an empty axis")
    slots = len_at(qdata, 1)
    expected(qdata, "qdata", (layers, slots, heads, d_v, d_k))
    expected(scale, "scale", (layers, slots, heads, 1, d_k))
    together(floats, qdata, scale)
    for tensor, name in ((floats, "floating-point state"), (qdata, "qdata"), (scale, "scale")):
        dense(tensor, name, LEADING_AXES)


def written(*targets: Tensor, leading: int) -> None:
    """Check that no two slots or pages of a tensor that is written share an element."""
    for target in targets:
        span = 1
        for size in target.shape[leading:]:
            span *= size
        axes = sorted(zip(target.stride()[:leading], target.shape[:leading], strict=True))
        for stride, size in axes:
            if size > 1 and stride < span:
                raise ValueError(f"{shape(target)} strided {target.stride()} overlaps itself")
            span += stride * (size - 1)


def copied(source: Tensor, target: Tensor, leading: int) -> None:
    """Check two tensors of slots (`leading` 2) or pages (1): equal but for the number of those."""
    if source.ndim < leading or source.ndim != target.ndim:
        raise ValueError(f"no copy from {shape(source)} to {shape(target)}")
    expected(target, "target", (*source.shape[: leading - 1], len_at(target, leading - 1),
                                *source.shape[leading:]))  # fmt: skip
    if source.dtype != target.dtype and not {source.dtype, target.dtype} <= set(FLOATS):
        raise TypeError(f"no copy from {source.dtype} to {target.dtype}: only floats are cast")
    together(source, target)
    dense(source, "source", leading)
    dense(target, "target", leading)


def slots(source: Tensor, source_slots: Tensor, target: Tensor, target_slots: Tensor) -> None:
    """Check two lists of slots that belong together, of pools `[layers, slots, ...]`."""
    numbers(source_slots, source, 1, "source slots")
    numbers(target_slots, target, 1, "target slots")
    if len(source_slots) != len(target_slots):
        raise ValueError(f"{len(source_slots)} source and {len(target_slots)} target slots")
    no_twice(target_slots, "target slots")


Places = tuple[Tensor, Tensor]
"""A tensor, and the numbers along the last of its leading axes that are read or written."""


def apart(read: Places, written: Places, leading: int) -> None:
    """Check that no byte is both read and written: the order would decide what it becomes.

    `leading` is 2 for slots, 1 for pages. Two views of one buffer are looked at place by place. Numbers on
    the device are trusted, since to look would be to wait; but pages of a tensor never go to itself then.
    """
    source, target = read[0], written[0]
    if not _meet(_span(source), _span(target)):
        return
    if read[1].device.type == written[1].device.type == "cpu":
        spans = [(*span, False) for span in _places(*read, leading)]
        spans += [(*span, True) for span in _places(*written, leading)]
        reach = {False: 0, True: 0}
        for start, stop, writes in sorted(spans):
            if start < reach[not writes]:
                raise ValueError(f"bytes of {shape(source)} are source and target of one copy")
            reach[writes] = max(reach[writes], stop)
    elif leading == 1 and source.data_ptr() == target.data_ptr():
        raise ValueError(f"{shape(source)} is source and target of one copy")


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses between which all of a tensor lies."""
    if not tensor.numel():
        return (0, 0)
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    return (start, start + (last + 1) * tensor.itemsize)


def _places(tensor: Tensor, numbers: Tensor, leading: int) -> Iterator[tuple[int, int]]:
    """Yield the addresses of every place that is read or written; each is dense."""
    nbytes = tensor[(0,) * leading].numel() * tensor.itemsize if tensor.numel() else 0
    if not nbytes:
        return
    layers = tensor.shape[0] if leading == LEADING_AXES else 1
    for layer in range(layers):
        start = tensor.data_ptr() + layer * tensor.stride(0) * (leading - 1) * tensor.itemsize
        for number in numbers.tolist():
            at = start + number * tensor.stride(leading - 1) * tensor.itemsize
            yield (at, at + nbytes)


def numbers(indices: Tensor, pool: Tensor, axis: int, name: str) -> None:
    """Check a list of slots or pages: int64, one axis, within that axis of the pool."""
    if indices.dtype != torch.int64 or indices.ndim != 1:
        raise TypeError(f"{name} are int64 of one axis, not {indices.dtype} {shape(indices)}")
    if indices.device.type == "cpu":
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < pool.shape[axis]:
            raise IndexError(f"{name} {indices.tolist()}, of {pool.shape[axis]}")
    else:
        together(indices, pool)


def no_twice(indices: Tensor, name: str) -> None:
    """Check that a list of places to write to names none twice."""
    if indices.device.type == "cpu" and len(set(indices.tolist())) < len(indices):
        raise ValueError(f"{name} name a place twice: {indices.tolist()}")


def room(staging: Tensor, pages: Tensor) -> None:
    """Check that the pages fit the staging buffer."""
    if len(pages) > len(staging):
        raise ValueError(f"{len(pages)} pages, room for {len(staging)}")


def cut(source: Tensor, start: int, stop: int, out: Tensor, axis: int) -> None:
    """Check a range of an axis, counted from the end, against the tensor that holds just that range."""
    if not -source.ndim <= axis < 0:
        raise ValueError(f"axis {axis} of {shape(source)}: axes count from the end")
    if not 0 <= start < stop <= source.shape[axis]:
        raise ValueError(f"no range [{start}, {stop}) of {source.shape[axis]}")
    fits(source, stop - start, out, axis)


def cut_conv(source: Tensor, segments: Segments, width: int, out: Tensor) -> None:
    """Check a convolution state and the tensor that holds `width` of its channels."""
    if source.ndim < -segments.axis or source.shape[segments.axis] != segments.channels:
        raise ValueError(
            f"{segments.channels} channels on axis {segments.axis}, not {shape(source)}"
        )
    fits(source, width, out, segments.axis)


def fits(source: Tensor, width: int, out: Tensor, axis: int) -> None:
    """Check that `out` is `source` with `width` elements of `axis`, and that both can be cut."""
    wanted = list(source.shape)
    wanted[axis] = width
    expected(out, "the piece", wanted)
    if source.dtype != out.dtype:
        raise TypeError(f"a cut keeps {source.dtype}, not {out.dtype}")
    together(source, out)
    dense(source, "the whole", source.ndim + axis)
    dense(out, "the piece", out.ndim + axis)


def blocks(tensor: Tensor) -> None:
    """Check what `checksum` takes."""
    if tensor.ndim < 2 or 0 in tensor.shape[1:]:
        raise ValueError(f"blocks are [n, ...] of at least one element, not {shape(tensor)}")
    dense(tensor, "blocks", 1)


def dtype(tensor: Tensor, name: str, allowed: Sequence[torch.dtype]) -> None:
    """Check the dtype of one argument."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(each).removeprefix("torch.") for each in allowed)
        raise TypeError(f"{name} is {tensor.dtype}; it may be {names}")


def expected(tensor: Tensor, name: str, wanted: Sequence[int]) -> None:
    """Check the shape of one argument."""
    if tuple(tensor.shape) != tuple(wanted):
        raise ValueError(f"{name} is {shape(tensor)}, expected {list(wanted)}")


def together(*tensors: Tensor) -> None:
    """Check that all are on one device."""
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"tensors on several devices: {', '.join(sorted(devices))}")


def dense(tensor: Tensor, name: str, leading: int) -> None:
    """Check that nothing lies between the elements behind the first `leading` axes."""
    wanted = 1
    for size, stride in zip(
        reversed(tensor.shape[leading:]), reversed(tensor.stride()[leading:]), strict=True
    ):
        if size > 1 and stride != wanted:
            raise ValueError(f"{name}: {shape(tensor)} strided {tensor.stride()} is not dense")
        wanted *= size


def len_at(tensor: Tensor, axis: int) -> int:
    """Return the length of an axis, 0 where there is none."""
    return tensor.shape[axis] if tensor.ndim > axis else 0


def shape(tensor: Tensor) -> list[int]:
    """Return the shape as a message shows it."""
    return list(tensor.shape)
