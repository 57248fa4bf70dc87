"""Questions: small things that nodes ask one another, beside the bytes of objects."""

import asyncio
import random

import pytest

from tiercache.errors import PeerFault, TransportFault
from tiercache.testing.lenders import Lender, Target
from tiercache.testing.transport_pairs import (
    AMPLE_S,
    KIB,
    SLACK_S,
    SMALL,
    SOON_S,
    TransportUnderTest,
    until,
)
from tiercache.transport.base import Peer


async def fault_of(peer: Peer, body: bytes, within_s: float = AMPLE_S) -> PeerFault:
    """Return how a question fails."""
    with pytest.raises(TransportFault) as caught:
        await peer.ask(body, within_s)
    return caught.value.fault


class AskingContract(TransportUnderTest):
    """What a `Transport` promises of questions."""

    @pytest.mark.parametrize("nbytes", [0, 1, 64 * KIB, SMALL.frame_bytes_max - 100])
    def test_a_question_is_answered(self, nbytes: int) -> None:
        """With what the source says to it."""
        body = random.Random(nbytes).randbytes(nbytes)

        async def scenario() -> None:
            lender = Lender()
            async with self.pair(lender) as (_, peer):
                assert await peer.ask(body, AMPLE_S) == body[::-1]
                assert lender.questions == 1

        self.run(scenario)

    def test_questions_and_fetches_go_together(self) -> None:
        """Each gets its own answer."""
        lender = Lender({b"k": 300 * KIB})

        async def scenario() -> None:
            async with self.pair(lender) as (_, peer), asyncio.TaskGroup() as group:
                asked = [group.create_task(peer.ask(b"%d" % at, AMPLE_S)) for at in range(30)]
                target = Target(b"k", 300 * KIB)
                fetched = group.create_task(peer.fetch([target.want], AMPLE_S))
                answers = [await each for each in asked]
                assert answers == [(b"%d" % at)[::-1] for at in range(30)]
                assert await fetched == [None]
                assert await peer.probe(AMPLE_S) < AMPLE_S

        self.run(scenario)

    def test_what_fits_into_no_frame_is_not_asked_and_not_answered(self) -> None:
        """And the connection serves on."""
        lender = Lender()

        async def scenario() -> None:
            async with self.pair(lender) as (_, peer):
                with pytest.raises(ValueError, match="go"):
                    await peer.ask(bytes(SMALL.frame_bytes_max + 1), AMPLE_S)
                lender.times = 10
                assert await fault_of(peer, bytes(SMALL.frame_bytes_max // 2)) is PeerFault.MISMATCH
                assert await peer.ask(b"ab", AMPLE_S) == b"ba" * 10

        self.run(scenario)

    def test_a_late_answer_is_nobodys(self) -> None:
        """The deadline is kept, and what is asked next gets its own answer."""
        lender = Lender()

        async def scenario() -> None:
            async with self.pair(lender) as (_, peer):
                lender.held = []
                began = asyncio.get_running_loop().time()
                assert await fault_of(peer, b"ab", SOON_S) is PeerFault.LATE
                assert SOON_S / 2 < asyncio.get_running_loop().time() - began < SLACK_S
                assert await fault_of(peer, b"ab", 0) is PeerFault.LATE
                lender.give()
                assert await peer.ask(b"cd", AMPLE_S) == b"dc"

        self.run(scenario)

    def test_questions_are_cancelled_at_any_instant(self) -> None:
        """And leave no trace."""
        lender, dice = Lender(), random.Random(2)

        async def scenario() -> None:
            async with self.pair(lender) as (_, peer):
                for number in range(300):
                    async with asyncio.TaskGroup() as group:
                        call = group.create_task(peer.ask(b"%d" % number, AMPLE_S))
                        for _ in range(dice.randrange(6)):
                            await asyncio.sleep(0)
                        call.cancel()
                assert await peer.ask(b"xy", AMPLE_S) == b"yx"
                assert await peer.probe(AMPLE_S) < AMPLE_S

        self.run(scenario)

    def test_a_question_ends_with_its_connection(self) -> None:
        """Whoever waits is told at once."""
        lender = Lender()

        async def scenario() -> None:
            async with self.pair(lender) as (listener, peer):
                lender.held = []
                async with asyncio.TaskGroup() as group:
                    failing = group.create_task(fault_of(peer, b"ab"))
                    await until(lambda: lender.questions == 1)
                    await listener.close()
                assert failing.result() is PeerFault.LOST
                lender.give()
                await until(lambda: peer.closed)
                assert await fault_of(peer, b"ab") is PeerFault.LOST

        self.run(scenario)
