"""Whether the books add up. Walks everything: for tests, simulation and debugging."""

from collections import Counter

from tiercache.core.books import Books
from tiercache.core.catalog import Item, Status, Told
from tiercache.core.tenants import TIERS, Tenant
from tiercache.state import Extent


def audit(books: Books, in_jobs: Counter[Item], in_segments: Counter[int]) -> None:
    """Raise AssertionError, saying what is wrong, if the books of a node do not add up.

    `in_jobs` counts how many running jobs use each item, `in_segments` how many extents of each segment
    of the log.
    """
    items = list(books.catalog) + list(books.doomed)
    _audit_space(books, items)
    _audit_users(books, items, in_jobs)
    _audit_leases(books)
    _audit_masks(books)
    _audit_log(books, in_segments)
    _audit_protection(books, items)
    _audit_shares(books)
    _audit_told(books)


def _audit_space(books: Books, items: list[Item]) -> None:
    """Every byte of the arena is free or taken by exactly one item."""
    taken = [e for item in items for e in (item.host, item.target) if e is not None]
    runs = sorted([*taken, *books.space.free_runs()])
    end = Extent(0, 0, 0)
    total = 0
    for run in runs:
        same = run.segment == end.segment
        assert run.offset >= (end.offset + end.size if same else 0), f"{run} overlaps {end}"
        total += run.size
        end = run
    assert total == books.space.capacity, f"{total} of {books.space.capacity} bytes accounted for"
    free = sum(run.size for run in books.space.free_runs())
    assert free == books.space.free_bytes, "free bytes"


def _audit_users(books: Books, items: list[Item], in_jobs: Counter[Item]) -> None:
    """An item's users are its leases, its reservation and its jobs; only unused ones can be dropped."""
    users = Counter(in_jobs)
    for _, lease in books.leases.all():
        users.update(list(lease.items))
    for session in [*books.sessions.values(), *books.abandoned.values()]:
        users.update(session.reserved.values())
    for item in items:
        assert item.users == users[item], f"{item.key}: {item.users} users, {users[item]} known"
        droppable = item.status is Status.SEALED and item.host is not None and item.users == 0
        pinned = item in books.protection.pins
        assert item.idle == (item in books.eviction), f"{item.key}: in the order of eviction or not"
        assert not (pinned and item.idle), f"{item.key} is pinned, and may be dropped"
        assert not droppable or pinned or item in books.eviction, f"{item.key} can never be dropped"
        kept = item.host is not None and item.status is Status.SEALED
        assert kept or item not in books.eviction, f"{item.key}: nothing there to drop"
        assert item.nbytes > 0
        in_the_making = item.status in {Status.WRITING, Status.SEALING}
        assert item.target is not None or not in_the_making, f"{item.key} has no room"
    assert len(books.eviction) == sum(item in books.eviction for item in items), "stray victims"
    assert set(users) <= set(items), "a user of an item that is gone"
    books.passage.check()


def _audit_leases(books: Books) -> None:
    """Every lease has an owner, holds something, and is counted."""
    held: Counter[int] = Counter()
    for number, lease in books.leases.all():
        assert lease.items, "an empty lease"
        held[number] += len(lease.items)
    assert held.keys() <= books.sessions.keys() | books.abandoned.keys(), "a lease without an owner"
    assert held.total() == books.leases.count, "lease count"
    assert all(books.leases.held(number) == count for number, count in held.items())
    for session in [*books.sessions.values(), *books.abandoned.values()]:
        assert session.reserved.keys() == session.reserved_at.keys()


def _audit_masks(books: Books) -> None:
    """Masks, sums and lists say what the items say."""
    for shelf in books.catalog.shelves.values():
        objects = 0
        sums = {"host": 0, "nvme": 0}
        counts = {"host": 0, "nvme": 0}
        for digest, entry in shelf.entries.items():
            assert entry.digest == digest
            assert entry.items or entry.tails, "an empty entry stayed"
            masks = {"host": 0, "nvme": 0}
            coming = 0
            for bit, item in entry.items.items():
                assert item.slot.bit == bit
                assert books.catalog.items[item.id] is item
                objects += 1
                for tier, extent in (("host", item.host), ("nvme", item.nvme)):
                    if item.status is Status.SEALED and extent is not None:
                        masks[tier] |= 1 << bit
                        sums[tier] += item.nbytes
                        counts[tier] += 1
                if item.status is Status.SEALED:
                    assert item.host or item.nvme or item.target, f"{item.key} is nowhere"
                    if not (item.host or item.nvme):
                        coming |= 1 << bit
            assert entry.host == masks["host"], "host mask"
            assert entry.nvme == masks["nvme"], "nvme mask"
            assert entry.coming == coming, "mask of what is on its way"
            assert entry.held == entry.host | entry.nvme | entry.coming, "held mask"
            assert len(entry.tails) <= books.limits.tails_max, "too many tails"
            for tail in entry.tails:
                assert shelf.entries[tail.digest].base == digest, "a tail that is not there"
        assert objects == shelf.objects, "object count"
        assert sums == shelf.bytes, f"bytes {shelf.bytes}, really {sums}"
        assert counts == shelf.held, f"held {shelf.held}, really {counts}"


