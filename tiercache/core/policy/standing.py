"""What a node knows of its requests, and which order of eviction it follows."""

from collections.abc import Hashable

from tiercache.core.policy.marconi_order import Marconi, Tuner
from tiercache.core.policy.meta import AUTO, CANDIDATES, MARCONI, Choice, ranking
from tiercache.core.policy.ranking import Ranking
from tiercache.core.policy.reuse import Reuse
from tiercache.core.policy.visits import Visit
from tiercache.core.policy.whatif import WhatIf


class Standing:
    """One for a node of `budget` bytes. `evictions`: how many points went so far."""

    def __init__(self, policy: str, budget: float, ghosts_max: int) -> None:
        self.reuse = Reuse(ghosts_max)
        self.budget = budget
        self.evictions = 0
        self.whatif = WhatIf(budget, self.reuse)
        self.choice = Choice(budget, self.reuse) if policy == AUTO else None
        self._names = CANDIDATES if self.choice else (policy,)
        self._orders: list[Marconi] = []
        self._tuner: Tuner | None = None
        if policy == MARCONI:
            self._tuner = Tuner(Marconi(), budget, self.reuse)

    @property
    def current(self) -> str:
        """The name of the ranking that is followed."""
        return self._names[0] if self.choice is None else self.choice.current

    def rankings(self) -> dict[str, Ranking]:
        """Return new rankings of all names that may be followed."""
        found = {name: ranking(name, self.reuse) for name in self._names}
        self._orders.extend(order for order in found.values() if isinstance(order, Marconi))
        return found

    def visit(self, visit: Visit) -> None:
        """Learn from one request. To be told before what holds its state is."""
        talk = self.reuse.visit(visit)
        self.whatif.visit(visit, talk)
        if self.choice is not None:
            self.choice.visit(visit, talk)
        if self._tuner is not None:
            self._tuner.visit(visit, self.evictions)
            for order in self._orders:
                order.alpha = self._tuner.alpha

    def grow(self, visit: Visit, start: int) -> None:
        """A request wrote more than its prompt of `start` blocks."""
        talk = self.reuse.grow(visit, start)
        if self.choice is not None:
            self.choice.grow(visit, talk)

    def forget(self, tree: Hashable) -> None:
        """A namespace is gone."""
        self.reuse.forget(tree)
        self.whatif.forget()
        if self.choice is not None:
            self.choice.forget(tree)
