"""State that is saved while an engine decodes: guessing, ahead of its outputs, and for the next turn."""

from tests.engines.vllm.engines import NewEngine, NewNode, difference, prompt

REPEATED = prompt(61, 40) * 5
"""Easy to guess ahead, and often enough wrong."""


def test_only_accepted_tokens_are_saved(new_engine: NewEngine, new_node: NewNode) -> None:
    """The pages of a run that guesses ahead are those of a run that does not, bit for bit or nearly."""
    node = new_node()
    guessing = new_engine(
        "llama",
        node.socket,
        settings={
            "block_size": 32,
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            },
        },
    )
    (guessed,) = guessing.generate(REPEATED, tokens=120)
    metrics = guessing.ask("metrics")
    drafted = sum(value for name, value in metrics.items() if "num_draft_tokens" in name)
    accepted = sum(value for name, value in metrics.items() if "num_accepted_tokens" in name)
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
