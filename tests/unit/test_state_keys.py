"""Chains, namespaces and keys: equal names mean equal state, and nothing else does."""

import hashlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.state import Chain, GivenChain, Key, Layout, Namespace, Shard
from tiercache.state.canonical import encode
from tiercache.state.keys import chain_scheme, chain_start
from tiercache.testing.sim.rig import hybrid
from tiercache.testing.strategies import NAMES, chains, keys, namespaces

D = hashlib.sha256(b"a digest").digest()
PLAIN = Namespace("m", "w", "t", "layout", "chain")


def by_hand(tokens: Sequence[int], block: int, end: int) -> bytes:
    """The documented scheme, written a second time."""
    previous = hashlib.sha256(encode(("tiercache/chain", f"sha256-u32le-1/{block}"))).digest()
    for start in range(0, end - end % block, block):
        packed = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + block])
        previous = hashlib.sha256(previous + b"block" + packed).digest()
    rest = end % block
    if rest:
        packed = b"".join(token.to_bytes(4, "little") for token in tokens[end - rest : end])
        previous = hashlib.sha256(previous + b"tail%d:" % rest + packed).digest()
    return previous


def test_the_scheme_is_the_documented_one() -> None:
    tokens = [0, 1, 2**32 - 1, 7, 151643, 5, 6]
    chain = Chain(tokens, 3)
    assert [chain.digest_at(end) for end in range(8)] == [by_hand(tokens, 3, e) for e in range(8)]
    assert chain.digests[0] == chain_start(chain_scheme(3)) == chain.digest_at(0)
    assert chain.blocks() == chain.digests[1] + chain.digests[2]
    assert len(chain) == 7


def names_of(chain: Chain) -> dict[bytes, object]:
    """Every digest of a chain, with what it must stand for."""
    found: dict[bytes, object] = {}
    extras = chain._extras
    words = array("I", chain._blob)
    for end in range(len(chain) + 1):
        inside = {at: content for at, content in extras.items() if at < end}
        meaning = (chain.block_tokens, tuple(words[:end]), tuple(sorted(inside.items())))
        assert chain.digest_at(end) not in found
        found[chain.digest_at(end)] = meaning
    return found


@settings(max_examples=200, deadline=None)
@given(chains(), chains())
def test_equal_digests_mean_equal_prefixes(one: Chain, other: Chain) -> None:
    first, second = names_of(one), names_of(other)
    for digest in first.keys() & second.keys():
        assert first[digest] == second[digest]
    for digest in first.keys() - second.keys():
        assert first[digest] not in second.values()


def test_extras_are_not_read_as_tokens() -> None:
    """A tail with an extra, and the longer tail whose tokens spell out that extra's bytes."""
    extra = b"x" * 9
    spelled = encode(((0, extra),))
    assert len(spelled) % 4 == 0
    tokens = array("I", spelled)
    assert Chain([5], 64, {0: extra}).digest_at(1) != Chain([5, *tokens], 64).digest_at(
        1 + len(tokens)
    )


def test_a_digest_names_an_exact_count() -> None:
    tokens = [0] * 130
    chain = Chain(tokens, 64)
    assert len({chain.digest_at(end) for end in range(131)}) == 131


def test_every_image_has_its_own_prefix() -> None:
    chance = random.Random(13)
    identities = [chance.randbytes(32) for _ in range(70_000)]
    chains_of = {Chain([9, 9], 2, {0: identity}).digests[1] for identity in identities}
    assert len(chains_of) == 70_000


@pytest.mark.parametrize("bits", [16, 64])
def test_identities_count_in_full(bits: int) -> None:
    tail = b"\x11" * (bits // 8)
    one, other = b"\x01" * (32 - len(tail)) + tail, b"\x02" * (32 - len(tail)) + tail
    assert Chain([9] * 4, 4, {1: one}).digests[1] != Chain([9] * 4, 4, {1: other}).digests[1]
    assert Chain([9] * 3, 4, {1: one}).digest_at(3) != Chain([9] * 3, 4, {1: other}).digest_at(3)


def test_an_image_elsewhere_is_another_prefix() -> None:
    tokens = [9] * 8
    at = [Chain(tokens, 4, {position: b"image"}) for position in range(8)]
    assert len({chain.digests[-1] for chain in at}) == 8
    assert (
        Chain(tokens, 4, {0: b"a", 1: b"b"}).digests[1]
        != Chain(tokens, 4, {0: b"b", 1: b"a"}).digests[1]
    )
    assert at[6].digests[1] == Chain(tokens, 4).digests[1]  # What stands behind it is untouched.
    assert Chain(tokens, 4, {}).digests == Chain(tokens, 4, None).digests
    assert Chain(tokens, 4, {0: b""}).digests != Chain(tokens, 4).digests


@pytest.mark.parametrize("tokens", [[-1], [2**32]])
def test_tokens_have_32_bits(tokens: list[int]) -> None:
    with pytest.raises(OverflowError):
        Chain(tokens, 4)


@pytest.mark.parametrize(
    "tokens", [b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), "abcd", [1.5]]
)
def test_tokens_are_numbers(tokens: Sequence[int]) -> None:
    with pytest.raises(TypeError):
        Chain(tokens, 4)


def test_chains_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="block_tokens"):
        Chain([1], 0)
    for position in (-1, 2):
        with pytest.raises(ValueError, match="outside the tokens"):
            Chain([1, 2], 4, {position: b""})
    for tokens in (-1, 3):
        with pytest.raises(ValueError, match=r"0\.\.2 tokens"):
            Chain([1, 2], 4).digest_at(tokens)


