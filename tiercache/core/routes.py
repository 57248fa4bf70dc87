"""The routes of the requests under way, and which sessions take part in each."""

from collections import OrderedDict

from tiercache.core.advising import Advising
from tiercache.core.books import Books, Session
from tiercache.core.catalog import Shelf
from tiercache.core.losses import abort, settle
from tiercache.core.route import Route
from tiercache.core.sights import Request


class Routes:
    """At most `plans_max` routes. One ends with the last session that takes part in its request, or to
    make room for another; then it is counted what became of it."""

    def __init__(self, books: Books, advising: Advising) -> None:
        self._books = books
        self._advising = advising
        self._routes: OrderedDict[Request, Route] = OrderedDict()
        self._asked: dict[int, dict[str, set[Request]]] = {}  # Session -> its name -> routes.

    def find(self, session: Session, shelf: Shelf, request: str) -> Route | None:
        """Return the route of a request; None when it was not planned, or is over."""
        return self._routes.get(session.scoped(shelf, request))

    def open(self, session: Session, shelf: Shelf, request: str) -> Route:
        """Return the route of a request; a new one when there is none."""
        name = session.scoped(shelf, request)
        route = self._routes.get(name)
        if route is not None and route.shelf is not shelf:
            self._end(name)  # The namespace was empty, and made room for others meanwhile.
            route = None
        if route is None:
            if len(self._routes) >= self._books.limits.plans_max:
                self._end(next(iter(self._routes)))
            assert shelf.layout is not None
            route = self._routes[name] = Route(shelf, shelf.layout)
        return route

    def join(self, session: Session, shelf: Shelf, request: str, route: Route) -> None:
        """The session takes part in a request, until it releases it or ends."""
        route.sessions.add(session.number)
        names = self._asked.setdefault(session.number, {}).setdefault(request, set())
        names.add(session.scoped(shelf, request))

    def release(self, session: Session, request: str) -> None:
        """The session is done with a request; the last one ends it."""
        asked = self._asked.get(session.number, {})
        for name in asked.pop(request, ()):
            self._leave(session, name)

    def close(self, session: Session) -> None:
        """The session is gone, and takes part in nothing any more."""
        for names in self._asked.pop(session.number, {}).values():
            for name in names:
                self._leave(session, name)

    def forget(self, shelf: Shelf) -> None:
        """A namespace is cleared: what was planned in it is void."""
        for name, route in list(self._routes.items()):
            if route.shelf is shelf:
                self._end(name)

    def _leave(self, session: Session, name: Request) -> None:
        route = self._routes[name]
        route.sessions.remove(session.number)
        if not route.sessions:
            self._end(name)

    def _end(self, name: Request) -> None:
        route = self._routes.pop(name)
        for number in route.sessions:
            asked = self._asked[number]
            asked[name[2]].discard(name)
            if not asked[name[2]]:
                del asked[name[2]]
        abort(self._books.counters, route)
        settle(self._books.counters, route)
        self._advising.release(name)

    def check(self) -> None:
        """Raise AssertionError if routes and the sessions that take part in them disagree."""
        asked = {
            (number, name)
            for number, requests in self._asked.items()
            for request, names in requests.items()
            for name in names
            if name[2] == request
        }
        routes = {(n, name) for name, route in self._routes.items() for n in route.sessions}
        assert asked == routes, "who asked for what"
        assert {number for number, _ in asked} <= self._books.sessions.keys()
