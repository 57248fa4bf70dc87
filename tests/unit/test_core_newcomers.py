"""What is declined since all that may go is worth more, and what is taken all the same."""

import msgspec
import pytest

from tests.unit.bench import Bench
from tiercache.core.books import Books
from tiercache.core.limits import Evicting
from tiercache.core.policy import pointwise, shadow
from tiercache.core.policy.pointwise import Asking, Place
from tiercache.core.policy.shadow import LEARNED_USES, LEARNED_VISITS
from tiercache.testing.sim.rig import small


def test_no_room_is_made_for_what_would_go_next() -> None:
    bench = learned()
    bench.visit("pq")
    bench.ask("p")
    assert bench.drop() == []
    assert bench.policy.outweighed
    bench.ask("pq", boundary=True)
    assert bench.drop() == []
    bench.visit("pq", resumed=1)  # It comes again, and is worth more now.
    bench.visit("pq", resumed=1)
    bench.policy.asking = None
    assert bench.drop(1) == ["abcdefgh*"]


def test_where_a_slower_tier_takes_what_goes_nothing_is_declined() -> None:
    """Memory is the only way there. What would go next is still the next to go."""
    bench = learned(declines=False)
    bench.visit("pq")
    bench.ask("p")
    assert bench.drop(1) == ["abcdefgh*"]
    assert not bench.policy.outweighed
    # Its point fell meanwhile: it is taken all the same.
    bench = learned(declines=False)
    bench.visit("pq")
    bench.policy.asking = None
    assert bench.drop(1) == ["abcdefgh*"]
    bench.ask("pq", boundary=True)
    assert bench.drop(1) == ["abcdefgh"]
    assert not bench.policy.outweighed


@pytest.mark.parametrize("nvme_pages", [0, 64])
def test_only_a_node_without_nvme_declines(nvme_pages: int) -> None:
    limits = msgspec.structs.replace(small(8, nvme_pages), evicting=Evicting(policy="auto"))
    books = Books(limits)
    order = books.passage.make(None)
    assert isinstance(order, pointwise.Pointwise)
    assert order._declines is (nvme_pages == 0)


def learned(*, declines: bool = True) -> Bench:
    """One that knows enough to decline, and holds something long."""
    bench = Bench("index", declines=declines)
    bench.policy._canopy.clock.tick = LEARNED_VISITS
    bench.standing.reuse.uses = LEARNED_USES
    bench.take("abcdefgh")
    return bench


def test_nothing_new_is_declined_before_enough_is_known() -> None:
    bench = Bench("index")
    bench.take("abcdefgh")
    bench.visit("pq")
    bench.ask("p")
    assert bench.drop(1) == ["abcdefgh*"]
    assert not bench.policy.outweighed
    for visits, uses in ((LEARNED_VISITS, LEARNED_USES - 1), (LEARNED_VISITS - 3, LEARNED_USES)):
        other = Bench("index")
        other.policy._canopy.clock.tick = visits
        other.standing.reuse.uses = uses
        other.take("abcdefgh")
        other.visit("pq")
        other.ask("p")
        assert other.drop(1) == ["abcdefgh*"]
    bench.store("pq")  # All that room is made for is not what goes for it.
    assert bench.drop() == list(reversed(["a", *("abcdefgh"[:n] for n in range(2, 9))]))
    bench.visit("xyz")
    bench.ask("x")
    assert bench.drop(1) == ["pq*"]


def test_one_of_many_newcomers_is_taken_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "DECLINED_MAX", 2)
    bench = learned()
    taken = []
    for number in range(6):
        name = chr(ord("m") + number)
        bench.now = 0.0  # What is held does not age.
        bench.visit(name)
        bench.ask(name)
        victim = next(bench.policy.victims(), None)
        taken.append(victim is not None)
    assert taken == [False, False, True] * 2


def test_a_newcomer_that_is_taken_may_be_cleared() -> None:
    bench = learned()
    bench.visit("pq")
    bench.ask("p", urgent=True)
    assert bench.drop(1) == ["abcdefgh*"]
    bench.policy.forget("t")
    bench.visit("xy")
    assert not bench.policy._canopy.aside


def test_a_newcomer_is_not_what_goes_when_all_else_is_in_use() -> None:
    bench = learned()
    bench.policy.remove(bench.state("abcdefgh"))
    bench.busy.add("abcdefgh")
    bench.visit("pq", fork=1)
    bench.ask("p", urgent=True)
    assert bench.drop() == []
    assert not bench.policy.outweighed
    assert len(bench.policy._canopy.forest.points_of("t")) == 3


def test_with_a_slower_tier_there_is_room_as_long_as_anything_may_go() -> None:
    """Checkpoints that are being written there keep none of what they need from going."""
    bench = learned(declines=False)
    bench.policy.remove(bench.state("abcdefgh"))
    bench.busy.add("abcdefgh")
    bench.visit("pq")
    bench.ask("p")
    assert bench.drop(2) == ["a", "ab"]
    assert not bench.policy.outweighed
    bench.policy.add(bench.held["abcdefgh"][-1])
    bench.busy.clear()
    assert bench.drop(1) == ["abcdefgh*"]


def test_what_came_back_sooner_is_not_brought_back_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, "ASIDE_VISITS", 2)
    bench = Bench()
    bench.take("ab")
    used = bench.state("ab")
    bench.policy.remove(used)
    bench.busy.add("ab")
    assert bench.drop() == []
    bench.busy.clear()
    bench.policy.add(used)  # It is let go of before its time.
    assert not bench.policy._canopy.aside
    bench.visit("x")
    bench.visit("y")
    assert bench.drop(1) == ["ab*"]


def test_who_says_that_it_is_worth_more_is_taken() -> None:
    bench = learned()
    bench.visit("pq")
    bench.ask("p", urgent=True)
    assert bench.drop(1) == ["abcdefgh*"]


def test_the_next_turn_of_what_is_held_may_be_declined() -> None:
    """What is held serves it nearly as well."""
    bench = learned()
    bench.visit("abcdefghi", resumed=8)
    bench.busy.add("abcdefgh")
    bench.ask("abcdefghi")
    assert bench.drop() == []


def test_room_is_wanted_for_something_else() -> None:
    """The one that is worth least is not what room is wanted for."""
    for name, depth, tree in (("a", 1, "t"), ("zz", 2, "t"), ("abcdefghi", 9, "t"), ("a", 1, "u")):
        bench = Bench("index")
        bench.take("abcdefgh")
        bench.policy.asking = Asking(Place(tree, name, boundary=False), depth, urgent=False)
        if tree == "t" and name == "a":
            assert bench.drop() == []  # It would be what is there.
        else:
            assert bench.drop(1) == ["abcdefgh*"]


def test_what_can_never_fit_takes_nothing_s_place() -> None:
    bench = Bench()
    bench.take("ab")
    bench.visit("x" * 98)  # 98 blocks and a checkpoint: 1010 bytes of 1000.
    bench.ask("x")
    assert bench.drop() == []
    assert bench.policy.outweighed
    bench.visit("x" * 97)
    bench.ask("x")
    assert bench.drop(1) == ["ab*"]


def test_what_was_spared_stays_as_long_as_it_had_been_unused() -> None:
    bench = Bench()
    bench.take("ab")
    for number in range(pointwise.ASIDE_VISITS + 50):
        bench.visit(chr(1000 + number))
    state = next(bench.policy.victims())
    assert str(state) == "ab*"
    bench.policy.remove(state)
    bench.policy.add(state)
    (due,) = bench.policy._canopy.aside.values()
    assert due == bench.policy._canopy.clock.tick + pointwise.ASIDE_VISITS + 50
