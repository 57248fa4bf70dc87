"""A router's index: batches in any order, lost, doubled and late; it never stays wrong."""

import random

import msgspec
import pytest

from tiercache.client.residency import BOOTS_KEPT, Residency
from tiercache.core.cluster.summary import Own
from tiercache.errors import ProtocolError
from tiercache.state.names import packed, short
from tiercache.wire.residency import NOTHING_KNOWN, Ask, Batch, batch_frames

SPACE = bytes(range(32))
CHAIN = [random.Random(at).randbytes(32) for at in range(6)]
NAMES = [short(SPACE, digest) for digest in CHAIN]
STEP = 16


class Teller:
    """What a node tells, from its real account of what it could resume."""

    def __init__(self, node: str = "n", boot: str = "b1", changes_max: int = 100) -> None:
        self.node, self.boot = node, boot
        self.own = Own(names_max=100, changes_max=changes_max)
        self.version = NOTHING_KNOWN

    def since(self, version: int) -> list[bytes]:
        told = self.own.since(version)
        slower = self.own.slower(told.added)
        return batch_frames(
            Batch(
                self.node,
                self.boot,
                NOTHING_KNOWN if told.whole else version,
                told.version,
                told.whole,
                packed([name for name in told.added if name not in slower]),
                packed(list(slower)),
                packed(told.removed),
            )
        )

    def tell(self) -> list[bytes]:
        frames = self.since(self.version)
        self.version = self.own.version
        return frames

    def answer(self, ask: Ask) -> list[bytes]:
        return self.since(ask.version if ask.boot == self.boot else NOTHING_KNOWN)


def depth(index: Residency, node: str = "n", *, memory: bool = False) -> int:
    index.check()
    return index.deepest(SPACE, CHAIN, STEP, memory=memory).get(node, 0)


@pytest.fixture
def teller() -> Teller:
    return Teller()


@pytest.fixture
def index() -> Residency:
    return Residency()


def test_what_a_node_tells_is_found(index: Residency, teller: Teller) -> None:
    assert index.feed(teller.tell(), 0.0) is None
    assert depth(index) == 0
    teller.own.add(NAMES[1])
    teller.own.add(NAMES[3], slower=True)
    assert index.feed(teller.tell(), 0.0) is None
    assert depth(index) == 4 * STEP
    assert depth(index, memory=True) == 2 * STEP
    assert index.deepest(SPACE, CHAIN[:3], STEP) == {"n": 2 * STEP}
    assert index.deepest(SPACE[::-1], CHAIN, STEP) == {}
    assert index.deepest(SPACE, [], STEP) == {}
    teller.own.move(NAMES[3], slower=False)
    index.feed(teller.tell(), 0.0)
    assert depth(index, memory=True) == 4 * STEP
    teller.own.remove(NAMES[3])
    index.feed(teller.tell(), 0.0)
    assert depth(index) == 2 * STEP
    assert index.gaps == 0


def test_digests_that_are_none_are_an_error(index: Residency) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        index.deepest(SPACE, [b"short"], STEP)


def test_a_batch_that_was_lost_is_asked_for(index: Residency, teller: Teller) -> None:
    index.feed(teller.tell(), 0.0)
    teller.own.add(NAMES[0])
    teller.tell()  # Lost.
    teller.own.add(NAMES[1])
    ask = index.feed(teller.tell(), 1.0)
    assert ask == Ask(0, "b1")
    assert depth(index) == 0, "nothing is taken out of order"
    # Not asked twice while the answer may be on its way; then again.
    assert index.feed(teller.tell(), 1.5) is None
    assert index.feed(teller.tell(), 2.0) == ask
    index.replayed(teller.answer(ask), 2.1)
    assert depth(index) == 2 * STEP
    assert index.gaps == 1
    assert index.feed(teller.tell(), 2.2) is None


def test_who_starts_late_is_told_everything(index: Residency, teller: Teller) -> None:
    for name in NAMES[:3]:
        teller.own.add(name)
    teller.tell()
    ask = index.feed(teller.tell(), 0.0)
    assert ask == Ask(NOTHING_KNOWN, "b1")
    index.replayed(teller.answer(ask), 0.0)
    assert depth(index) == 3 * STEP
    # Or asks before anything came.
    early = Residency()
    early.replayed(teller.answer(Ask(NOTHING_KNOWN, "")), 0.0)
    assert depth(early) == 3 * STEP
    assert early.feed(teller.tell(), 0.0) is None


