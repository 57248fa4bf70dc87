"""What computing a prefix costs, so that keeping one can be compared with computing it again."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """The prefill cost of a model: `linear` FLOPs for each token, `quadratic` for each pair of a query
    and a key.

    A token is compared with all tokens before it, so `x` tokens make about `x**2 / 2` pairs.
    """

    linear: float
    quadratic: float

    def flops(self, tokens: float) -> float:
        """Return the FLOPs of a prefill of `tokens` tokens from nothing."""
        return self.linear * tokens + self.quadratic * tokens * tokens / 2

    def extending(self, start: float, end: float) -> float:
        """Return the FLOPs of computing the tokens `[start, end)` on top of a restored prefix."""
        return self.flops(end) - self.flops(start)


EVEN = Work(1.0, 0.0)
"""Every token costs the same: what is used when nothing is known of a model."""


def work_of(model: str, known: tuple[tuple[str, Work], ...]) -> Work:
    """Return the work of a model by what a client calls it, `EVEN` when none of the known ones is meant.

    Letters and digits count, from the last "/" on: "moonshotai/Kimi-K3-Instruct" is a "kimi-k3". Of several
    the longest name is meant.
    """
    name = _plain(model.rpartition("/")[2])
    found = [(len(other), work) for other, work in known if name.startswith(_plain(other))]
    return max(found, key=lambda pair: pair[0])[1] if found else EVEN


def _plain(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())
