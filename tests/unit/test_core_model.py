"""The machine against the plainest model: a set of names, and the definition of a boundary.

Where memory does not run out, it finds exactly what the definition says: never more, and never less.
"""

import random
from typing import TypeAlias

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.state import NATIVE, Chain, Part, Shard
from tiercache.testing.sim.rig import Client, Rig, small
from tiercache.testing.sim.swarm import draw_layout

Name: TypeAlias = tuple[str, bytes, str, Shard, str]
TOKENS_MAX = 18
STEPS = 60
SEEDS = 60
CODECS = ((NATIVE,), (NATIVE,), ("int8",), (NATIVE, "int8"), ("int8", NATIVE, "int8"))


def ends_of(part: Part, tokens: int) -> list[int]:
    """The definition: where the objects end that a part needs before `tokens`."""
    if part.block_tokens == 0:
        return [tokens]
    whole = [end for end in range(1, tokens + 1) if end % part.block_tokens == 0]
    window = whole if part.window is None else whole[-part.window :]
    return window + ([tokens] if tokens % part.block_tokens else [])


class Model:
    """A machine with room for all, what was saved there, and what must be found."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        ranks = self.rng.choice((1, 1, 2))
        self.layout = draw_layout(self.rng, ranks)
        self.rig = Rig(msgspec.structs.replace(small(pages=100_000), tails_max=1000))
        self.clients = [
            Client(self.rig, self.layout, ranks=ranks, rank=rank).attach() for rank in range(ranks)
        ]
        self.salts = self.rng.choice((("",), ("", "tenant")))
        self.codecs = self.rng.choice((CODECS[:1], CODECS))
        self.held: set[Name] = set()
        self.texts: list[list[int]] = []
        self.requests = 0
        self.hits = 0

    def step(self) -> None:
        """Do one thing of many."""
        chance = self.rng.random()
        if chance < 0.4:
            self.save()
        elif chance < 0.9:
            self.plan()
        elif chance < 0.98:
            self.evict()
        else:
            self.clear()

    def text(self) -> list[int]:
        """A text that begins like one that was saved, often like all of it."""
        rng = self.rng
        fresh = [rng.randrange(2) for _ in range(rng.randint(1, 6))]
        known = rng.choice(self.texts) if self.texts and rng.random() < 0.9 else []
        if rng.random() < 0.3:
            known = known[: rng.randint(0, len(known))]
        return (known + fresh)[:TOKENS_MAX]

    def save(self) -> None:
        """Every rank saves what a boundary at the text's end rests on, or all but some of it."""
        rng = self.rng
        text, salt, codec = self.text(), rng.choice(self.salts), rng.choice(rng.choice(self.codecs))
        self.texts.append(text)
        chain = self.chain(text)
        omits, commits = rng.random() < 0.3, rng.random() < 0.9
        for client in self.clients:
            client.salt = salt
            offers = [
                client.offer(chain, index, end, codec)
                for index, part in enumerate(self.layout.parts)
                for end in ends_of(part, len(text))
                if not omits or rng.random() < 0.8
            ]
            names = [self.name_of(salt, offer) for offer in offers]
            grants = client.reserve("save", offers)
            assert [grant.outcome for grant in grants] == [
                "held" if name in self.held else "granted" for name in names
            ]
            tickets = [grant.ticket for grant in grants if grant.outcome == "granted"]
            if commits:
                self.rig.tell(ev.Committed(client.session, tickets))
                self.rig.run()
                self.held.update(names)
            else:
                self.rig.tell(ev.Cancelled(client.session, tickets))

    def plan(self) -> None:
        """The boundary is the deepest that the definition allows, and no deeper."""
        rng = self.rng
        client, text = rng.choice(self.clients), self.text()
        client.salt, client.codecs = rng.choice(self.salts), rng.choice(self.codecs)
        chain, limit = self.chain(text), max(0, len(text) - rng.randint(0, 3))
        self.requests += 1
        request = f"r{self.requests}"
        planned = client.plan(request, chain, limit=limit)
        ours = [tail for tail in planned.candidates if tail.digest == chain.digest_at(tail.tokens)]
        if ours:
            planned = client.plan(request, chain, limit=limit, tails=ours)
        counts = range(1, limit + 1)
        assert planned.boundary == max(
            (n for n in counts if self.can_resume(client, chain, n)), default=0
        )
        assert planned.ready
        assert bool(planned.reason) == (planned.boundary == 0)
        self.hits += planned.boundary > 0
        self.judge(client, planned, chain)
        client.release(request)

    def evict(self) -> None:
        """An operator drops one object by its key."""
        rows = self.rig.ask(ev.ListAsked(-1, self.rig.number(), 0, 10_000, ""), cm.Rows).rows
        assert len(rows) == len(self.held)
        if not rows:
            return
        key = self.rng.choice(rows).record.key
        evict = ev.EvictAsked(-1, self.rig.number(), str(key), "", 0)
        assert self.rig.ask(evict, cm.Evicted).objects == 1
        salt = next(salt for salt in self.salts if self.digest_of(salt) == key.namespace)
        self.held.remove((salt, key.digest, key.part, key.shard, key.codec))

    def clear(self) -> None:
        """An operator clears one tenant."""
        salt = self.rng.choice(self.salts)
        clear = ev.ClearAsked(-1, self.rig.number(), self.digest_of(salt).hex())
        gone = {name for name in self.held if name[0] == salt}
        assert self.rig.ask(clear, cm.Evicted).objects == len(gone)
        self.held -= gone

    def can_resume(self, client: Client, chain: Chain, tokens: int) -> bool:
        """The definition: all that every rank needs is held, in a codec that will do."""
        return all(
            any(
                (client.salt, chain.digest_at(end), part.name, shard, codec) in self.held
                for codec in client.codecs
            )
            for part in self.layout.parts
            for shard in part.shards(client.ranks)
            for end in ends_of(part, tokens)
        )

    def judge(self, client: Client, planned: cm.Planned, chain: Chain) -> None:
        """The pieces are what the boundary rests on, of this rank, each once."""
        ends = [ends_of(part, planned.boundary) for part in self.layout.parts]
        shards = [part.shards(client.ranks)[client.rank] for part in self.layout.parts]
        expected = [(n, shards[n], end) for n in range(len(ends)) for end in ends[n]]
        found = [(p.part, Shard(p.shard_start, p.shard_stop), p.end) for p in planned.pieces]
        assert sorted(found) == (sorted(expected) if planned.boundary else [])
        for piece, (index, shard, end) in zip(planned.pieces, found, strict=True):
            part = self.layout.parts[index].name
            assert piece.codec in client.codecs
            assert (client.salt, chain.digest_at(end), part, shard, piece.codec) in self.held

    def chain(self, text: list[int]) -> Chain:
        return Chain(text, self.layout.block_tokens)

    def name_of(self, salt: str, offer: ev.Offer) -> Name:
        part = self.layout.parts[offer.part].name
        return (salt, offer.digest, part, offer.shard, offer.codec)

    def digest_of(self, salt: str) -> bytes:
        return self.clients[0].namespace.narrow(salt=salt).digest


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_it_finds_exactly_what_the_definition_says(first: int) -> None:
    hits = 0
    for seed in range(first, first + 10):
        model = Model(seed)
        for _ in range(STEPS):
            model.step()
        hits += model.hits
    assert hits > 20
