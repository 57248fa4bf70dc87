"""What is held along a path, for engines that choose the boundary: exact, kept for a while, and counted."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.limits import Evicting, Limits
from tiercache.state import Kind, Layout
from tiercache.testing.sim.rig import (
    ADMIN,
    BLOCK,
    TOKENS,
    Client,
    Rig,
    evict,
    hybrid,
    on_disk,
    part,
    saved,
    small,
)

END = 16


@pytest.fixture
def rig() -> Rig:
    return Rig(small())


@pytest.fixture
def client(rig: Rig) -> Client:
    return Client(rig, hybrid()).attach()


def path(client: Client) -> list[bytes]:
    return list(client.chain(TOKENS[:END]).digests[1:])


def store(client: Client, end: int, *parts: str) -> None:
    """Save the objects that end at a boundary, of these parts."""
    chain = client.chain(TOKENS)
    offers = [o for o in client.offers(chain, end, parts=list(parts)) if o.end == end]
    client.save(f"save-{end}-{parts}", offers)


def test_every_boundary_is_told(client: Client) -> None:
    saved(client, 8, 16)
    kv, recurrent, conv = client.survey("s", path(client))
    assert kv == b"\1\1\1\1"
    assert recurrent == conv == b"\0\1\0\1"


def test_it_ends_where_the_first_block_is_missing(client: Client) -> None:
    saved(client, 4)
    store(client, 12, "kv", "recurrent", "conv")
    assert client.survey("s", path(client)) == [b"\1", b"\1", b"\1"]


def test_a_state_without_its_block_is_no_reason_to_go_on(client: Client) -> None:
    store(client, 4, "recurrent")
    assert client.survey("s", path(client)) == [b"", b"", b""]


def test_what_comes_before_the_path_is_not_asked_for(client: Client) -> None:
    """The engine has it, perhaps under a key that is not held here any more."""
    store(client, 12, "kv")
    store(client, 16, "kv", "recurrent", "conv")
    assert client.survey("s", path(client)[2:]) == [b"\1\1", b"\0\1", b"\0\1"]


def test_nothing_is_held(client: Client) -> None:
    assert client.survey("s", path(client)) == [b"", b"", b""]
    assert client.rig.count("misses", "unknown_prefix") == 1
    assert client.rig.gauge("leases") == 0
    assert client.rig.machine.wakeup() is None


def test_only_the_own_shard_counts(rig: Rig) -> None:
    """Another rank's state is of no use, and its lack no obstacle: each rank answers for itself."""
    first, second = (Client(rig, hybrid(2), ranks=2, rank=rank).attach() for rank in (0, 1))
    saved(first, 8)
    chain = list(first.chain(TOKENS[:END]).digests[1:])
    assert first.survey("s", chain) == [b"\1\1", b"\0\1", b"\0\1"]
    assert second.survey("s", chain) == [b"\1\1", b"\0\0", b"\0\0"]


def test_any_of_the_codecs_will_do(rig: Rig) -> None:
    plain = Client(rig, hybrid()).attach()
    saved(plain, 8)
    asked = plain.surveying("s", path(plain))
    other = msgspec.structs.replace(asked, call=rig.number(), codecs=("bf16",))
    assert rig.ask(other, cm.Surveyed).held == [b"", b"", b""]
    both = msgspec.structs.replace(asked, call=rig.number(), codecs=("bf16", "native"))
    assert rig.ask(both, cm.Surveyed).held == [b"\1\1", b"\0\1", b"\0\1"]


def test_coarse_blocks_count_where_they_end(rig: Rig) -> None:
    layout = Layout(
        (part("kv", Kind.KV, None, 2 * BLOCK), part("state", Kind.RECURRENT, 1, 0)), BLOCK
    )
    client = Client(rig, layout).attach()
    saved(client, 8)
    assert client.survey("s", path(client)) == [b"\0\1", b"\0\1"]
    store(client, 16, "state")
    assert client.survey("t", path(client)) == [b"\0\1\0", b"\0\1\0"]


# --- what is kept


def full_of_others(client: Client) -> None:
    """Push out all that nobody keeps."""
    for number in range(40):
        client.save(f"other-{number}", client.offers(client.chain([number + 100] * 8), 8))


def limited(pages: int = 24) -> tuple[Rig, Client]:
    rig = Rig(msgspec.structs.replace(small(pages), evicting=Evicting("lru")))
    return rig, Client(rig, hybrid()).attach()


def test_what_was_found_is_not_dropped_until_it_is_released() -> None:
    _, client = limited()
    saved(client, 8, 16)
    found = client.survey("s", path(client))
    full_of_others(client)
    assert client.survey("t", path(client)) == found
    client.release("s", "t")
    full_of_others(client)
    assert client.survey("u", path(client)) == [b"", b"", b""]


