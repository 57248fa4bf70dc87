"""Shards saved by ranks of one number, planned by ranks of another."""

from itertools import product

import pytest

from tiercache.core.catalog import Shelf
from tiercache.state import NATIVE, Layout, Shard
from tiercache.testing.sim.rig import Client, Rig, hybrid, small

UNITS = 8
TOKENS = list(range(20))
RANKS = (1, 2, 4, 8)


def group(rig: Rig, layout: Layout, ranks: int) -> list[Client]:
    return [Client(rig, layout, ranks=ranks, rank=rank).attach() for rank in range(ranks)]


def save(clients: list[Client], end: int) -> None:
    for client in clients:
        client.save("save", client.offers(client.chain(TOKENS), end))


def covered(client: Client, pieces: list[Shard], part: int) -> set[int]:
    """Return the units of a part that pieces hold."""
    return {unit for shard in pieces for unit in range(shard.start, shard.stop)}


@pytest.mark.parametrize(("saved", "asked"), list(product(RANKS, RANKS)))
def test_every_size_resumes_what_every_other_saved(saved: int, asked: int) -> None:
    rig, layout = Rig(small(256)), hybrid(UNITS)
    save(group(rig, layout, saved), 8)
    for client in group(rig, layout, asked):
        client.writer = f"engine of {asked}"
        client.reshard = True
        planned = client.plan("p", client.chain(TOKENS))
        assert (planned.boundary, planned.ready) == (8, True)
        for index, part in enumerate(layout.parts):
            own = part.shards(asked)[client.rank]
            pieces = [
                Shard(piece.shard_start, piece.shard_stop)
                for piece in planned.pieces
                if piece.part == index and piece.end == 8
            ]
            units = covered(client, pieces, index)
            assert units >= set(range(own.start, own.stop))
            assert len(pieces) == len(set(pieces)) <= max(1, saved // asked)
        client.release("p")


def test_only_who_asks_for_it_gets_pieces_of_another_size() -> None:
    rig, layout = Rig(small(256)), hybrid(UNITS)
    save(group(rig, layout, 4), 8)
    (whole,) = group(rig, layout, 1)
    assert whole.plan("p", whole.chain(TOKENS)).boundary == 0
    whole.reshard = True
    assert whole.plan("q", whole.chain(TOKENS)).boundary == 8


def test_a_missing_piece_is_a_lower_boundary() -> None:
    rig, layout = Rig(small(256)), hybrid(UNITS)
    clients = group(rig, layout, 4)
    save(clients, 4)
    save(clients[:3], 8)
    (whole,) = group(rig, layout, 1)
    whole.reshard = True
    assert whole.plan("p", whole.chain(TOKENS)).boundary == 4


def test_halves_of_different_sizes_are_not_put_together() -> None:
    rig, layout = Rig(small(256)), hybrid(UNITS)
    save(group(rig, layout, 2)[:1], 8)
    save(group(rig, layout, 4)[2:], 8)
    (whole,) = group(rig, layout, 1)
    whole.reshard = True
    assert whole.plan("p", whole.chain(TOKENS)).boundary == 0


def test_the_fewest_pieces_come_first() -> None:
    shelf = Shelf(bytes(32), None, hybrid(UNITS))
    for ranks in (8, 2):
        for shard in shelf.layout.part("conv").shards(ranks) if shelf.layout else ():
            shelf.slot("conv", shard, NATIVE)
    whole = Shard(0, UNITS)
    covers = shelf.covers("conv", whole, NATIVE, reshard=True)
    assert [cover.bit_count() for cover in covers] == [2, 8]
    assert shelf.covers("conv", whole, NATIVE, reshard=False) == ()
    shelf.slot("conv", whole, NATIVE)
    assert shelf.covers("conv", whole, NATIVE, reshard=True)[0].bit_count() == 1
    assert shelf.covers("conv", Shard(3, 4), "int8", reshard=True) == ()
