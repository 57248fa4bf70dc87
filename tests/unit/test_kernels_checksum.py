"""The sum of a block: as defined, the same in every form, and different when the block is."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiercache_kernels import checksum, reference
from tiercache_kernels.testing import spaced

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
WORD = 2**64


def mixed(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def defined(block: bytes) -> int:
    """The definition in plain numbers, as int64."""
    padded = block + bytes(-len(block) % 8)
    words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
    total = mixed(len(block)) + sum(
        mixed((word + place * 0x9E3779B97F4A7C15) % WORD) for place, word in enumerate(words, 1)
    )
    total %= WORD
    return total - WORD if total >> 63 else total


def test_the_finaliser_is_that_of_splitmix64() -> None:
    """The first outputs of SplitMix64 from the seeds 0 and 1234567."""
    golden = 0x9E3779B97F4A7C15
    assert mixed(golden) == 0xE220A8397B1DCDAF
    assert mixed(1234567 + golden) == 6457827717110365317


def blocks_of(contents: list[bytes], device: str) -> Tensor:
    rows = torch.tensor([list(content) for content in contents], dtype=torch.uint8)
    return rows.to(device)


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**32), st.sampled_from(DEVICES))
def test_it_is_what_it_is_defined_to_be(count: int, size: int, seed: int, device: str) -> None:
    dice = random.Random(seed)
    contents = [dice.randbytes(size) for _ in range(count)]
    blocks = blocks_of(contents, device)
    expected = [defined(content) for content in contents]
    assert checksum(blocks).tolist() == expected
    assert reference.checksum(blocks).tolist() == expected


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool]),
    st.integers(0, 2**32),
)
def test_blocks_of_any_shape_lie_anywhere(
    count: int, shape: list[int], dtype: torch.dtype, seed: int
) -> None:
    dice = torch.Generator().manual_seed(seed)
    blocks = spaced(1, count, *shape, dtype=dtype, device=DEVICES[-1])[0]
    blocks.copy_(torch.randint(0, 2, blocks.shape, generator=dice))
    sums = checksum(blocks)
    assert torch.equal(sums, reference.checksum(blocks))
    assert torch.equal(sums, checksum(blocks.contiguous()))


@pytest.mark.parametrize("words", [2047, 2048, 2049, 5000])
def test_large_blocks_are_summed_in_parts(words: int) -> None:
    dice = torch.Generator().manual_seed(words)
    blocks = torch.randint(-(2**62), 2**62, (2, words), generator=dice).to(DEVICES[-1])
    assert torch.equal(checksum(blocks), reference.checksum(blocks))


def test_what_differs_has_another_sum() -> None:
    block = bytes(range(64))
    swapped = block[8:16] + block[:8] + block[16:]
    flipped = [
        bytes(byte ^ (1 << bit) if place == at else byte for place, byte in enumerate(block))
        for at in range(64)
        for bit in range(8)
    ]
    zeroed = [block[:at] + bytes(8) + block[at + 8 :] for at in range(8, 57, 8)]
    moved = block[1:] + block[:1]
    sums = checksum(blocks_of([block, swapped, moved, *flipped, *zeroed], DEVICES[-1])).tolist()
    assert len(set(sums)) == len(sums)


def test_the_length_counts() -> None:
    sums = [checksum(torch.zeros(1, size, dtype=torch.uint8)).item() for size in range(1, 40)]
    assert len(set(sums)) == len(sums)


def test_no_blocks_and_no_bytes() -> None:
    assert checksum(torch.zeros(0, 8)).tolist() == []
    for wrong in (torch.zeros(3, 0), torch.zeros(3)):
        with pytest.raises(ValueError, match="blocks are"):
            checksum(wrong)
    with pytest.raises(ValueError, match="not dense"):
        checksum(torch.zeros(2, 4, 4).mT)
