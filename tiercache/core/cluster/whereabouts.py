"""Where a prompt could be resumed, and what that would take: for whoever chooses a node."""

from tiercache.core.books import Books, Session
from tiercache.core.catalog import Item, Shelf
from tiercache.core.cluster.commands import Place, Places
from tiercache.core.cluster.events import WhereAsked
from tiercache.core.cluster.peers import Peer, Peers
from tiercache.core.cluster.walking import Asker, Sought, route_of
from tiercache.core.commands import Refused
from tiercache.core.route import Route
from tiercache.core.worth import prefix_bytes, recompute_s
from tiercache.state import Layout
from tiercache.state.canonical import DIGEST_BYTES

UNKNOWN = -1
BLOCK_TOKENS_MAX = 1 << 20
BYTES_MAX = 1 << 62
"""Larger is said as this: layouts come from clients, and may be absurd."""


class Whereabouts:
    """Answers `WhereAsked`. It reads the books and leaves no trace in them.

    Another node is not asked: it has told what it could resume, and that may be out of date.
    """

    def __init__(self, books: Books, peers: Peers) -> None:
        self._books = books
        self._peers = peers

    def answer(self, asked: WhereAsked, now: float) -> None:
        """Answer at once."""
        books = self._books
        session = None if asked.namespace else books.sessions.get(asked.session)
        if session is None and not asked.namespace:
            refused = Refused("refused", "attach first, or name a namespace")
            books.reply(asked.session, asked.call, refused)
            return
        digest = asked.namespace if session is None else _own(session, asked)
        shelf = books.catalog.shelves.get(digest)
        layout = session.layout if session is not None else None
        if layout is None and shelf is not None:
            layout = shelf.layout
        step = asked.block_tokens or (layout.block_tokens if layout is not None else 0)
        if problem := self._why_invalid(asked, layout, step):
            books.reply(asked.session, asked.call, Refused("invalid", problem))
            return
        if books.is_isolated(now):
            places = Places([Place("", 0)], "isolated", step)
            books.reply(asked.session, asked.call, places)
            return
        asker = Asker(session.ranks if session is not None else 1)
        limit = min(asked.limit, len(asked.digests) * step)
        route = None
        if shelf is not None and shelf.layout is not None:
            prompt = Sought("where", asked.digests, limit, asker.ranks, asked.codecs, asked.reshard)
            route = route_of(shelf, shelf.layout, prompt)
        here = self._here(route, asker) if route is not None else Place("", 0)
        reason = "" if here.boundary else _why_not(route, asker)
        whole = route.whole(asker) if route is not None else 0
        there = [
            self._there(peer, count * step, (shelf, layout, whole, here), now)
            for peer, count in self._peers.depths(digest, asked.digests[: limit // step])
        ]
        there.sort(key=lambda place: (-place.boundary, place.node))
        most = books.limits.clustering.places_max
        books.reply(asked.session, asked.call, Places([here, *there[:most]], reason, step))

    def _why_invalid(self, asked: WhereAsked, layout: Layout | None, step: int) -> str:
        limits = self._books.limits
        if asked.namespace and len(asked.namespace) != DIGEST_BYTES:
            return f"a namespace's digest has {DIGEST_BYTES} bytes"
        if step < 1:
            return "how many tokens a block has is not known here: say it"
        if step > BLOCK_TOKENS_MAX:
            return f"blocks of {step} tokens; {BLOCK_TOKENS_MAX} at most"
        if layout is not None and layout.block_tokens != step:
            return f"blocks of {step} tokens; here a block has {layout.block_tokens}"
        if len(asked.digests) > limits.batch_max:
            return f"{len(asked.digests)} blocks; {limits.batch_max} at most"
        if asked.limit < 0:
            return "a limit below 0"
        if not 0 < len(asked.codecs) <= limits.codecs_max:
            return f"{len(asked.codecs)} codecs; 1 to {limits.codecs_max}"
        return ""

    def _here(self, route: Route, asker: Asker) -> Place:
        position = route.deepest(asker, in_host=False)
        if position < 0:
            return Place("", 0)
        items = route.chosen(asker, position, all_ranks=True)
        absent = [item for item in items if item.host is None]
        tier = "host"
        if absent:
            tier = "nvme" if all(item.nvme is not None for item in absent) else "coming"
        boundary = route.positions[position]
        return Place(
            "",
            boundary,
            tier,
            sum(item.nbytes for item in items),
            sum(item.nbytes for item in absent),
            self._seconds(tier, absent),
            _compute_s(route.shelf, boundary),
        )

    def _seconds(self, tier: str, absent: list[Item]) -> float:
        if not absent:
            return 0.0
        pace = self._books.nvme_pace
        if tier != "nvme" or not pace.is_known:
            return UNKNOWN
        return pace.seconds(sum(item.nbytes for item in absent if item.target is None))

    def _there(
        self,
        peer: Peer,
        boundary: int,
        own: tuple[Shelf | None, Layout | None, int, Place],
        now: float,
    ) -> Place:
        """`own`: the shelf and layout here, how many tokens are held here without a gap, and what could
        be resumed here."""
        shelf, layout, whole, here = own
        nbytes = absent = UNKNOWN
        if layout is not None:
            total = prefix_bytes(layout, boundary)
            held = sum(
                part.nbytes(min(whole, boundary), part.whole)
                for part in layout.parts
                if part.window is None
            )
            nbytes, absent = min(total, BYTES_MAX), min(total - held, BYTES_MAX)
            if boundary == here.boundary:
                absent = here.absent_bytes
        known = absent > 0 and peer.pace.is_known
        return Place(
            peer.name,
            boundary,
            "pool" if peer is self._peers.pool else "peer",
            nbytes,
            absent,
            peer.pace.seconds(absent) if known else 0.0 if absent == 0 else UNKNOWN,
            _compute_s(shelf, boundary) if shelf is not None else UNKNOWN,
            peer.breaker.health(now),
        )


def _own(session: Session, asked: WhereAsked) -> bytes:
    """Return the namespace that a session's question is about; it is not opened for it."""
    known = session.narrowed.get((asked.lora, asked.salt))
    if known is not None:
        return known.digest
    namespace = session.namespace
    return namespace.narrow(
        lora=asked.lora or namespace.lora, salt=asked.salt or namespace.salt
    ).digest


def _why_not(route: Route | None, asker: Asker) -> str:
    if route is None or not route.entries:
        return "unknown_prefix"
    return "beyond_limit" if route.resumable_after(asker, 0) else route.lacks(asker, 0)


def _compute_s(shelf: Shelf, tokens: int) -> float:
    return recompute_s(shelf, tokens) if shelf.prefill_tokens_per_s > 0 else UNKNOWN
