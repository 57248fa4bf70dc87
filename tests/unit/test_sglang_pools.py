"""Host pools as SGLang describes them: what is read of them, and where their bytes are."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tiercache.errors import LayoutError
from tiercache_sglang.geometry import CONV, RECURRENT
from tiercache_sglang.int8 import Int8States
from tiercache_sglang.memory import Regions, tensors_in
from tiercache_sglang.pools import Pages, Slots, pools_of

PAGE, LAYERS, SLOTS = 4, 2, 5


class Latent:
    """MLA, with its pages side by side."""

    layout, page_size, layer_num, dtype, kv_cache_dim = "page_first", PAGE, LAYERS, torch.int16, 6

    def __init__(self) -> None:
        self.kv_buffer = torch.arange(40 * LAYERS * 6, dtype=torch.int16).view(40, LAYERS, 1, 6)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        size = LAYERS * 6 * 2
        starts = indices.tolist()[::PAGE]
        return [self.kv_buffer.data_ptr() + at * size for at in starts], [size * PAGE] * len(starts)


class Heads(Latent):
    """MHA: keys and values lie apart."""

    head_num, head_dim, v_head_dim = 2, 3, 3

    def __init__(self) -> None:
        self.kv_buffer = torch.arange(2 * 40 * LAYERS * 6, dtype=torch.int16).view(2, 40, LAYERS, 6)
        self.k_buffer, self.v_buffer = self.kv_buffer[0], self.kv_buffer[1]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        keys, sizes = super().get_page_buffer_meta(indices)
        apart = self.kv_buffer[0].nbytes
        return [at for key in keys for at in (key, key + apart)], [sizes[0]] * (2 * len(keys))


class States:
    """Recurrent and convolution states."""

    num_mamba_layers = LAYERS
    temporal_state_shape, temporal_dtype = (2, 4, 4), torch.float32
    conv_state_shapes, conv_dtype = ((6, 3),), torch.bfloat16
    slot_state_buffers: tuple[torch.Tensor, ...] = ()

    def __init__(self, *, temporal: bool = True) -> None:
        self.temporal_state_elem_size = 32 if temporal else 0
        self.temporal_buffer = torch.randn(SLOTS, LAYERS, 1, 2, 4, 4)
        self.conv_buffer = [torch.randn(SLOTS, LAYERS, 1, 6, 3).to(torch.bfloat16)]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pointers: list[int] = []
        sizes: list[int] = []
        for slot in indices.tolist():
            if self.temporal_state_elem_size:
                pointers.append(self.temporal_buffer[slot].data_ptr())
                sizes.append(self.temporal_buffer[slot].nbytes)
            pointers.append(self.conv_buffer[0][slot].data_ptr())
            sizes.append(self.conv_buffer[0][slot].nbytes)
        return pointers, sizes


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_latents_are_the_same_on_every_rank() -> None:
    pools = pools_of(Latent(), None, replicated=True)
    (piece,) = pools.kv
    assert (piece.name, piece.dtype, piece.shape) == ("latent", "int16", (LAYERS, 6))
    assert (pools.page_tokens, pools.order, pools.temporal, pools.conv) == (4, "page_first", (), ())


def test_heads_and_states() -> None:
    class Plain(Heads):
        pass

    kv = Plain()
    vars(kv).pop("kv_cache_dim", None)
    no_latent = cast("Any", SimpleNamespace(**{
        name: getattr(kv, name)
        for name in ("layout", "page_size", "layer_num", "dtype", "head_num", "head_dim", "v_head_dim")
    }))  # fmt: skip
    pools = pools_of(no_latent, States(), replicated=False)
    assert [piece.name for piece in pools.kv] == ["keys", "values"]
    assert pools.kv[0].shape == (LAYERS, 2, 3)
    (temporal,), (conv,) = pools.temporal, pools.conv
    assert (temporal.shape, temporal.axes) == ((2, 2, 4, 4), ("layer", "head", "value", "key"))
    assert (conv.dtype, conv.shape) == ("bfloat16", (2, 6, 3))
    assert pools_of(no_latent, States(temporal=False), replicated=False).temporal == ()


def test_what_is_not_understood_is_refused() -> None:
    strange = cast("Any", SimpleNamespace(layout="page_first", page_size=4, layer_num=2, dtype=1))
    with pytest.raises(LayoutError, match="SimpleNamespace"):
        pools_of(strange, None, replicated=True)
    split = Latent()
    split.dcp_size = 2  # type: ignore[attr-defined]
    with pytest.raises(LayoutError, match="decode context"):
        pools_of(split, None, replicated=True)
    more = States()
    more.slot_state_buffers = (torch.zeros(1),)
    with pytest.raises(LayoutError, match="further tensors"):
        pools_of(Latent(), more, replicated=True)


def test_pages_are_slices_of_the_pool() -> None:
    pool = Latent()
    pages = Pages(pool).at(torch.tensor([8, 9, 10, 11, 0, 1, 2, 3]), 2)
    assert [bytes(piece) for (piece,) in pages] == [
        bytes_of(pool.kv_buffer[8:12]),
        bytes_of(pool.kv_buffer[0:4]),
    ]
    pages[1][0][:2] = b"\xff\xff"
    assert pool.kv_buffer[0, 0, 0, 0] == -1


def test_keys_and_values_are_two_pieces() -> None:
    pool = Heads()
    ((keys, values),) = Pages(pool).at(torch.arange(4, 8), 1)
    assert bytes(keys) == bytes_of(pool.k_buffer[4:8])
    assert bytes(values) == bytes_of(pool.v_buffer[4:8])


@pytest.mark.parametrize("temporal", [True, False])
def test_states_are_named_by_part(*, temporal: bool) -> None:
    pool = States(temporal=temporal)
    first, second = Slots(pool).at(torch.tensor([3, 1]), 2)
    assert bytes(first[CONV][0]) == bytes_of(pool.conv_buffer[0][3])
    assert (RECURRENT in second) == temporal
    if temporal:
        assert bytes(second[RECURRENT][0]) == bytes_of(pool.temporal_buffer[1])


def test_indices_must_fit() -> None:
    with pytest.raises(LayoutError, match="3 indices"):
        Pages(Latent()).at(torch.arange(3), 1)
    with pytest.raises(LayoutError, match="2 indices"):
        Slots(States()).at(torch.arange(2), 1)
    with pytest.raises(LayoutError, match="make 0 pages"):
        Pages(Latent()).at(torch.arange(0), 0)


def test_a_page_has_the_bytes_that_are_known_of_it() -> None:
    Pages(Latent()).check(PAGE * LAYERS * 6 * 2)
    Slots(States()).check(LAYERS * (32 * 4 + 18 * 2))
    with pytest.raises(LayoutError, match="Latent has 96 bytes, not the 90"):
        Pages(Latent()).check(90)
    with pytest.raises(LayoutError, match="a state has 328 bytes"):
        Slots(States()).check(300)


def test_a_pointer_outside_the_pool_is_not_followed() -> None:
    inside = torch.zeros(8, dtype=torch.uint8)
    regions = Regions([inside, inside[2:4], torch.empty(0)])
    start = inside.data_ptr()
    assert len(regions.view(start + 2, 6)) == 6
    for pointer, nbytes in ((start + 2, 7), (start - 1, 2), (start, 0), (start + 8, 1), (0, 1)):
        with pytest.raises(LayoutError, match="has no"):
            regions.view(pointer, nbytes)
    with pytest.raises(LayoutError, match="has no"):
        Regions([]).view(start, 1)
    with pytest.raises(LayoutError, match="do not make"):
        regions.pages([start] * 3, [1] * 3, 2)


def test_tensors_are_found_in_lists_too() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    assert tensors_in(SimpleNamespace(a=one, b=[two, 3], c=(one,), d="x")) == [one, two, one]


# --- INT8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_states_have_a_scale_for_each_head_and_key(dtype: torch.dtype) -> None:
    shape = (2, 3, 8, 4)
    state = torch.randn(shape).to(dtype)
    state[..., 1] *= 100  # One loud key must not drown the others.
    codec = Int8States(shape, dtype)
    encoded = codec.encode(memoryview(bytearray(bytes_of(state))))
    assert encoded.nbytes == codec.nbytes == 2 * 3 * 4 * (8 + dtype.itemsize)
    target = bytearray(state.nbytes)
    codec.decode(memoryview(bytes(encoded)), memoryview(target))
    back = torch.frombuffer(target, dtype=dtype).view(shape).float()
    largest = state.float().abs().amax(2, keepdim=True)
    rounding = 2 * torch.finfo(dtype).eps  # Of the scale, and of what comes back.
    assert bool(((back - state.float()).abs() <= largest * (0.6 / 127 + rounding) + 1e-6).all())
    assert not torch.equal(back, state.float())


def test_states_that_are_zero_stay_so() -> None:
    codec = Int8States((1, 1, 2, 2), torch.float32)
    target = bytearray(b"\xff" * 16)
    codec.decode(codec.encode(memoryview(bytearray(16))), memoryview(target))
    assert bytes(target) == bytes(16)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 2), torch.float32), ((1, 1, 2, 2), torch.int32)],
    ids=["axes", "dtype"],
)
def test_not_everything_is_a_state(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with pytest.raises(LayoutError, match="cannot be kept as INT8"):
        Int8States(shape, dtype)


def test_another_size_is_not_decoded() -> None:
    codec = Int8States((1, 1, 2, 2), torch.float32)
    with pytest.raises(LayoutError, match="has 12 bytes"):
        codec.decode(memoryview(bytes(11)), memoryview(bytearray(16)))
