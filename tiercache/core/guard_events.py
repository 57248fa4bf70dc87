"""What is asked about pins and shares; the part of `events` that `guarding` answers."""

import msgspec


class _Event(msgspec.Struct, frozen=True):
    pass


class PinAsked(_Event, frozen=True):
    """Keep what a boundary rests on in memory for `age_s`, or until the session ends. `digests`: of whole
    blocks; `tail`: the boundary's own when it lies inside a block."""

    session: int
    call: int
    lora: str
    salt: str
    digests: list[bytes]
    tokens: int
    tail: bytes
    age_s: float


class KeysPinAsked(_Event, frozen=True):
    """An operator keeps objects whose key text starts with `prefix` in memory for `age_s`."""

    session: int
    call: int
    prefix: str
    owner: str
    age_s: float


class UnpinAsked(_Event, frozen=True):
    """End one pin (`number`), or all operators' pins of one owner. A session ends its own only."""

    session: int
    call: int
    number: int
    owner: str


class PinsAsked(_Event, frozen=True):
    """Which pins are there?"""

    session: int
    call: int


class SharesAsked(_Event, frozen=True):
    """What may each tenant take, and what does it? With `tenant` and `host` or `nvme`: from now on, that
    share (None: as it is)."""

    session: int
    call: int
    tenant: str
    host: float | None
    nvme: float | None


class SharesTold(_Event, frozen=True):
    """What the cluster says that tenants may take, by name: the parts of memory and of the disk, None for
    what it leaves to this node. All there is: what is not in it any more is this node's again."""

    shares: dict[str, tuple[float | None, float | None]]


Asked = PinAsked | KeysPinAsked | UnpinAsked | PinsAsked | SharesAsked
"""What is answered."""

Event = Asked | SharesTold
