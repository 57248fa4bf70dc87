"""The part of the protocol that protects: pins and shares. See `messages.py` for the rest."""

import msgspec


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class Pin(_Message, frozen=True, tag="pin"):
    """Asks to keep what a boundary rests on in host memory, for `age_ms` or until the session ends.

    `chain`: digests of the whole blocks before `tokens`, concatenated. `tail`: the digest at `tokens`
    when that is inside a block, else b"".
    """

    call: int
    lora: str
    salt: str
    chain: bytes
    tokens: int
    tail: bytes
    age_ms: int


class Unpin(_Message, frozen=True, tag="unpin"):
    """Ends pin `number` (0: all operators' pins of `owner`). A session may end its own pins only."""

    call: int
    number: int
    owner: str


class PinKeys(_Message, frozen=True, tag="pin_keys"):
    """An operator's pin, on all objects whose key text starts with `prefix`; it ends at its age only."""

    call: int
    prefix: str
    owner: str
    age_ms: int


class Pins(_Message, frozen=True, tag="pins"):
    """Asks for every pin."""

    call: int


class Shares(_Message, frozen=True, tag="shares"):
    """Asks what tenants may take and do ("" all). `host` and `nvme`: from now on, the tenant's share is
    this (None: as it is)."""

    call: int
    tenant: str
    host: float | None = None
    nvme: float | None = None


class Pinned(_Message, frozen=True, tag="pinned"):
    """Answers `Pin` and `Unpin`. `outcome` is "pinned" or "unpinned", or says why not: "incomplete" (not
    all is there), "nothing", "too_many", "over_budget", "invalid" (an age beyond `age_ms`)."""

    call: int
    outcome: str
    number: int
    objects: int
    nbytes: int
    age_ms: int


Request = Pin | Unpin | PinKeys | Pins | Shares
