"""State that is saved while an engine decodes: guessing, ahead of its outputs, and for the next turn."""

import math
from collections.abc import Sequence

from tests.engines.vllm.engines import Engine, Json, NewEngine, NewNode, difference, prompt

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
REPEATED = prompt(61, 40) * 5
"""Easy to guess ahead, and often enough wrong."""


def test_only_accepted_tokens_are_saved(new_engine: NewEngine, new_node: NewNode) -> None:
    """The pages of a run that guesses ahead are those of a run that does not, bit for bit or nearly."""
    node = new_node()
    guessing = new_engine(
        "llama",
        node.socket,
        settings={"block_size": 32, "speculative_config": NGRAM},
    )
    (guessed,) = guessing.generate(REPEATED, tokens=120)
    drafted, accepted = guesses(guessing)
    assert 0 < accepted < drafted
    guessing.ask("flush")
    guessing.close()
    plain = new_engine("llama", node.socket, settings={"block_size": 32})
    whole = [*REPEATED, *guessed["tokens"]]
    (resumed,) = plain.generate(whole, tokens=8)
    (computed,) = plain.generate(whole, tokens=8, salt="alone")
    assert resumed["cached"] >= len(REPEATED) + 64, "pages of guessed tokens"
    assert resumed["tokens"] == computed["tokens"]
    assert difference(resumed, computed) < 1e-3
    plain.close()


def test_the_next_turn_resumes_after_the_answer(new_engine: NewEngine, new_node: NewNode) -> None:
    """vLLM keeps a state every so many tokens, also while it decodes, if it is told to; its scheduler runs
    ahead of the outputs."""
    node = new_node()
    engine = new_engine(
        "qwen3next",
        node.socket,
        settings={"prefix_cache_retention_interval": 128, "async_scheduling": True},
    )
    history = prompt(62, 200)
    (first,) = engine.generate(history, tokens=150)
    assert engine.ask("flush")
    engine.ask("reset_local")
    history = [*history, *first["tokens"], *prompt(63, 50)]
    (second,) = engine.generate(history)
    (computed,) = engine.generate(history, salt="alone")
    assert second["cached"] == 256, "beyond the first prompt"
    assert second["tokens"] == computed["tokens"]
    assert difference(second, computed) < 0.1
    engine.close()


GUESSED = prompt(61, 200)
TWO_TOKENS = [3, 5]
"""Answers of two tokens only are guessed right often, and wrong often."""


def test_only_accepted_tokens_are_in_a_state(new_engine: NewEngine, new_node: NewNode) -> None:
    """The states of a hybrid model that guesses ahead are those of a prefill, up to rounding; a single
    other token would be far from it."""
    engine = new_engine(
        "qwen3next",
        new_node().socket,
        guessing=True,
        settings={"prefix_cache_retention_interval": 128, "speculative_config": NGRAM},
    )
    (guessed,) = engine.generate(GUESSED, tokens=350, allowed=TWO_TOKENS)
    drafted, accepted = guesses(engine)
    assert 0.1 * drafted < accepted < 0.9 * drafted
    assert engine.ask("flush")
    whole = [*GUESSED, *guessed["tokens"]]
    ends = [end for end in range(256, 513, 128) if state(engine, whole, end, "conv")]
    assert len(ends) >= 2, "states of decoded tokens"
    for end in ends:
        prefix = whole[: end + 20]
        other = [*prefix[: end - 1], prefix[end - 1] + 1, *prefix[end:]]
        engine.generate(prefix, tokens=1, salt="prefilled")
        engine.generate(other, tokens=1, salt="prefilled")
        assert engine.ask("flush")
        for part in ("recurrent", "conv"):
            ours = state(engine, whole, end, part)
            right = state(engine, prefix, end, part, salt="prefilled")
            wrong = state(engine, other, end, part, salt="prefilled")
            assert distance(ours, right) < 0.1, (end, part)
            assert distance(wrong, right) > 0.5, (end, part)
        engine.ask("reset_local")
        (resumed,) = engine.generate(prefix, tokens=1)
        assert resumed["cached"] == end
    engine.close()


def guesses(engine: Engine) -> tuple[float, float]:
    """Return how many tokens were guessed, and how many of them rightly."""
    metrics = engine.ask("metrics")
    drafted = sum(value for name, value in metrics.items() if "num_draft_tokens" in name)
    return drafted, sum(value for name, value in metrics.items() if "num_accepted_tokens" in name)


def state(engine: Engine, ids: Sequence[int], end: int, part: str, salt: str = "") -> list[float]:
    """Return what the node has of a state. A convolution looks back three tokens; what an engine that
    guesses keeps beyond them means nothing."""
    columns = 3 if part == "conv" else None
    order: Json = {"end": end, "part": part, "salt": salt, "columns": columns}
    found: list[float] = engine.ask("state", ids=list(ids), **order)
    return found


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return how far one is from the other, as a part of its length."""
    assert len(one) == len(other) > 0
    return math.dist(one, other) / math.hypot(*other)
