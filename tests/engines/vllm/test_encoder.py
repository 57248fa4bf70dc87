"""Embeddings of sounds, from one engine process to another, through a real node."""

from tests.engines.vllm.engines import NewEngine, NewNode, difference, prompt
from tests.engines.vllm.models import AUDIO_TOKENS
from tiercache.testing.nodes import eventually

IDS = [*prompt(51, 20), *AUDIO_TOKENS, *prompt(52, 20)]


def test_sounds_are_encoded_once(new_engine: NewEngine, new_node: NewNode) -> None:
    node = new_node()
    socket = str(node.socket)
    first = new_engine("qwen2audio", encoder=socket)
    (one,) = first.generate(IDS, sound=1)
    (two,) = first.generate(IDS, sound=2)
    assert difference(one, two) > 0.0, "the sound matters"
    counts = first.ask("encoded")
    assert (counts["saved"], counts["misses"]) == (2, 2)
    first.close()
    second = new_engine("qwen2audio", encoder=socket)
    (again,) = second.generate(IDS, sound=1)
    assert again["tokens"] == one["tokens"]
    assert difference(again, one) < 1e-5
    counts = second.ask("encoded")
    assert counts.get("saved", 0) == 0, "nothing was encoded"
    assert counts["hits"] == 1
    node.kill()
    (third,) = second.generate(IDS, sound=2)
    assert third["tokens"] == two["tokens"], "without the node it is encoded"
    node.start()

    def hit() -> bool:
        second.generate(IDS, sound=int(second.ask("encoded").get("misses", 0)) + 10)
        return bool(second.ask("encoded").get("saved", 0))

    assert eventually(hit)
    second.close()
