"""How each model family's recurrent and convolution states are laid out.

Shapes alone do not say it: with d_k == d_v a transposed state has the same shape, and nothing in a
cache says that a convolution's oldest column is never read again. So a family is listed here, with
what was verified by running it, or its model is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

from tiercache.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What one kind of linear-attention layer keeps per slot.

    `axes` name transformers' recurrent axes without the batch. `transposed` says that its last two
    are (key, value) and not the canonical (value, key). `main_first` says that the convolution's
    channels are x|B|C (Mamba2) and not q|k|v; `segmented` that they are three pieces at all.
    """

    name: str
    axes: tuple[str, ...]
    transposed: bool = False
    main_first: bool = False
    segmented: bool = True

    def segments(self, recurrent: tuple[int, ...], channels: int) -> tuple[tuple[int, ...], int]:
        """Return the lengths of a convolution's pieces (none: it is one) and how many units it has.

        `recurrent` is the shape of the same layer's recurrent state in transformers' order. Three
        pieces are the main one (value heads) and two side ones (query and key, or B and C). Raises
        LayoutError when the channels do not add up.
        """
        if not self.segmented:
            return (), channels
        heads = recurrent[0]
        key, value = recurrent[1:] if self.transposed else (recurrent[2], recurrent[1])
        main = heads * value
        side, odd = divmod(channels - main, 2)
        if odd or side < 1 or side % key:
            raise LayoutError(
                f"{self.name}: {channels} convolution channels do not fit {heads} heads of "
                f"{value} values and keys of {key}"
            )
        pieces = (main, side, side) if self.main_first else (side, side, main)
        return pieces, gcd(heads, side // key)


KDA = Recurrence("kda", ("head", "key", "value"), transposed=True)
GDN = Recurrence("gdn", ("head", "key", "value"), transposed=True)
MAMBA2 = Recurrence("mamba2", ("head", "value", "key"), main_first=True)
MAMBA1 = Recurrence("mamba1", ("channel", "key"), segmented=False)

DEAD_COLUMNS = 1
"""State 0 has as many columns as its kernel is wide; each step appends one, so the oldest is never
read again."""

_FAMILIES: Mapping[str, Recurrence] = {
    "bailing_hybrid": KDA,
    "bamba": MAMBA2,
    "falcon_h1": MAMBA2,
    "glm5_next_text": KDA,
    "granitemoehybrid": MAMBA2,
    "jamba": MAMBA1,
    "kimi_linear": KDA,
    "nemotron_h": MAMBA2,
    "olmo_hybrid": GDN,
    "qwen3_5_moe_text": GDN,
    "qwen3_5_text": GDN,
    "qwen3_next": GDN,
    "qwen4_exp_text": GDN,
    "zamba2": MAMBA2,
}


def recurrence_of(model_type: str) -> Recurrence:
    """Return how `model_type` lays its recurrent states out; LayoutError when that is not known."""
    found = _FAMILIES.get(model_type)
    if found is None:
        raise LayoutError(
            f"the recurrent state of model type {model_type!r} has not been verified; known are "
            f"{', '.join(_FAMILIES)}. Run uncached, or verify it and add a row"
        )
    return found