def _audit_log(books: Books, jobs: Counter[int]) -> None:
    """Each segment knows what lives in it, and its objects lie side by side."""
    log = books.log
    assert sum(segment.size for segment in log.segments.values()) == log.segments_bytes
    in_segments = {item for segment in log.segments.values() for item in segment.items}
    on_nvme = {item for item in books.catalog if item.nvme is not None}
    assert in_segments == on_nvme, "the log and the catalog disagree"
    for segment in log.segments.values():
        end = 0
        for extent in sorted(item.nvme for item in segment.items if item.nvme is not None):
            assert extent.segment == segment.number
            assert extent.offset >= end, f"{extent} overlaps"
            end = extent.offset + extent.size
        assert end <= segment.size, f"segment {segment.number} overflows"
        assert segment.jobs == jobs[segment.number], f"jobs in segment {segment.number}"
    assert jobs.keys() <= log.segments.keys(), "a job in a segment that is gone"


def _audit_protection(books: Books, items: list[Item]) -> None:
    """Pins stay within their budget, ends are known of what is there, and tenants take what they hold."""
    protection = books.protection
    protection.pins.check()
    protection.expiry.check(protection.now)
    held = set(books.catalog)
    assert {item for pin in protection.pins for item in pin.items} <= held, "a pin of what is gone"
    assert all(item in held for item in protection.expiry), "an end of what is gone"
    owners = {pin.session for pin in protection.pins} - {None}
    assert owners <= books.sessions.keys(), "a pin of a session that has ended"
    taken: Counter[tuple[Tenant | None, str]] = Counter()
    for item in items:
        tenant = item.entry.shelf.tenant
        for extent in (item.host, item.target):
            taken[tenant, "host"] += extent.size if extent is not None else 0
        taken[tenant, "nvme"] += item.nvme.size if item.nvme is not None else 0
    assert not taken[None, "host"], "memory is taken by nobody"
    tenants = {shelf.tenant for shelf in books.catalog.shelves.values()} | set(protection.tenants)
    for tenant in tenants - {None}:
        assert tenant is not None
        for tier in TIERS:
            assert tenant.taken[tier] == taken[tenant, tier], f"what {tenant.name} takes of {tier}"
    for tenant in protection.tenants:
        shelves = [s for s in books.catalog.shelves.values() if s.tenant is tenant]
        assert tenant.shelves == len(shelves), f"namespaces of {tenant.name}"
    for shelter in protection.shelters.values():
        shelter.check()


def _audit_shares(books: Books) -> None:
    """Each tenant has the share that was said last, and who has one has an order of its own."""
    protection, segments = books.protection, list(books.log.segments.values())
    limited = {tenant for tenant in protection.tenants if tenant.is_limited}
    assert books.eviction.tenants() == limited, "an order for each share"
    assert protection.shelters.keys() - {None} == limited, "a shelter for each share"
    followed = limited if books.passage.standing is not None else set()
    assert books.passage.tenants() == followed, "requests are told to an order of nobody"
    for tenant in protection.tenants:
        assert tenant.share == protection.tenants.share_of(tenant.name), f"{tenant.name}'s share"
        own = sum(segment.size for segment in segments if segment.owner is tenant)
        assert own == tenant.segments_bytes, f"segments of {tenant.name}"
    assert {segment.owner for segment in segments} <= {None, *protection.tenants}, "whose segments?"


def _audit_told(books: Books) -> None:
    """Others were told of every boundary what is the case, as far as there was room."""
    own = books.catalog.own
    for shelf in books.catalog.shelves.values():
        for entry in shelf.entries.values():
            due = entry.due() if own is not None else Told.NOTHING
            assert entry.told is due, f"{entry.digest.hex()[:12]}: told {entry.told}, not {due}"
