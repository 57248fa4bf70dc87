"""Two tiny trained models whose memory lives in their recurrent states, and the task they learnt.

See README.md beside this file. Importing this package needs no torch; loading a model does.
"""

from tiercache.testing.recall.model import (
    MODELS,
    VOCABULARY,
    fixture_path,
    load_model,
    weights_path,
)
from tiercache.testing.recall.task import Episode, episode

__all__ = [
    "MODELS",
    "VOCABULARY",
    "Episode",
    "episode",
    "fixture_path",
    "load_model",
    "weights_path",
]
