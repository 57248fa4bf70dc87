"""What every transport must do. Subclass, say how to make one, and pytest runs it all.

class TestMyTransport(TransportContract):
    def transport(self, node: str, limits: Limits) -> Transport: ...
    def address(self) -> str: ...
"""

import asyncio

import pytest

from tiercache.errors import PeerFault, Retry
from tiercache.testing.lenders import Lender, Target
from tiercache.testing.transport_asking import AskingContract
from tiercache.testing.transport_endings import EndingContract
from tiercache.testing.transport_pairs import AMPLE_S, KIB, MIB, SMALL, faults_of, until


class TransportContract(EndingContract, AskingContract):
    """What a `Transport` promises."""

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 64 * KIB, 64 * KIB + 1, MIB + 3, 64 * MIB])
    def test_gives_what_was_asked_for(self, nbytes: int) -> None:
        """Every byte, and none around it."""
        lender = Lender({b"k": nbytes})

        async def scenario() -> None:
            async with self.pair(lender) as (_, peer):
                target = Target(b"k", nbytes)
                assert await peer.fetch([target.want], AMPLE_S) == [None]
                assert target.right
                await until(lambda: lender.loans == 0)
                assert await peer.probe(AMPLE_S) < AMPLE_S

        self.run(scenario)

    def test_gives_ranges(self) -> None:
        """Of one object, in one call: the ends, the middle, nothing, and all of it twice."""
        size = 300 * KIB
        cuts = [(0, 10), (10, 64 * KIB), (size - 1, 1), (size, 0), (5, 0), (0, size), (0, size)]

        async def scenario() -> None:
            async with self.pair(Lender({b"k": size})) as (_, peer):
                targets = [Target(b"k", size, offset, nbytes) for offset, nbytes in cuts]
                wants = [target.want for target in targets]
                assert await peer.fetch(wants, AMPLE_S) == [None] * len(cuts)
                assert all(target.right for target in targets)
                assert await peer.fetch([], AMPLE_S) == []

        self.run(scenario)

    def test_each_range_has_its_own_outcome(self) -> None:
        """One that is missing, refused, of another size or damaged spoils no other."""
        names = [b"a", b"gone", b"busy", b"b", b"other", b"bad", b"c"]
        lender = Lender({name: 70 * KIB for name in names if name != b"gone"})
        lender.refused[b"busy"] = PeerFault.BUSY
        lender.damaged.add(b"bad")

        async def scenario() -> None:
            async with self.pair(lender) as (_, peer):
                targets = [Target(name, 70 * KIB + (name == b"other")) for name in names]
                outcomes = await peer.fetch([target.want for target in targets], AMPLE_S)
                assert faults_of(outcomes) == [
                    None,
                    PeerFault.MISSING,
                    PeerFault.BUSY,
                    None,
                    PeerFault.MISMATCH,
                    PeerFault.DAMAGED,
                    None,
                ]
                again = [outcome.retry for outcome in outcomes if outcome]
                assert again == [Retry.NEVER, Retry.LATER, Retry.NEVER, Retry.NEVER]
                assert all(
                    t.right for t, outcome in zip(targets, outcomes, strict=True) if not outcome
                )
                assert all(target.guarded for target in targets)

        self.run(scenario)

    def test_the_taker_may_know_the_sum(self) -> None:
        """Then bytes that the peer believes in are damage too, of a whole and of a part."""

        async def scenario() -> None:
            async with self.pair(Lender({b"k": 5000})) as (_, peer):
                whole, part = Target(b"k", 5000), Target(b"k", 5000, 3, 100)
                wants = [each.want._replace(checksum=bytes(16)) for each in (whole, part)]
                assert faults_of(await peer.fetch(wants, AMPLE_S)) == [PeerFault.DAMAGED] * 2

        self.run(scenario)

    def test_what_nobody_can_serve_is_an_error_of_the_caller(self) -> None:
        """And leaves the connection as it was."""

        async def scenario() -> None:
            async with self.pair(Lender({b"k": 100})) as (_, peer):
                good = Target(b"k", 100)
                for bad in (
                    good.want._replace(target=memoryview(bytes(100))),
                    good.want._replace(target=good.view[::2]),
                    good.want._replace(offset=1),
                    good.want._replace(offset=-1),
                    good.want._replace(key=b""),
                    good.want._replace(key=bytes(5000)),
                    good.want._replace(checksum=b"x"),
                ):
                    with pytest.raises(ValueError, match=r"."):
                        await peer.fetch([bad], AMPLE_S)
                with pytest.raises(ValueError, match="batch_max"):
                    await peer.fetch([good.want] * (SMALL.batch_max + 1), AMPLE_S)
                assert await peer.fetch([good.want], AMPLE_S) == [None]
                assert good.right

        self.run(scenario)

    def test_many_at_once(self) -> None:
        """On one connection, small ones beside large ones; too many are BUSY."""
        sizes = {b"%d" % n: (n % 7) * 100 * KIB + n for n in range(SMALL.calls_max)}
        lender = Lender(sizes)

        async def scenario() -> None:
            async with self.pair(lender) as (_, peer):
                lender.held = []
                targets = [Target(key, nbytes) for key, nbytes in sizes.items()]
                async with asyncio.TaskGroup() as group:
                    calls = [
                        group.create_task(peer.fetch([target.want], AMPLE_S)) for target in targets
                    ]
                    await until(lambda: lender.asked == len(targets))
                    extra = Target(b"0", 0)
                    busy = await peer.fetch([extra.want], AMPLE_S)
                    assert faults_of(busy) == [PeerFault.BUSY]
                    lender.give()
                assert [call.result() for call in calls] == [[None]] * len(calls)
                assert all(target.right for target in targets)
                await until(lambda: lender.loans == 0)
                assert await peer.probe(AMPLE_S) < AMPLE_S

        self.run(scenario)
