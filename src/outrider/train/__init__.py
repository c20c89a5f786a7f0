"""Training of drafters: heads on the target's features, and draft models on its laws.

``loop.py`` is the one training loop, and ``objective.py`` is what a method brings to it.

    text              data, regenerate, vocabulary, uniform_sample
    the target        features, stored, sharded, taught_states: its states, computed when needed or kept on disk
    the run           run, state, devices, provenance, plot
    what is trained   kinds: the list; draft_lm, distill, divergence, sorted, prune: draft models; lora, layerskip: the target
                      objective_joint: heads and target; acceptance, judge, specee: small networks that judge
    while serving     online, pace, pupils
"""

from __future__ import annotations

from outrider.train.data import Corpus, Document, read_documents
from outrider.train.loop import Settings, train
from outrider.train.objective import HeadObjective, HeadSettings, Objective

__all__ = ["Corpus", "Document", "HeadObjective", "HeadSettings", "Objective", "Settings", "read_documents", "train"]
