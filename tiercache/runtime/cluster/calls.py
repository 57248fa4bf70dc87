"""What the machine is asked on behalf of other nodes, and by the node itself."""

from collections.abc import Callable

from tiercache.core import commands, events

PEERS = -(1 << 40)
"""Sessions from here down are of other nodes, or of this node's own dealings with them: no client's
and no operator's."""

NAMES_MAX = 65_536
"""Names under which others may come in one start of a node: where nothing proves them, they are free."""


class Calls:
    """Questions to the machine by session and call; `take` gives it an event."""

    def __init__(self, take: Callable[[events.Event], None], names_max: int = NAMES_MAX) -> None:
        self._take = take
        self._names_max = names_max
        self._waiting: dict[int, dict[int, Callable[[commands.ReplyBody], None]]] = {}
        self._numbers = 0
        self._sessions: dict[str, int] = {}

    def knows(self, name: str) -> bool:
        """Return whether a node may ask: it has before, or there are not too many yet."""
        return name in self._sessions or len(self._sessions) < self._names_max

    def session(self, name: str) -> int:
        """Return the number that stands for a node, the same for ever."""
        return self._sessions.setdefault(name, PEERS - len(self._sessions))

    def number(self) -> int:
        """Return a call number that was never used."""
        self._numbers += 1
        return self._numbers

    def ask(
        self,
        event: events.Event,
        name: tuple[int, int],
        done: Callable[[commands.ReplyBody], None],
    ) -> None:
        """Ask; `done` gets the answer, now or later. `name`: the session and call of `event`."""
        session, call = name
        self._waiting.setdefault(session, {})[call] = done
        self._take(event)

    def tell(self, event: events.Event) -> None:
        """Say something that is not answered."""
        self._take(event)

    def answered(self, reply: commands.Reply) -> None:
        """The machine answers."""
        done = self._waiting.get(reply.session, {}).pop(reply.call, None)
        if done is not None:
            done(reply.body)

    def forget(self, session: int) -> None:
        """Nobody waits for an answer to that session any more."""
        self._waiting.pop(session, None)
