"""Pages and states in and out of a node, by SGLang's page hashes. Knows nothing of SGLang itself.

Strategy: a look-up is one survey, which the node answers with what is held along the path and keeps for a
while; a read fetches by name, copies out of the arena under a lease and believes the copy only if the lease
stood until the end; a save writes straight into the arena. All of it within the client's deadlines.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Final, Protocol

from tiercache.client import Blob, Cleared, Client, Scope, Survey, Wanted, copy_into
from tiercache.state import NATIVE, GivenChain, Layout
from tiercache.state.canonical import DIGEST_BYTES
from tiercache_sglang.figures import Figures
from tiercache_sglang.geometry import CONV, KV, RECURRENT
from tiercache_sglang.paths import Requests, path_of
from tiercache_sglang.restorable import NO_HITS, Hits, hits_of

SURVEYS_MAX: Final = 256
"""Look-ups whose pages are kept until they are read."""

SURVEY_PAGES_MAX: Final = 16_384
"""Pages of one question to the node: half a megabyte of digests."""

CLEAR_S: Final = 5.0
"""How long a clear may take beyond what a read may wait: it rewrites the index of the NVMe tier."""

Pieces = Sequence[memoryview]
"""The memory of one page or state, in as many pieces as SGLang has it in."""


class StateCodec(Protocol):
    """Another form of recurrent states."""

    def encode(self, state: memoryview) -> memoryview:
        """Return the bytes that stand for a state's."""
        ...

    def decode(self, encoded: memoryview, state: memoryview) -> None:
        """Write the state that `encoded` stands for."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things may take, and under which name recurrent states are kept in another form.

    `exact_prefixes`: whether what SGLang says to come before a state's page really ends there. Without a
    host cache of its own (`buffer_only`), SGLang 0.5.23 names what comes before the state's node instead.
    What it says to come before a look-up is never believed: the last node before it is left out.
    """

    wait_s: float
    hold_s: float
    codec_name: str = NATIVE
    codec: StateCodec | None = None
    exact_prefixes: bool = True


