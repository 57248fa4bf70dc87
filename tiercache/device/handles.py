"""Handles of what is owned on the device, and what is said of it. See `ownership`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """The state of one running request."""

    number: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One idle, shared, read-only state."""

    number: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Slots of the next step: it reads one and writes the other."""

    read: int
    write: int


@dataclass(frozen=True, slots=True)
class Standing:
    """What a checkpoint is.

    `tokens`: how many the state contains. `codec`: how its recurrent states are held. `requantised`:
    how often its bytes were derived from quantised ones. `active`: it sits in an active slot.
    """

    tokens: int
    codec: str
    requantised: int
    active: bool