def test_a_platform_with_other_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache.state.keys.array", lambda _, tokens: array("Q", tokens))
    with pytest.raises(RuntimeError, match="32-bit"):
        Chain([1], 4)


def test_a_platform_with_the_other_byte_order(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Chain([1, 2**31], 4)
    monkeypatch.setattr("tiercache.state.keys.sys.byteorder", "big")
    swapped = [int.from_bytes(token.to_bytes(4, "little"), "big") for token in (1, 2**31)]
    assert Chain(swapped, 4).digest_at(2) == plain.digest_at(2)


# --- namespaces


def test_each_field_makes_another_namespace() -> None:
    changed = [
        replace(PLAIN, **{field.name: getattr(PLAIN, field.name) + "x"}) for field in fields(PLAIN)
    ]
    assert len({namespace.digest for namespace in [PLAIN, *changed]}) == len(changed) + 1


@settings(max_examples=200, deadline=None)
@given(namespaces(), namespaces())
def test_equal_digests_mean_equal_namespaces(one: Namespace, other: Namespace) -> None:
    assert (one.digest == other.digest) == (one == other)


def test_no_salt_is_a_tenant_of_its_own() -> None:
    none, one = PLAIN.narrow(), PLAIN.narrow(salt="s1")
    assert none.digest == PLAIN.digest == PLAIN.narrow(lora="", salt="").digest
    assert len({none.digest, one.digest, PLAIN.narrow(salt="s2").digest}) == 3
    assert PLAIN.narrow(lora="s1").digest != one.digest
    assert (none.tenant, len(one.tenant)) == ("-", 8)
    assert "s1" not in repr(one.label())


def test_a_label_shows_all_but_the_salt() -> None:
    namespace = PLAIN.narrow(lora="adapter", salt="secret")
    label = namespace.label()
    assert (label.model, label.weights, label.tokenizer) == ("m", "w", "t")
    assert (label.lora, label.tenant, label.digest) == (
        "adapter", namespace.tenant, namespace.digest
    )  # fmt: skip


def test_a_namespace_takes_all_from_the_layout() -> None:
    layout = hybrid()
    namespace = Namespace.of(layout, model="m", weights="w", tokenizer="t")
    assert namespace.layout == layout.fingerprint
    assert namespace.chain == chain_scheme(layout.block_tokens)
    coarser = Layout(layout.parts[1:], 8)
    other = Namespace.of(coarser, model="m", weights="w", tokenizer="t")
    assert other.digest != namespace.digest


@pytest.mark.parametrize("missing", ["model", "weights", "tokenizer"])
def test_identity_must_be_named(missing: str) -> None:
    names = {"model": "m", "weights": "w", "tokenizer": "t", missing: ""}
    with pytest.raises(ValueError, match="identity"):
        Namespace.of(
            hybrid(), model=names["model"], weights=names["weights"], tokenizer=names["tokenizer"]
        )


# --- keys


def test_a_key_reads_like_a_path() -> None:
    key = Key(D, "kv", Shard(0, 8), "native", D)
    assert str(key) == f"{D.hex()[:12]}/{D.hex()}/kv/0-8/native"
    assert key.encode() == D + D + encode(("kv", 0, 8, "native"))


@pytest.mark.parametrize(("namespace", "digest"), [(b"", D), (D, D[:31]), (D + b"x", D)])
def test_digests_are_whole(namespace: bytes, digest: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Key(namespace, "kv", Shard(0, 1), "native", digest)


@settings(max_examples=300, deadline=None)
@given(keys(), keys())
def test_names_are_as_different_as_keys(one: Key, other: Key) -> None:
    same = one == other
    assert (one.encode() == other.encode()) == same
    assert (str(one) == str(other)) == same


@settings(max_examples=100, deadline=None)
@given(NAMES, st.text("ab/-0123456789", min_size=1, max_size=6))
def test_a_hostile_codec_cannot_pass_for_another_key(part: str, codec: str) -> None:
    honest = Key(D, part, Shard(1, 2), "native", D)
    hostile = Key(D, part, Shard(1, 2), codec, D)
    assert str(honest) != str(hostile)
    assert honest.encode() != hostile.encode()


# --- chains of an engine's own digests


def test_a_given_chain_answers_for_what_was_given() -> None:
    digests = [bytes([n]) * 32 for n in range(3)]
    chain = GivenChain(b"".join(digests), 4, first=2)
    assert len(chain) == 20
    assert [chain.digest_at(end) for end in (12, 16, 20)] == digests
    assert chain.blocks() == b"".join(digests)


@pytest.mark.parametrize("tokens", [0, 8, 10, 13, 24, -4])
def test_a_given_chain_knows_nothing_else(tokens: int) -> None:
    """Neither before its first block, nor inside one, nor beyond the last."""
    with pytest.raises(ValueError, match="was given"):
        GivenChain(bytes(96), 4, first=2).digest_at(tokens)


@pytest.mark.parametrize(("path", "block", "first"), [(b"x", 4, 0), (b"", 0, 0), (b"", 4, -1)])
def test_what_is_no_given_chain(path: bytes, block: int, first: int) -> None:
    with pytest.raises(ValueError, match=r"digests are|at least"):
        GivenChain(path, block, first)
