"""What a user sets: the `tiercache` table of `--hicache-storage-backend-extra-config`."""

from typing import Annotated

import msgspec
from msgspec import Meta

from tiercache.errors import ConfigError

DEFAULT_SOCKET = "/run/tiercache/tiercache.sock"
CALL_S_MAX = 8.0
"""SGLang joins its storage threads for 10 s; a call that may take longer makes a detach fail."""

_Text = Annotated[str, Meta(min_length=1, max_length=512)]
_Seconds = Annotated[float, Meta(gt=0, le=60)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one SGLang rank uses its node.

    `weights`: an exact, immutable name of the weights; "" to find one (a Hub commit in the model's path,
    else a fingerprint of the files there). `tokenizer`: likewise. `deadline_s`: what one call waits for
    the node. `wait_s`: what a read waits beyond that for objects on NVMe. `hold_s`: how long the node
    keeps what a look-up found until it is read. `states`: "native" or "int8", how recurrent states are
    kept outside of SGLang. `write`: whether anything is saved. `required`: an attach without a node fails
    instead of serving uncached. `engine`: a name that all ranks of one engine share and no other has; ""
    to take the parent process's.
    """

    socket: _Text = DEFAULT_SOCKET
    weights: Annotated[str, Meta(max_length=512)] = ""
    tokenizer: Annotated[str, Meta(max_length=512)] = ""
    deadline_s: _Seconds = 0.5
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 1.0
    hold_s: Annotated[float, Meta(ge=0, le=60)] = 10.0
    states: Annotated[str, Meta(pattern="^(native|int8)$")] = "native"
    write: bool = True
    required: bool = False
    engine: Annotated[str, Meta(max_length=128)] = ""


def parse(extra_config: object) -> Settings:
    """Return the settings in what SGLang passes on of its extra config.

    Raises ConfigError, naming the setting, for one that is unknown or wrong, and for an extra config
    that this backend cannot work with.
    """
    table: object = {}
    interface = 0
    if isinstance(extra_config, dict):
        table = extra_config.get("tiercache", {})
        interface = extra_config.get("interface_v1", 0)
    if not interface:
        raise ConfigError(
            'tiercache needs "interface_v1": 1 in --hicache-storage-backend-extra-config: without it '
            "SGLang does not say where in its prompt a page stands"
        )
    try:
        settings = msgspec.convert(table, Settings)
    except msgspec.ValidationError as fault:
        raise ConfigError(
            f'"tiercache" in --hicache-storage-backend-extra-config: {fault}'
        ) from None
    if settings.deadline_s + settings.wait_s > CALL_S_MAX:
        raise ConfigError(f"deadline_s and wait_s are more than {CALL_S_MAX} s together")
    return settings
