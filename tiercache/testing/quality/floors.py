"""The scores that a codec must reach before it may be used with a model."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from tiercache.errors import ConfigError
from tiercache.testing.quality.scores import PLACES, Score

VERSION: Final = 1
SHIPPED: Final = Path(__file__).parent / "floors.toml"


class Floor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one codec must reach on one model. `recall_min`: in each place, front to straddle."""

    agreement_min: float
    kl_max: float
    drop_max: float
    recall_min: tuple[float, float, float, float]


class Floors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Floors by model and codec. `version` is that of this form."""

    version: int
    models: Mapping[str, Mapping[str, Floor]]

    def of(self, model: str, codec: str) -> Floor:
        """Return one floor; ConfigError when there is none: what has no floor is not approved."""
        found = self.models.get(model, {}).get(codec)
        if found is None:
            raise ConfigError(f"no floor for codec {codec!r} on model {model!r}")
        return found


def read_floors(path: Path = SHIPPED) -> Floors:
    """Return the floors in a TOML file; ConfigError for a file that is not exactly right."""
    try:
        floors = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Floors)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: cannot be read as floors: {error}") from error
    if floors.version != VERSION:
        raise ConfigError(f"{path}: version {floors.version}, this build reads {VERSION}")
    return floors


def failures(floor: Floor, found: Score) -> list[str]:
    """Return what is below the floor, as sentences; [] when nothing is."""
    checks = [
        (found.agreement >= floor.agreement_min, "agreement", found.agreement, floor.agreement_min),
        (found.kl <= floor.kl_max, "KL", found.kl, floor.kl_max),
        (found.drop <= floor.drop_max, "loss of recall", found.drop, floor.drop_max),
    ]
    for place, least in zip(PLACES, floor.recall_min, strict=True):
        recall: float = getattr(found, place)
        checks.append((recall >= least, f"recall {place}", recall, least))
    return [
        f"{what} is {value:.6g}, the floor {limit:.6g}"
        for ok, what, value, limit in checks
        if not ok
    ]