class Store:
    """One rank's view of its node. Thread-safe; no call raises because of the node."""

    def __init__(self, client: Client, layout: Layout, pace: Pace, figures: Figures) -> None:
        self.client = client
        self.layout = layout
        self.figures = figures
        self._pace = pace
        self._scope = Scope(codecs=tuple(dict.fromkeys((NATIVE, pace.codec_name))))
        self._lock = threading.Lock()
        self._requests = Requests()
        self._surveys: OrderedDict[str, Survey] = OrderedDict()  # By the key whose reading ends it.
        self._numbers = count(1)

    @property
    def state_parts(self) -> tuple[str, ...]:
        """The parts that make one recurrent state."""
        return tuple(part.name for part in self.layout.parts if part.name in {RECURRENT, CONV})

    # --- look-ups

    def look_up(
        self,
        keys: Sequence[str],
        pools: Mapping[str, Sequence[str]],
        windows: Mapping[str, int | None],
        before: Sequence[str] = (),
    ) -> Hits:
        """Return which prefixes of `keys` can be restored; see `hits_of`. What they need is kept.

        `before`: pages that SGLang has itself, as far as it names them; the node hears that they are of
        use.
        """
        self.figures.add("look_up")
        path = path_of(keys)
        if path is None or not keys:
            return NO_HITS
        with self._lock:
            name = self._requests.asking(keys, monotonic())
        surveys: list[Survey] = []
        found: list[bytes] = [b""] * len(self.layout.parts)
        for start in range(0, len(keys), SURVEY_PAGES_MAX):
            piece = path[start * DIGEST_BYTES : (start + SURVEY_PAGES_MAX) * DIGEST_BYTES]
            part = f"{name}/{start}" if start else name
            survey = self.client.survey(
                part,
                piece,
                scope=self._scope,
                hold_s=self._pace.hold_s,
                before=b"" if start else path_of(before[-SURVEY_PAGES_MAX:]) or b"",
            )
            if survey.reason:
                self._fault(survey.reason)
                if not surveys:
                    return NO_HITS
                break
            surveys.append(survey)
            found = [b"".join(pair) for pair in zip(found, survey.found, strict=True)]
            there = len(survey.found[0])
            if there * DIGEST_BYTES < len(piece):
                with self._lock:
                    self._requests.missed(part, keys[start + there :])
                break
        self._learn(surveys, keys)
        hits = hits_of(self.layout, found, pools, windows)
        self.figures.add("hit_pages" if hits.longest else "missed_calls", hits.longest or 1)
        self._keep(surveys, keys[hits.longest - 1] if hits.longest else "")
        return hits

    def _learn(self, surveys: Sequence[Survey], keys: Sequence[str]) -> None:
        """Remember where the path stands, if the node knows."""
        first, rest = divmod(surveys[0].start, self.layout.block_tokens)
        if first >= 0 and not rest:
            with self._lock:
                self._requests.stands(first, keys)

    def _keep(self, surveys: Sequence[Survey], key: str) -> None:
        """Keep what was found until the state or page `key` is read; "" when nothing will be."""
        dropped = list(surveys)
        if key:
            with self._lock:
                for survey in surveys:
                    name = f"{key}/{survey.request}"
                    self._surveys[name] = survey
                    dropped = []
                while len(self._surveys) > SURVEYS_MAX:
                    dropped.append(self._surveys.popitem(last=False)[1])
        for survey in dropped:
            survey.release()

    def _read_through(self, keys: Sequence[str]) -> None:
        """These keys were read: what was kept for them may go."""
        ended: list[Survey] = []
        with self._lock:
            if self._surveys:
                asked = set(keys)
                names = [name for name in self._surveys if name.partition("/")[0] in asked]
                ended = [self._surveys.pop(name) for name in names]
        for survey in ended:
            survey.release()

    # --- reads

    def read_pages(self, keys: Sequence[str], targets: Sequence[Pieces]) -> list[bool]:
        """Copy KV pages into `targets`; say of each whether all of it is there."""
        done = self._read(KV, keys, targets)
        if not self.state_parts:
            self._read_through(keys)
        return done

    def read_states(
        self, keys: Sequence[str], targets: Sequence[Mapping[str, Pieces]]
    ) -> list[bool]:
        """Copy states into `targets`, which name the memory of each of `state_parts`."""
        done = [True] * len(keys)
        for part in self.state_parts:
            each = self._read(part, keys, [target[part] for target in targets])
            done = [a and b for a, b in zip(done, each, strict=True)]
        self._read_through(keys)
        return done

    def _read(self, part: str, keys: Sequence[str], targets: Sequence[Pieces]) -> list[bool]:
        self.figures.add("get")
        path = path_of(keys)
        if path is None or len(targets) != len(keys):
            return [False] * len(keys)
        codecs = self._scope.codecs if part == RECURRENT else (NATIVE,)
        wanted = [
            Wanted(part, path[at : at + DIGEST_BYTES], codec=codec)
            for at in range(0, len(path), DIGEST_BYTES)
            for codec in codecs
        ]
        began = monotonic()
        done: list[bool] = []
        nbytes = 0
        with self.client.fetch(
            f"get/{next(self._numbers)}", wanted, wait_s=self._pace.wait_s
        ) as got:
            if got.reason:
                self._fault(got.reason)
            blobs = got.blobs
            for at, target in enumerate(targets):
                versions = blobs[at * len(codecs) : (at + 1) * len(codecs)]
                blob = next((version for version in versions if version is not None), None)
                whole = blob is not None and self._restore(blob, target)
                done.append(whole)
                nbytes += blob.data.nbytes if blob is not None and whole else 0
            if not got.held and any(done):
                self._fault("lease lost")
                done = [False] * len(keys)
        self.figures.moved("get", sum(done), nbytes, monotonic() - began)
        return done

    def _restore(self, blob: Blob, target: Pieces) -> bool:
        if blob.codec != NATIVE:
            assert self._pace.codec is not None
            (whole,) = target
            self._pace.codec.decode(blob.data, whole)
            return True
        if sum(piece.nbytes for piece in target) != blob.data.nbytes:
            self._fault("wrong size")
            return False
        start = 0
        for piece in target:
            copy_into(piece, blob.data[start : start + piece.nbytes])
            start += piece.nbytes
        return True

    # --- saves

    def save_pages(
        self, before: Sequence[str], keys: Sequence[str], sources: Sequence[Pieces]
    ) -> bool:
        """Save the KV pages `keys`, which come after `before`. Return whether all are there now."""
        page, first = self.layout.block_tokens, len(before)
        blobs = [
            Blob(KV, (at + 1) * page, pieces[0], at * page, more=tuple(pieces[1:]))
            for at, pieces in enumerate(sources, first)
        ]
        return self._save(before, keys, first, blobs)

    def save_states(
        self, before: Sequence[str], keys: Sequence[str], sources: Sequence[Mapping[str, Pieces]]
    ) -> bool:
        """Save the states at the ends of the pages `keys`; return whether all are there now."""
        self.figures.add("states_offered", len(sources))
        page, first = self.layout.block_tokens, self._position(before, keys)
        if first is None:
            self.figures.add("no_position")
            return False
        blobs: list[Blob] = []
        for at, source in enumerate(sources, first):
            for part in self.state_parts:
                pieces, codec = source[part], NATIVE
                if part == RECURRENT and self._pace.codec is not None:
                    (whole,) = pieces
                    pieces, codec = (self._pace.codec.encode(whole),), self._pace.codec_name
                more = tuple(pieces[1:])
                lossy = int(codec != NATIVE)
                blobs.append(
                    Blob(
                        part, (at + 1) * page, pieces[0], codec=codec, requantised=lossy, more=more
                    )
                )
        saved = self._save(before, keys, first, blobs)
        if saved:
            self.figures.add("states_stored", len(sources))
        return saved

    def _position(self, before: Sequence[str], keys: Sequence[str]) -> int | None:
        """Return how many pages come before a state's page, None when nobody knows."""
        if self._pace.exact_prefixes:
            return len(before)
        with self._lock:
            return self._requests.position(keys[0]) if keys else None

    def _save(
        self, before: Sequence[str], keys: Sequence[str], first: int, blobs: Sequence[Blob]
    ) -> bool:
        self.figures.add("set")
        path = path_of(keys)
        if path is None:
            return False
        began = monotonic()
        chain = GivenChain(path, self.layout.block_tokens, first)
        with self._lock:
            request = self._requests.saving(before, keys)
            self._requests.missed(request, keys, first)
        saved = self.client.save(request, chain, blobs)
        nbytes = sum(piece.nbytes for blob in blobs for piece in (blob.data, *blob.more))
        self.figures.moved("set", saved.stored, nbytes if saved.stored else 0, monotonic() - began)
        for outcome, times in saved.declined.items():
            self.figures.add(f"faults:{outcome}", times)
        # What another writes just now will be there, too.
        return saved.declined.keys() <= {"busy"}

    # --- the rest

    def clear(self) -> Cleared:
        """Drop the whole namespace from every tier of the node."""
        with self._lock:
            surveys, self._surveys = list(self._surveys.values()), OrderedDict()
        for survey in surveys:
            survey.release()
        return self.client.clear(wait_s=self._pace.wait_s + CLEAR_S)

    def close(self) -> None:
        """End the session. Idempotent."""
        self.client.close()

    def _fault(self, reason: str) -> None:
        self.figures.add(f"faults:{reason.partition(':')[0]}")