def test_after_a_clear_that_was_lost_the_index_is_empty(index: Residency) -> None:
    teller = Teller(changes_max=4)
    for name in NAMES:
        teller.own.add(name)
    ask = index.feed(teller.tell(), 0.0)
    assert depth(index) == len(NAMES) * STEP
    for name in NAMES:
        teller.own.remove(name)
    teller.tell()
    ask = index.feed(teller.tell(), 1.0)
    assert ask is not None
    index.replayed(teller.answer(ask), 1.0)
    assert depth(index) == 0
    assert index.nodes() == {"n": 0}


def test_old_and_doubled_batches_change_nothing(index: Residency, teller: Teller) -> None:
    first = teller.tell()
    teller.own.add(NAMES[0])
    second = teller.tell()
    everything = teller.since(NOTHING_KNOWN)
    teller.own.remove(NAMES[0])
    third = teller.tell()
    for frames in (first, second, third, second, everything, first, third):
        assert index.feed(frames, 0.0) is None
        index.replayed(frames, 0.0)
    assert depth(index) == 0
    # An answer may be ahead of what was published since.
    teller.own.add(NAMES[1])
    index.replayed(teller.since(1), 0.0)
    assert depth(index) == 2 * STEP
    assert index.feed(teller.tell(), 0.0) is None
    teller.own.remove(NAMES[1])
    index.feed(teller.tell(), 0.0)
    assert depth(index) == 0


def test_a_restart_is_seen(index: Residency, teller: Teller) -> None:
    teller.own.add(NAMES[0])
    last_words = teller.tell()
    index.feed(last_words, 0.0)
    again = Teller(boot="b2")
    assert index.feed(again.tell(), 1.0) is None
    assert depth(index) == 0
    # What was on its way from the earlier start comes too late, on either socket.
    assert index.feed(last_words, 2.0) is None
    index.replayed(last_words, 2.0)
    assert depth(index) == 0
    # Its first words were lost.
    third = Teller(boot="b3")
    third.own.add(NAMES[2])
    third.tell()
    ask = index.feed(third.tell(), 3.0)
    assert ask == Ask(NOTHING_KNOWN, "b3")
    index.replayed(third.answer(ask), 3.0)
    assert depth(index) == 3 * STEP


def test_of_very_many_starts_the_last_ones_are_remembered(index: Residency) -> None:
    for at in range(BOOTS_KEPT + 3):
        index.feed(Teller(boot=f"b{at}").tell(), 0.0)
    late = Teller(boot="b1")
    late.own.add(NAMES[0])
    index.feed(late.tell(), 0.0)
    assert depth(index) == STEP, "believed again, since it is forgotten"


def test_nodes_are_kept_apart(index: Residency) -> None:
    tellers = {name: Teller(name) for name in "abc"}
    for count, (name, each) in enumerate(tellers.items(), 1):
        each.own.add(NAMES[0])
        each.own.add(NAMES[count], slower=name == "c")
        index.feed(each.tell(), float(count))
    assert index.deepest(SPACE, CHAIN, STEP) == {"a": 2 * STEP, "b": 3 * STEP, "c": 4 * STEP}
    assert index.deepest(SPACE, CHAIN, STEP, memory=True)["c"] == STEP
    assert index.silent(4.0, 1.5) == ["a", "b"]
    assert index.silent(4.0, 3.0) == []
    index.drop("b")
    index.drop("never seen")
    index.check()
    assert index.deepest(SPACE, CHAIN, STEP) == {"a": 2 * STEP, "c": 4 * STEP}
    # It comes back, or another takes its place.
    index.feed(Teller("d").tell(), 5.0)
    index.feed(tellers["b"].since(NOTHING_KNOWN), 5.0)
    assert index.deepest(SPACE, CHAIN, STEP)["b"] == 3 * STEP
    assert index.nodes() == {"a": 2, "c": 2, "d": 0, "b": 2}


