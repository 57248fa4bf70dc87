"""Groups of vLLM as parts of a layout."""

import pytest

from tiercache.errors import LayoutError
from tiercache.state import Kind, Shard
from tiercache_vllm.geometry import Group, Pages, Substate, geometry_of


def kda(layer: int, ranks: int) -> tuple[Substate, Substate]:
    """Return the states of a KDA layer of four heads of 8, on one of `ranks`, as vLLM has them."""
    heads = 4 // ranks
    conv = Substate(
        f"{layer}", "conv", "bfloat16", 0, (3, heads * 24), (1, 0), (32, 32, 32), units=4
    )
    recurrent = Substate(
        f"{layer}", "recurrent", "float32", heads * 144, (heads, 8, 8), (0, 1, 2), units=4
    )
    return conv, recurrent


def kimi(ranks: int) -> list[Group]:
    """Return the groups of a small Kimi Linear: two of KDA and one of latent attention."""
    latent = Pages("3", "bfloat16", 1, 576, 1, latent=True)
    return [
        Group(0, 128, states=(*kda(0, ranks), *kda(1, ranks))),
        Group(1, 128, states=kda(2, ranks)),
        Group(2, 128, pages=(latent,)),
    ]


def test_groups_of_a_kind_are_one_part() -> None:
    geometry = geometry_of(kimi(1), 1)
    assert [part.name for part in geometry.layout.parts] == ["conv", "latent128", "recurrent"]
    conv, latent, recurrent = geometry.layout.parts
    assert [(p.kind, p.window, p.block_tokens, p.units) for p in geometry.layout.parts] == [
        (Kind.CONV, 1, 0, 4),
        (Kind.KV, None, 128, 1),
        (Kind.RECURRENT, 1, 0, 4),
    ]
    assert [tensor.name for tensor in conv.tensors] == ["0.conv", "1.conv", "2.conv"]
    assert conv.tensors[0].shape == (96, 3)
    assert conv.tensors[0].segments == (32, 32, 32)
    assert latent.tensors[0].shape == (1, 576)
    assert recurrent.tensors[0].shape == (4, 8, 8)
    assert geometry.groups(0) == (0, 1)
    assert geometry.groups(1) == (2,)
    assert (geometry.block_tokens, geometry.layout.block_tokens) == (128, 128)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_layout_does_not_depend_on_the_ranks(ranks: int) -> None:
    whole, split = geometry_of(kimi(1), 1), geometry_of(kimi(ranks), ranks)
    assert split.layout == whole.layout
    conv = split.layout.part("conv")
    assert conv.shards(ranks)[0] == Shard(0, 4 // ranks)
    assert conv.nbytes(0, conv.shards(ranks)[0]) * ranks == conv.nbytes(0, conv.whole)


def test_an_unknown_split_is_only_for_as_many_ranks() -> None:
    state = Substate("0", "conv", "bfloat16", 0, (3, 40), (1, 0))
    layouts = {
        ranks: geometry_of([Group(0, 16, states=(state,))], ranks).layout for ranks in (1, 2, 4)
    }
    assert [layout.parts[0].units for layout in layouts.values()] == [1, 2, 4]
    assert len({layout.fingerprint for layout in layouts.values()}) == 3


def test_replicated_states_are_stored_once() -> None:
    state = Substate("0", "state0", "float32", 0, (5, 7), (0, 1), units=1)
    (part,) = geometry_of([Group(0, 16, states=(state,))], 4).layout.parts
    assert (part.name, part.units) == ("state0_copy", 1)
    assert part.nbytes(0, Shard(0, 1)) == 5 * 7 * 4


def test_heads_fewer_than_ranks_are_held_by_several() -> None:
    pages = Pages("0", "bfloat16", 1, 64, 2)
    part = geometry_of([Group(0, 16, pages=(pages,))], 4).layout.parts[0]
    assert part.shards(4) == (Shard(0, 1), Shard(0, 1), Shard(1, 2), Shard(1, 2))


def test_heads_that_do_not_split_are_refused() -> None:
    pages = Pages("0", "bfloat16", 2, 64, 6)
    with pytest.raises(LayoutError, match="6 units do not split over 4"):
        geometry_of([Group(0, 16, pages=(pages,))], 4)


@pytest.mark.parametrize(("window", "blocks"), [(1, 1), (2, 1), (17, 1), (18, 2), (128, 8)])
def test_a_window_is_what_the_token_at_the_boundary_sees(window: int, blocks: int) -> None:
    pages = Pages("0", "bfloat16", 2, 64, 2)
    (part,) = geometry_of([Group(0, 16, pages=(pages,), window=window)], 1).layout.parts
    assert (part.name, part.window) == (f"kv16_window{window}", blocks)


def test_blocks_of_different_sizes_meet_at_the_common_multiple() -> None:
    full = Group(0, 48, pages=(Pages("0", "bfloat16", 2, 64, 2),))
    near = Group(1, 32, pages=(Pages("1", "bfloat16", 2, 64, 2),), window=65)
    geometry = geometry_of([full, near], 1)
    assert (geometry.layout.block_tokens, geometry.block_tokens) == (16, 96)


def test_nothing_to_store_is_refused() -> None:
    with pytest.raises(LayoutError, match="no cache group"):
        geometry_of([], 1)


def test_pieces_that_do_not_fill_the_channels_are_refused() -> None:
    state = Substate("0", "conv", "bfloat16", 0, (3, 40), (1, 0), (16, 16, 16), units=4)
    with pytest.raises(LayoutError, match="are not the pieces of 40"):
        geometry_of([Group(0, 16, states=(state,))], 1)
