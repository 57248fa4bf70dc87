"""The bytes of objects from and to vLLM's blocks, in every form that its tensors have."""

from collections.abc import Mapping

import pytest
import torch

from tests.unit.test_vllm_geometry import kimi
from tiercache.device.resharding import Held, assemble
from tiercache.errors import LayoutError
from tiercache.state import Shard
from tiercache_vllm.geometry import Geometry, Group, Pages, Substate, geometry_of
from tiercache_vllm.pages import PartBlocks

BLOCKS = 6


def random_bytes(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def packed(nbytes: int, padded: int, seed: int) -> torch.Tensor:
    """Return the tensor of a linear-attention layer: `[blocks, 1, 1, nbytes]` in padded pages."""
    return random_bytes(BLOCKS, 1, 1, padded, seed=seed)[..., :nbytes].view(torch.int8)


def tensors(ranks: int = 1, *, kernel_blocks: int = 8) -> dict[str, torch.Tensor]:
    """Return what a worker of a small Kimi Linear registers."""
    heads = 4 // ranks
    size = heads * 144 + heads * 256
    states = {str(layer): packed(size, size + 40, layer) for layer in range(3)}
    per = 128 // kernel_blocks
    latent = random_bytes(BLOCKS * kernel_blocks, 1, per, 1152, seed=9).view(torch.bfloat16)
    return {**states, "3": latent}


def parts(geometry: Geometry, held: Mapping[str, torch.Tensor]) -> list[PartBlocks]:
    return [PartBlocks(geometry, at, held, BLOCKS) for at in range(len(geometry.layout.parts))]


def test_what_was_gathered_scatters_back() -> None:
    geometry = geometry_of(kimi(1), 1)
    source, target = tensors(), {name: t.clone() for name, t in tensors().items()}
    for tensor in target.values():
        tensor.zero_()
    for read, write in zip(parts(geometry, source), parts(geometry, target), strict=True):
        blocks = [[3] * len(read.groups), [5] * len(read.groups)]
        write.scatter(blocks, read.gather(blocks))
    for name, tensor in target.items():
        whole = tensor.view(torch.uint8).view(BLOCKS, -1)
        original = source[name].contiguous().view(torch.uint8).view(BLOCKS, -1)
        assert torch.equal(whole[[3, 5]], original[[3, 5]])
        assert not whole[[0, 1, 2, 4]].any()


def test_each_group_has_a_block_of_its_own() -> None:
    geometry = geometry_of(kimi(1), 1)
    held = tensors()
    conv = parts(geometry, held)[0]
    apart = conv.gather([[1, 4]])
    first, second = conv.gather([[1, 1]]), conv.gather([[4, 4]])
    assert torch.equal(apart[:, : 2 * 576], first[:, : 2 * 576])
    assert torch.equal(apart[:, 2 * 576 :], second[:, 2 * 576 :])


def test_a_block_of_the_pool_may_be_several_of_the_kernel() -> None:
    geometry = geometry_of(kimi(1), 1)
    held = tensors(kernel_blocks=8)
    latent = parts(geometry, held)[1]
    rows = held["3"].view(torch.uint8).view(BLOCKS, -1)
    assert torch.equal(latent.gather([[2]])[0], rows[2])


def test_pages_are_tokens_first() -> None:
    pages = Pages("0", "float32", 2, 6, 2)
    geometry = geometry_of([Group(0, 4, pages=(pages,))], 1)
    tensor = torch.arange(BLOCKS * 2 * 4 * 6, dtype=torch.float32).view(BLOCKS, 2, 4, 6)
    (part,) = parts(geometry, {"0": tensor})
    found = part.gather([[5]]).view(torch.float32).view(4, 2, 6)
    assert torch.equal(found, tensor[5].transpose(0, 1))


def test_any_order_of_axes_in_memory_will_do() -> None:
    pages = Pages("0", "float32", 2, 6, 2)
    geometry = geometry_of([Group(0, 4, pages=(pages,))], 1)
    plain = torch.rand(BLOCKS, 2, 4, 6)
    tokens_outside = plain.transpose(1, 2).contiguous().transpose(1, 2)
    one, other = (parts(geometry, {"0": t})[0] for t in (plain, tokens_outside))
    assert torch.equal(one.gather([[1], [3]]), other.gather([[1], [3]]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_ranges_of_the_whole(ranks: int) -> None:
    """What ranks gather, joined as stored objects are, is what one rank would have gathered."""
    geometry = geometry_of(kimi(1), 1)
    whole = tensors()
    split = geometry_of(kimi(ranks), ranks)
    held = [cut(whole, ranks, rank) for rank in range(ranks)]
    for at, part in enumerate(geometry.layout.parts):
        expected = parts(geometry, whole)[at].gather([[2] * len(geometry.groups(at))])
        shards = part.shards(ranks)
        pieces = [
            Held(
                shards[rank],
                parts(split, held[rank])[at].gather([[2] * len(split.groups(at))])[0].numpy().data,
            )
            for rank in range(ranks)
        ]
        joined = assemble(part, part.block_tokens, pieces, part.whole)
        assert bytes(joined) == expected[0].numpy().tobytes()


def cut(whole: Mapping[str, torch.Tensor], ranks: int, rank: int) -> dict[str, torch.Tensor]:
    """Return what one rank would hold of a whole model's tensors, in vLLM's order of channels."""
    heads = 4 // ranks
    found = {"3": whole["3"]}
    for name in ("0", "1", "2"):
        page = whole[name].view(torch.uint8).flatten(1)
        conv = page[:, :576].view(torch.bfloat16).view(BLOCKS, 3, 3, 4, 8)
        ours = conv[:, :, :, rank * heads : (rank + 1) * heads].reshape(BLOCKS, -1)
        state = page[:, 576:].view(BLOCKS, 4, 256)[:, rank * heads : (rank + 1) * heads]
        rows = torch.cat([ours.contiguous().view(torch.uint8), state.reshape(BLOCKS, -1)], 1)
        found[name] = rows.view(BLOCKS, 1, 1, -1).view(torch.int8)
    return found


def test_the_unpadded_bytes_are_stored() -> None:
    geometry = geometry_of(kimi(1), 1)
    for form, part in zip(geometry.layout.parts, parts(geometry, tensors()), strict=True):
        assert part.nbytes == form.nbytes(form.block_tokens, Shard(0, form.units))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(BLOCKS, 2, 4, 5),
        torch.zeros(BLOCKS, 3, 4, 6),
        torch.zeros(BLOCKS, 2, 24),
        torch.zeros(BLOCKS + 1, 2, 4, 6),
        torch.zeros(BLOCKS, 2, 6, 4).transpose(2, 3),
        torch.zeros(BLOCKS, 2, 8, 6),
    ],
)
def test_pages_of_another_form_are_refused(tensor: torch.Tensor) -> None:
    geometry = geometry_of([Group(0, 4, pages=(Pages("0", "float32", 2, 6, 2),))], 1)
    with pytest.raises(LayoutError):
        parts(geometry, {"0": tensor})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(BLOCKS, 1, 1, 79, dtype=torch.int8),
        torch.zeros(BLOCKS + 1, 1, 1, 80, dtype=torch.int8),
        torch.zeros(BLOCKS * 80, dtype=torch.int8),
    ],
)
def test_states_of_another_form_are_refused(tensor: torch.Tensor) -> None:
    state = Substate("0", "recurrent", "float32", 16, (1, 4, 4), (0, 1, 2), units=1)
    geometry = geometry_of([Group(0, 4, states=(state,))], 1)
    with pytest.raises(LayoutError):
        parts(geometry, {"0": tensor})
