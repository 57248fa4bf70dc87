"""When a tier is slower than computing: what is declined, what is not written, and how it is known."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core.cost import Work
from tiercache.core.limits import MIB, Limits, Retaining
from tiercache.core.worth import PROBE_EVERY, prefix_bytes
from tiercache.errors import Fault
from tiercache.state import Kind, Layout, Part, Tensor
from tiercache.testing.sim.rig import Client, Rig, evict, outcome_of

# --- what a prefix weighs

MEGA = 131_072
"""Numbers of eight bytes in 1 MiB."""


def heavy(kv_cells: int = MEGA, block: int = 4) -> Layout:
    """Return a layout whose states weigh 4 MiB, and whose rows `kv_cells` numbers."""
    return Layout(
        (
            Part("kv", Kind.KV, None, block, 1, (Tensor("v", "int64", (kv_cells,), ("c",)),)),
            Part("s", Kind.RECURRENT, 1, 0, 1, (Tensor("v", "int64", (4 * MEGA,), ("c",)),)),
        ),
        block,
    )


def tiny() -> Layout:
    """Return a layout whose objects weigh next to nothing."""
    state = Part("s", Kind.RECURRENT, 1, 0, 1, (Tensor("v", "int64", (1,), ("c",)),))
    return Layout((heavy(kv_cells=1).parts[0], state), 4)


def test_the_bytes_of_a_prefix() -> None:
    assert prefix_bytes(heavy(), 10) == 14 * MIB
    window = Part("w", Kind.KV, 2, 4, 2, (Tensor("v", "int64", (2,), ("h",), 0),))
    layout = Layout((window,), 4)
    assert [prefix_bytes(layout, tokens) for tokens in (4, 8, 100)] == [64, 128, 128]


# --- what is declined

TOKENS = list(range(41))


def rig_of(prefill: float = 0.0, *, eager: bool = True) -> Rig:
    return Rig(
        Limits(
            (512 * MIB,),
            nvme_bytes=512 * MIB,
            nvme_segment_bytes=64 * MIB,
            eager=eager,
            retaining=Retaining("dense", checkpoints_per_path_max=0, prefill_tokens_per_s=prefill),
        )
    )


def take_time(rig: Rig, seconds_per_mib: float) -> None:
    """Have all work done; reading takes its time."""
    while rig.work:
        command = rig.work.pop(0)
        if isinstance(command, cm.Fill):
            nbytes = sum(record.nbytes for record, _, _ in command.objects)
            rig.now += seconds_per_mib * nbytes / MIB
        outcome = outcome_of(command)
        if outcome is not None:
            rig.tell(outcome)


def load(client: Client, request: str, seconds_per_mib: float) -> None:
    client.rig.later(client.loading(request, wait_s=1e6))
    take_time(client.rig, seconds_per_mib)
    client.release(request)


def stored(client: Client, *ends: int) -> None:
    chain = client.chain(TOKENS)
    for end in ends:
        client.save(f"save-{end}", client.offers(chain, end))
    client.rig.run()


def known(client: Client, seconds_per_mib: float) -> None:
    """Let the node see how slow its disk is."""
    evict(client.rig)
    client.plan("first", client.chain(TOKENS))
    load(client, "first", seconds_per_mib)
    evict(client.rig)


def test_slower_than_computing_is_declined() -> None:
    """40 tokens are 44 MiB: at 1 s for each, computing them in 4 s is sooner."""
    rig = rig_of(prefill=10.0)
    client = Client(rig, heavy()).attach()
    stored(client, 40)
    known(client, 1.0)
    planned = client.plan("r", client.chain(TOKENS))
    assert (planned.boundary, planned.ready, planned.reason) == (0, True, "slower_than_recompute")
    assert planned.checkpoints == [41]  # At 40 a state is held already.
    client.release("r")
    counters = rig.machine.counters
    assert (counters["lookups"]["declined"], counters["lookups"]["hit_nvme"]) == (1, 1)
    assert counters["lost_tokens"]["slower_than_recompute"] == 40
    assert not rig.take(cm.Fill)


@pytest.mark.parametrize(
    ("prefill", "seconds_per_mib", "boundary"),
    [
        (0.0, 1.0, 40),  # Nobody said how fast it computes.
        (10.0, 0.0, 40),  # The disk takes no time.
        (0.8, 1.0, 40),  # 50 s to compute, 44 s to read.
        (1.0, 1.0, 0),  # 40 s to compute.
    ],
)
def test_what_is_worth_it(prefill: float, seconds_per_mib: float, boundary: int) -> None:
    client = Client(rig_of(prefill), heavy()).attach()
    stored(client, 40)
    known(client, seconds_per_mib)
    assert client.plan("r", client.chain(TOKENS)).boundary == boundary


def test_an_engine_that_says_how_fast_it_is_knows_better() -> None:
    rig = rig_of(prefill=0.001)
    client = Client(rig, heavy()).attach()
    stored(client, 40)
    known(client, 1.0)
    fast = Client(rig, client.layout)
    rig.ask(msgspec.structs.replace(fast.attaching(), prefill_tokens_per_s=1000.0), cm.Accepted)
    assert fast.plan("r", fast.chain(TOKENS)).reason == "slower_than_recompute"


def test_the_boundary_that_gets_it_going_soonest() -> None:
    """At 0.15 s for 1 MiB, a token is read in 0.15 s and computed in 0.1 s; a state is 0.6 s. Of 8 tokens
    in memory and 40 that are not, the 8 are worth it, and no more."""
    client = Client(rig_of(prefill=10.0), heavy()).attach()
    stored(client, 8, 24, 40)
    known(client, 0.15)
    chain = client.chain(TOKENS)
    assert client.plan("r", chain).boundary == 0
    client.release("r")
    fetched = [client.wanted(chain, 0, 4), client.wanted(chain, 0, 8), client.wanted(chain, 1, 8)]
    client.rig.later(client.fetching("f", fetched, wait_s=1e6))
    take_time(client.rig, 0.15)
    planned = client.plan("r", chain)
    assert (planned.boundary, planned.ready, planned.reason) == (8, True, "slower_than_recompute")
    assert client.rig.count("lost_tokens", "slower_than_recompute") == 40 + 32
    assert client.rig.count("hit_tokens", "host") == 8


def test_work_that_grows_with_the_prompt_is_worth_more() -> None:
    client = Client(rig_of(prefill=10.0), heavy()).attach()
    stored(client, 40)
    known(client, 1.0)
    (shelf,) = client.rig.machine._books.catalog.shelves.values()
    shelf.work = Work(1.0, 1.0)
    assert client.plan("r", client.chain(TOKENS)).boundary == 40  # 84 s to compute.


def test_one_of_many_is_tried_all_the_same() -> None:
    client = Client(rig_of(prefill=10.0), heavy()).attach()
    stored(client, 40)
    known(client, 1.0)
    found = []
    for number in range(2 * PROBE_EVERY):
        found.append(client.plan(str(number), client.chain(TOKENS)).boundary)
        load(client, str(number), 0.001)
        evict(client.rig)
    assert found.index(40) == PROBE_EVERY - 1
    assert found[-1] == 40  # It was fast this time: nothing is declined any more.


@pytest.mark.parametrize(
    ("begins_s", "tokens", "boundary"),
    [(0.005, 9, 8), (0.005, 41, 40), (0.5, 9, 0), (0.5, 41, 40)],
)
def test_short_and_long_prefixes_on_a_tier_that_takes_its_time_to_begin(
    begins_s: float, tokens: int, boundary: int
) -> None:
    """A token takes 20 ms to compute: 8 of them less than half a second, 40 more."""
    client = Client(rig_of(prefill=50.0), tiny()).attach()
    stored(client, 8, 40)
    evict(client.rig)
    for request in ("first", "second"):
        client.plan(request, client.chain(TOKENS))
        client.rig.later(client.loading(request, wait_s=1e6))
        client.rig.now += begins_s
        client.rig.run()
        client.release(request)
        evict(client.rig)
    assert client.plan("r", client.chain(TOKENS[:tokens])).boundary == boundary


def test_other_ranks_get_what_the_first_one_got() -> None:
    rig = rig_of(prefill=10.0)
    ranks = [Client(rig, heavy(), ranks=2, rank=rank).attach() for rank in (0, 1)]
    stored(ranks[0], 40)
    known(ranks[0], 1.0)
    assert [client.plan("r", client.chain(TOKENS)).boundary for client in ranks] == [0, 0]


def test_a_disk_that_fails_is_no_slow_one() -> None:
    client = Client(rig_of(prefill=10.0), heavy()).attach()
    stored(client, 40)
    evict(client.rig)
    client.plan("r", client.chain(TOKENS))
    client.rig.now += 60.0
    client.rig.run(Fault.IO)
    assert client.rig.machine._books.nvme_pace.bytes_per_s == 0


def test_what_is_on_its_way_already_is_not_waited_for_twice() -> None:
    """44 MiB are read in 44 s, and computed in 50 s; a second request reads nothing more."""
    client = Client(rig_of(prefill=0.8), heavy()).attach()
    stored(client, 40)
    known(client, 1.0)
    assert client.plan("a", client.chain(TOKENS)).boundary == 40
    assert client.plan("b", client.chain(TOKENS)).boundary == 40


# --- what is not written


def writes(client: Client) -> list[tuple[str, int]]:
    return sorted(
        (record.key.part, record.end)
        for command in client.rig.take(cm.Store)
        for record, _, _ in command.objects
    )


def test_a_short_prefix_that_could_never_pay_is_not_written() -> None:
    """A state is 4 s to read, a token 1 s less than to compute: from 4 tokens on it pays."""
    rig = rig_of()
    client = Client(rig, heavy(kv_cells=1)).attach()
    stored(client, 40)
    known(client, 1.0)
    (shelf,) = rig.machine._books.catalog.shelves.values()
    shelf.prefill_tokens_per_s = 1.0
    other = [7, *TOKENS[1:]]
    short, long = client.chain(other[:4]), client.chain(other[:9])
    client.save("short", client.offers(short, 4))
    assert writes(client) == []
    assert rig.count("writeback_dropped", "slower_than_recompute") == 2
    client.plan("once more", short)  # Each object counts once.
    assert rig.count("writeback_dropped", "slower_than_recompute") == 2
    client.save("long", client.offers(long, 8))
    assert writes(client) == [("kv", 8), ("s", 8)]
    client.plan("again", long)
    assert writes(client) == [("kv", 4)]  # A longer prefix needs it.
    tail = client.chain([9, 9, 9])
    client.save("tail", client.offers(tail, 3))
    assert writes(client) == []  # Nor a partial block, whatever else is there.
    assert rig.count("writeback_dropped", "slower_than_recompute") == 4


def test_what_nobody_attached_for_may_pay() -> None:
    rig = rig_of(prefill=1e9)
    client = Client(rig, heavy(kv_cells=1)).attach()
    stored(client, 40)
    known(client, 1.0)
    worth = rig.machine._writeback._worth
    (shelf,) = rig.machine._books.catalog.shelves.values()
    assert not worth.pays(shelf, 40)
    shelf.layout = None
    assert worth.pays(shelf, 40)


# --- flash wear


def test_one_off_traffic_writes_nothing() -> None:
    """10,000 prompts that never come again write no byte; 100 that do are written."""
    rig = Rig(
        Limits(
            (64 * MIB,),
            nvme_bytes=64 * MIB,
            nvme_segment_bytes=4 * MIB,
            retaining=Retaining("marconi"),
        )
    )
    rig.machine.check = lambda: None  # type: ignore[method-assign]
    client = Client(rig, tiny()).attach()

    def serve(request: str, number: int) -> None:
        tokens = [number, *range(7), 1]
        planned = client.plan(request, client.chain(tokens))
        chain = client.chain(tokens)
        client.save(request, [o for end in planned.checkpoints for o in client.offers(chain, end)])
        client.release(request)
        rig.run()

    for number in range(10_000):
        serve(f"once-{number}", number)
    assert rig.count("writeback_bytes") == 0
    assert rig.count("committed_bytes") > 0
    for number in range(100):
        serve(f"again-{number}", 9_900 + number)
    assert rig.count("writeback_bytes") > 0
    assert rig.count("lookups", "hit_host") == 100
