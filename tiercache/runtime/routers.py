"""Whether routers are told anything, and by whom. Loads ZMQ only when they are."""

from socket import gethostname
from typing import TYPE_CHECKING

from tiercache.config import Settings
from tiercache.core.cluster.summary import Own
from tiercache.errors import ConfigError
from tiercache.runtime.telemetry import Tally

if TYPE_CHECKING:
    from tiercache.runtime.publishing import Publisher


def publisher_of(
    settings: Settings, boot: str, own: Own | None, tally: Tally
) -> "Publisher | None":
    """Return what tells routers of `own`; None when the settings name no place for it. Raises
    ConfigError."""
    if not settings.events.bind:
        return None
    assert own is not None
    try:
        from tiercache.runtime.publishing import Publisher
    except ModuleNotFoundError as error:
        if error.name != "zmq":
            raise
        raise ConfigError(
            "events.bind needs pyzmq: install tiercache with the extra `events`"
        ) from error
    return Publisher(settings.events, settings.cluster.node or gethostname(), boot, own, tally)