def test_a_hold_ends_by_itself() -> None:
    rig, client = limited()
    saved(client, 8, 16)
    client.survey("s", path(client), hold_s=5.0)
    client.survey("t", path(client)[:2], hold_s=2.0)
    assert rig.machine.wakeup() == rig.now + 2.0
    rig.wait(3.0)
    assert rig.machine.wakeup() == rig.now + 2.0
    full_of_others(client)
    assert client.survey("u", path(client), hold_s=0.0)[0] == b"\1\1\1\1"
    rig.wait(2.5)
    full_of_others(client)
    assert client.survey("v", path(client)) == [b"", b"", b""]


def test_no_hold_is_longer_than_a_lease_may_be() -> None:
    rig, client = limited()
    saved(client, 8)
    client.survey("s", path(client), hold_s=1e6)
    assert rig.machine.wakeup() == rig.now + rig.limits.lease_s_max


def test_a_request_holds_what_it_surveyed_last() -> None:
    _, client = limited()
    saved(client, 16)
    other = list(client.chain([7] * 8).digests[1:])
    client.save("o", client.offers(client.chain([7] * 8), 8))
    client.survey("s", path(client))
    client.survey("s", other)
    full_of_others(client)
    assert client.survey("t", path(client))[0] == b""
    assert client.survey("u", other)[0] == b"\1\1"


def test_the_end_of_a_session_ends_its_holds() -> None:
    """At once, also when its process may live: nobody reads because of a survey."""
    rig, client = limited()
    other = Client(rig, hybrid()).attach()
    saved(client, 4, 16)
    client.survey("s", path(client))
    client.survey("t", path(client)[:1])
    other.survey("s", path(client)[:1])
    client.close(acknowledged=False)
    full_of_others(other)
    assert other.survey("u", path(other)) == [b"\1", b"\1", b"\1"]


@pytest.mark.parametrize(
    "bound", [{"surveys_max": 1}, {"surveyed_objects_max": 6}], ids=["surveys", "objects"]
)
def test_holds_have_a_limit(bound: dict[str, int]) -> None:
    """The oldest one gives way."""
    rig = Rig(msgspec.structs.replace(small(24), evicting=Evicting("lru"), **bound))
    client = Client(rig, hybrid()).attach()
    saved(client, 16)
    other = client.chain([7] * 8)
    client.save("o", client.offers(other, 8))
    client.survey("s", path(client))
    client.survey("t", list(other.digests[1:]))
    full_of_others(client)
    assert client.survey("u", path(client))[0] == b""


def test_windows_are_kept_as_far_as_they_reach() -> None:
    layout = Layout((part("sliding", Kind.KV, 2, BLOCK),), BLOCK)
    rig = Rig(small(24))
    client = Client(rig, layout).attach()
    for end in (4, 12, 16):  # A hole at 8: what needs only the last two blocks does not mind.
        store(client, end, "sliding")
    assert client.survey("s", path(client)) == [b"\1\0\1\1"]
    assert rig.count("hit_tokens", "host") == END
    full_of_others(client)
    assert client.survey("t", path(client))[0][-2:] == b"\1\1"


# --- NVMe


def disk_limits() -> Limits:
    return msgspec.structs.replace(small(24, 64), eager=True)


def test_what_is_on_disk_is_told_and_sent_for() -> None:
    rig = Rig(disk_limits())
    client = Client(rig, hybrid()).attach()
    on_disk(client, 8, 16)
    assert client.survey("s", path(client)) == [b"\1\1\1\1", b"\0\1\0\1", b"\0\1\0\1"]
    assert rig.count("lookups", "hit_nvme") == 1
    (fill,) = rig.take(cm.Fill)
    assert {record.end for record, _, _ in fill.objects} == {4, 8, 12, 16}
    kinds = {(record.key.part, record.end) for record, _, _ in fill.objects}
    assert ("recurrent", 16) in kinds
    assert ("recurrent", 8) not in kinds


def test_what_is_in_memory_is_preferred_and_counted_so() -> None:
    rig = Rig(disk_limits())
    client = Client(rig, hybrid()).attach()
    saved(client, 16)
    rig.run()
    client.survey("s", path(client))
    assert rig.count("lookups", "hit_host") == 1
    assert rig.count("hit_tokens", "host") == END
    assert rig.take(cm.Fill) == []
    client.release("s")
    assert evict(rig).objects == 6
    assert client.survey("t", path(client))[0] == b"\1\1\1\1"


