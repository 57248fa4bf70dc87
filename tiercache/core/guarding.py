"""Pins and shares as clients and operators ask for them, and what ends by itself."""

from collections.abc import Iterable
from itertools import islice

from tiercache.core.books import Books, Session
from tiercache.core.catalog import Item, Shelf, Status
from tiercache.core.commands import Pinned, PinRow, PinRows, Refused, ReplyBody, ShareRow, ShareRows
from tiercache.core.filling import Filling
from tiercache.core.guard_events import (
    Event,
    KeysPinAsked,
    PinAsked,
    PinsAsked,
    SharesAsked,
    SharesTold,
    UnpinAsked,
)
from tiercache.core.operation import Selector
from tiercache.core.pins import Pin
from tiercache.core.tenants import TIERS, Share, Tenant
from tiercache.core.writeback import WriteBack
from tiercache.state import Part
from tiercache.state.canonical import DIGEST_BYTES


class Guarding:
    """Answers `PinAsked`, `KeysPinAsked`, `UnpinAsked`, `PinsAsked` and `SharesAsked`; ends what is due;
    keeps to what the cluster says (`SharesTold`)."""

    def __init__(self, books: Books, writeback: WriteBack, filling: Filling) -> None:
        self._books = books
        self._writeback = writeback
        self._filling = filling

    def begin(self, now: float) -> None:
        """Time has come this far: end what is due, before anything else can see it."""
        protection = self._books.protection
        protection.now = max(protection.now, now)
        for pin in protection.pins.take_due(protection.now):
            self._end(pin, "expired")
        expired = protection.expiry.take_due(protection.now)
        for item in expired:
            self._books.counters.add("expired")
            self._books.discard(item)
        if expired:
            self._writeback.sweep()

    def close(self, session: Session) -> None:
        """The session is over, and so is what it pinned."""
        for pin in self._books.protection.pins.of_session(session.number):
            self._end(pin, "session")

    def take(self, event: Event) -> None:
        """Answer; what the cluster says has no answer."""
        match event:
            case PinAsked():
                answer: ReplyBody = self._pin(event)
            case KeysPinAsked():
                answer = self._pin_keys(event)
            case UnpinAsked():
                answer = self._unpin(event)
            case PinsAsked():
                answer = self._pins()
            case SharesAsked():
                answer = self._shares(event)
            case SharesTold():
                self._agree(event)
                return
        self._books.reply(event.session, event.call, answer)

    # --- pins

    def _pin(self, asked: PinAsked) -> ReplyBody:
        books = self._books
        session = books.sessions.get(asked.session)
        if session is None:
            return Refused("refused", "attach first")
        problem = self._why_invalid(session, asked)
        if problem:
            return Refused("invalid", problem)
        shelf = books.shelf_of(session, asked.lora, asked.salt)
        if shelf is None:
            return Refused("refused", "too many namespaces")
        items = _resting_on(shelf, session.layout.parts, asked)
        if items is None:
            return self._count(Pinned("incomplete"))
        return self._begin(session.writer, session.number, items, asked.age_s)

    def _why_invalid(self, session: Session, asked: PinAsked) -> str:
        limits, step = self._books.limits, session.layout.block_tokens
        if any(len(name.encode()) > limits.name_bytes_max for name in (asked.lora, asked.salt)):
            return f"a name has at most {limits.name_bytes_max} bytes"
        if asked.tokens < 1 or len(asked.digests) != asked.tokens // step:
            return f"{len(asked.digests)} digests do not chain {asked.tokens} tokens by {step}"
        if len(asked.digests) > limits.batch_max:
            return f"more than {limits.batch_max} digests"
        if len(asked.tail) != (DIGEST_BYTES if asked.tokens % step else 0):
            return "a boundary inside a block has a digest of its own, and no other has"
        return ""

    def _pin_keys(self, asked: KeysPinAsked) -> ReplyBody:
        if len(asked.owner.encode()) > self._books.limits.name_bytes_max:
            return Refused("invalid", "the owner's name is too long")
        if not asked.prefix:
            return Refused("invalid", "name a key, or the start of one")
        selector = Selector(asked.prefix)
        items = [
            item
            for item in self._books.catalog
            # Nobody can use what belongs to a namespace without a name.
            if item.status is Status.SEALED
            and item.entry.shelf.tenant is not None
            and selector.matches(item)
        ]
        return self._begin(asked.owner, None, items, asked.age_s)

    def _begin(self, owner: str, session: int | None, items: list[Item], age_s: float) -> Pinned:
        books = self._books
        protection = books.protection
        if not 0 < age_s <= protection.terms.pin_s_max:
            return self._count(Pinned("invalid", age_s=protection.terms.pin_s_max))
        problem = protection.pins.why_not(session, items)
        if problem:
            return self._count(Pinned(problem))
        pin = protection.pins.begin(owner, session, items, protection.now + age_s)
        for item in items:
            if item.idle:
                books.withdraw(item)
        self._filling.start([item for item in items if item.host is None])
        return self._count(Pinned("pinned", pin.number, len(items), self._bytes(pin), age_s))

    def _count(self, answer: Pinned) -> Pinned:
        self._books.counters.add("pins", answer.outcome)
        return answer

    def _bytes(self, pin: Pin) -> int:
        return sum(map(self._books.protection.pins.space_of, pin.items))

    def _unpin(self, asked: UnpinAsked) -> Pinned:
        pins = self._books.protection.pins
        session = asked.session if asked.session in self._books.sessions else None
        if asked.number:
            found = [pin] if (pin := pins.find(asked.number)) is not None else []
            ours = [pin for pin in found if session is None or pin.session == session]
        elif session is None:
            ours = [pin for pin in pins if pin.session is None and pin.owner == asked.owner]
        else:
            ours = []
        objects = sum(len(pin.items) for pin in ours)
        nbytes = sum(map(self._bytes, ours))
        for pin in ours:
            self._end(pin, "unpinned")
        number = ours[0].number if ours else 0
        return Pinned("unpinned" if ours else "nothing", number, objects, nbytes)

    def _end(self, pin: Pin, why: str) -> None:
        books = self._books
        books.counters.add("pins_ended", why)
        books.unpin(books.protection.pins.end(pin))

    def _pins(self) -> PinRows:
        protection = self._books.protection
        rows = [
            PinRow(
                number=pin.number,
                owner=pin.owner,
                session=pin.session or 0,
                objects=len(pin.items),
                nbytes=self._bytes(pin),
                left_s=pin.until - protection.now,
            )
            for pin in islice(protection.pins, self._books.limits.list_rows_max)
        ]
        return PinRows(rows, len(protection.pins), protection.pins.bytes, protection.pins.bytes_max)

    # --- shares

    def _shares(self, asked: SharesAsked) -> ReplyBody:
        tenants = self._books.protection.tenants
        if asked.host is not None or asked.nvme is not None:
            problem = self._set_share(asked)
            if problem:
                return Refused("invalid", problem)
        known = {tenant.name: tenant for tenant in tenants}
        names = sorted({*known, *tenants.named()})
        rows = [
            self._row(known.get(name) or Tenant(name, tenants.share_of(name), self._capacity))
            for name in names
            if asked.tenant in {"", name}
        ]
        return ShareRows(tenants.default.host, tenants.default.nvme, rows)

    @property
    def _capacity(self) -> dict[str, int]:
        return self._books.protection.capacity

    def _row(self, tenant: Tenant) -> ShareRow:
        allowed = {tier: tenant.allowed(tier) for tier in TIERS}
        share = tenant.share
        taken, outcomes = dict(tenant.taken), dict(tenant.outcomes)
        common = any(x is not None for x in self._books.protection.tenants.common_of(tenant.name))
        return ShareRow(tenant.name, share.host, share.nvme, allowed, taken, outcomes, common)

    def _set_share(self, asked: SharesAsked) -> str:
        books = self._books
        tenants, limits = books.protection.tenants, books.limits
        name, before = asked.tenant, tenants.own_of(asked.tenant)
        share = Share(
            before.host if asked.host is None else asked.host,
            before.nvme if asked.nvme is None else asked.nvme,
        )
        if not name or len(name.encode()) > limits.name_bytes_max:
            return f"a tenant's name has 1..{limits.name_bytes_max} bytes"
        if problem := share.why_not():
            return problem
        both = zip((asked.host, asked.nvme), tenants.common_of(name), strict=True)
        if any(own is not None and common is not None for own, common in both):
            return f"the cluster says what {name} may take: quota set --cluster, or quota unset"
        if name not in tenants.own() and len(tenants.own()) >= limits.protecting.shares_max:
            return f"{limits.protecting.shares_max} tenants have shares already"
        tenants.keep(name, share)
        self._apply(name)
        return ""

    def _agree(self, event: SharesTold) -> None:
        """What makes no sense is left out, and what is too much: the same on every node."""
        limits, tenants = self._books.limits, self._books.protection.tenants
        sound = {
            name: (host, nvme)
            for name, (host, nvme) in sorted(event.shares.items())
            if 0 < len(name.encode()) <= limits.name_bytes_max
            and not Share(host or 0.0, nvme or 0.0).why_not()
        }
        for name in sorted(
            tenants.agree(dict(islice(sound.items(), limits.protecting.shares_max)))
        ):
            self._apply(name)

    def _apply(self, name: str) -> None:
        books = self._books
        tenants = books.protection.tenants
        tenant, share = tenants.find(name), tenants.share_of(name)
        if tenant is None or tenant.share == share:
            return
        books.eviction.move(tenant, lambda: setattr(tenant, "share", share))
        if not tenant.is_limited:
            books.protection.shelters.pop(tenant, None)
            books.passage.left(tenant)


def _resting_on(shelf: Shelf, parts: Iterable[Part], asked: PinAsked) -> list[Item] | None:
    """Return every object that a boundary rests on, of whatever shard and codec; None when there is a
    part of which nothing is held at some place."""
    step = shelf.layout.block_tokens if shelf.layout is not None else 1
    found: dict[Item, None] = {}
    for part in parts:
        block = part.block_tokens
        if part.is_snapshot:
            ends = [asked.tokens]
        else:
            whole = asked.tokens // block
            first = 0 if part.window is None else max(0, whole - part.window)
            ends = [number * block for number in range(first + 1, whole + 1)]
            if asked.tokens % block:
                ends.append(asked.tokens)
        for end in ends:
            digest = asked.tail if end % step else asked.digests[end // step - 1]
            entry = shelf.entries.get(digest)
            items = [] if entry is None else entry.items.values()
            here = [i for i in items if i.slot.part == part.name and i.status is Status.SEALED]
            if not here:
                return None
            found.update(dict.fromkeys(here))
    return list(found)
