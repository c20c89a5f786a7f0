"""Training of drafters: heads on the target's features, and draft models on its laws."""

from __future__ import annotations

from outrider.train.data import Corpus, Document, read_documents
from outrider.train.loop import Settings, train
from outrider.train.objective import HeadObjective, HeadSettings, Objective

__all__ = ["Corpus", "Document", "HeadObjective", "HeadSettings", "Objective", "Settings", "read_documents", "train"]