def test_of_two_codecs_the_one_in_memory_is_sent_for() -> None:
    """At 8 the state is on disk natively and in memory as bf16; at 16 it is on disk only."""
    rig = Rig(disk_limits())
    client = Client(rig, hybrid()).attach()
    on_disk(client, 8, 16)
    chain = client.chain(TOKENS)
    client.save("other", [client.offer(chain, 1, 8, "bf16")])
    client.codecs = ("native", "bf16")
    assert client.survey("s", path(client)[:2])[1] == b"\0\1"
    (fill,) = rig.take(cm.Fill)
    assert "recurrent" not in {record.key.part for record, _, _ in fill.objects}
    client.survey("t", path(client))
    (fill,) = rig.take(cm.Fill)
    found = {(record.key.part, record.key.codec, record.end) for record, _, _ in fill.objects}
    assert ("recurrent", "native", 16) in found


def test_a_survey_is_a_sight_once() -> None:
    """The first does not write to NVMe, and neither does its retry; the second does."""
    rig = Rig(small(24, 64))
    client = Client(rig, hybrid()).attach()
    client.survey("one", path(client))
    client.save("one", client.offers(client.chain(TOKENS), END))
    client.survey("one", path(client))
    rig.run()
    assert rig.gauge("objects", "nvme") == 0
    client.survey("two", path(client))
    rig.run()
    assert rig.gauge("objects", "nvme") > 0


# --- what cannot be


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"digests": []}, "digests"),
        ({"digests": [b"d" * 32] * 9}, "digests"),
        ({"codecs": ()}, "codecs"),
        ({"request": ""}, "request"),
    ],
    ids=["none", "many", "codecs", "name"],
)
def test_what_cannot_be_meant_is_refused(change: dict[str, object], text: str) -> None:
    rig = Rig(msgspec.structs.replace(small(), batch_max=8))
    client = Client(rig, hybrid()).attach()
    asked = msgspec.structs.replace(client.surveying("s", path(client)), **change)
    refused = rig.ask(asked, cm.Refused)
    assert (refused.kind, text in refused.text) == ("invalid", True)


def test_whoever_is_not_attached_is_refused(rig: Rig) -> None:
    asked = ev.SurveyAsked(ADMIN, 1, "s", "", "", [b"d" * 32], ("native",), rig.now + 1)
    assert rig.ask(asked, cm.Refused).kind == "refused"


# --- what the engine has itself


def test_what_the_engine_had_itself_was_of_use() -> None:
    """A prefix that only ever hits in the engine's own memory earns its place on NVMe all the same."""
    rig = Rig(small(nvme_pages=64))
    client = Client(rig, hybrid()).attach()
    saved(client, 8)
    assert stored(rig) == 0
    asked = client.surveying("second", path(client)[2:])
    before = [*path(client)[:2], bytes(32)]
    rig.ask(msgspec.structs.replace(asked, before=before), cm.Surveyed)
    assert stored(rig) == 4
    counts = rig.machine.counters["lost_tokens"]
    assert (counts["not_held"], counts["unseen"]) == (0, 8), "of the path itself"


def test_a_path_that_was_seen_was_seen_whatever_came_before() -> None:
    client = Client(Rig(small()), hybrid()).attach()
    for request, unseen in (("first", 8), ("second", 8)):
        asked = client.surveying(request, path(client)[2:])
        client.rig.ask(msgspec.structs.replace(asked, before=path(client)[:2]), cm.Surveyed)
        assert client.rig.machine.counters["lost_tokens"]["unseen"] == unseen
    assert client.rig.machine.counters["lost_tokens"]["not_held"] == 8


def test_a_request_that_asks_again_is_one_sight() -> None:
    rig = Rig(small(nvme_pages=64))
    client = Client(rig, hybrid()).attach()
    for _ in range(3):
        asked = client.surveying("one", path(client)[2:])
        rig.ask(msgspec.structs.replace(asked, before=path(client)[:2]), cm.Surveyed)
    client.save("one", client.offers(client.chain(TOKENS), 8))
    assert stored(rig) == 0


def stored(rig: Rig) -> int:
    return sum(len(store.objects) for store in rig.take(cm.Store))


def test_no_more_may_come_before_than_a_path_may_have() -> None:
    rig = Rig(msgspec.structs.replace(small(), batch_max=4))
    client = Client(rig, hybrid()).attach()
    asked = client.surveying("s", path(client))
    rig.ask(msgspec.structs.replace(asked, before=path(client)), cm.Surveyed)
    asked = client.surveying("s", path(client))
    rig.ask(msgspec.structs.replace(asked, before=[bytes(32)] * 5), cm.Refused)