def test_what_is_beyond_the_limits_is_not_found() -> None:
    index = Residency(nodes_max=1, names_max=2)
    teller = Teller()
    for name in NAMES[:3]:
        teller.own.add(name)
    index.feed(teller.tell(), 0.0)
    assert depth(index) == 2 * STEP
    other = Teller("other")
    other.own.add(NAMES[5])
    assert index.feed(other.tell(), 0.0) is None
    index.replayed(other.since(NOTHING_KNOWN), 0.0)
    assert index.deepest(SPACE, CHAIN, STEP) == {"n": 2 * STEP}


def test_what_is_no_batch_changes_nothing(index: Residency, teller: Teller) -> None:
    teller.own.add(NAMES[0])
    frames = teller.tell()
    index.feed(frames, 0.0)
    for broken in ([], frames[:2], [*frames[:2], b"\xc1"], [b"", *frames[1:]]):
        for take in (index.feed, index.replayed):
            with pytest.raises(ProtocolError):
                take(broken, 0.0)
    assert depth(index) == STEP


class Weather:
    """A node that is changed, cleared and restarted, and messages between its two sockets and an index that
    are lost, doubled, late and out of order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"residency/{seed}")
        self.index = Residency()
        self.changes_max = self.rng.choice((2, 8, 100))
        self.boots = 0
        self.now = 0.0
        self.flying: list[tuple[bool, list[bytes]]] = []  # Published, or an answer.
        self.held: dict[int, bool] = {}
        self.restart()

    def restart(self) -> None:
        self.boots += 1
        self.held = {}
        self.teller = Teller(boot=f"b{self.boots}", changes_max=self.changes_max)

    def add(self) -> None:
        name, slower = self.rng.choice(NAMES), self.rng.random() < 0.3
        if name not in self.held:
            self.held[name] = slower
            self.teller.own.add(name, slower=slower)

    def remove(self) -> None:
        if self.held:
            self.drop(self.rng.choice(list(self.held)))

    def drop(self, name: int) -> None:
        del self.held[name]
        self.teller.own.remove(name)

    def move(self) -> None:
        if self.held:
            name = self.rng.choice(list(self.held))
            self.held[name] = not self.held[name]
            self.teller.own.move(name, slower=self.held[name])

    def clear(self) -> None:
        for name in list(self.held):
            self.drop(name)

    def step(self) -> None:
        self.now += self.rng.random()
        deeds = (self.add, self.remove, self.move, self.clear, self.restart)
        self.rng.choices(deeds, (8, 5, 3, 0.3, 0.3))[0]()
        if self.rng.random() < 0.5:
            self.flying += [(True, self.teller.tell())] * self.rng.choice((0, 1, 1, 2))
        while self.flying and self.rng.random() < 0.6:
            late = self.rng.random() < 0.3
            self.arrive(self.rng.randrange(len(self.flying)) if late else 0)

    def arrive(self, at: int) -> None:
        published, frames = self.flying.pop(at)
        if not published:
            self.index.replayed(frames, self.now)
        elif (ask := self.index.feed(frames, self.now)) is not None and self.rng.random() < 0.5:
            self.flying.append((False, self.teller.answer(ask)))
        self.index.check()

    def settle(self) -> None:
        while self.flying:
            self.arrive(0)
        for _ in range(2):
            self.now += 2.0
            if (ask := self.index.feed(self.teller.tell(), self.now)) is not None:
                self.index.replayed(self.teller.answer(ask), self.now)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_lost_the_index_comes_right(seed: int) -> None:
    """Once messages get through again, the index is what the node has."""
    weather = Weather(seed)
    for _ in range(300):
        weather.step()
    weather.settle()
    for name, digest in zip(NAMES, CHAIN, strict=True):
        found = weather.index.deepest(SPACE, [digest], STEP)
        in_memory = weather.index.deepest(SPACE, [digest], STEP, memory=True)
        assert bool(found) == (name in weather.held)
        assert bool(in_memory) == (weather.held.get(name) is False)


def test_a_batch_of_the_same_version_that_is_all_there_is_ends_a_node(
    index: Residency, teller: Teller
) -> None:
    """A node that stops says that it has nothing any more."""
    teller.own.add(NAMES[0])
    index.feed(teller.tell(), 0.0)
    nothing = Batch("n", "b1", -1, 1, whole=True, host=b"", nvme=b"", removed=b"")
    index.feed(batch_frames(nothing), 0.0)
    assert depth(index) == 0
    assert msgspec.structs.asdict(nothing)["version"] == teller.own.version
