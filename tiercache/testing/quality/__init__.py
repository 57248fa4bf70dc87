"""What a compressed state may cost a model: probes, scores, and the floors that they must reach.

Whoever runs the probes brings the logits; this package knows no model and no cache. Needs numpy.
"""

from tiercache.testing.quality.floors import Floor, Floors, failures, read_floors
from tiercache.testing.quality.probes import SEQUENCES, Probe, probes
from tiercache.testing.quality.scores import PLACES, Score, score

__all__ = [
    "PLACES",
    "SEQUENCES",
    "Floor",
    "Floors",
    "Probe",
    "Score",
    "failures",
    "probes",
    "read_floors",
    "score",
]
