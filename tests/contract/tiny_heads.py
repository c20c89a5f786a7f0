"""Heads with random weights for the tiny target of ``tiny_pair.py``: they guess badly, and must change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_pair import _RAW, VOCAB

from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.folder import new_config, new_head, save_head
from outrider.models.heads.head import Head

CHANGES: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 4},
    "hydra": {"num_heads": 4, "num_blocks": 2, "own_readouts": False, "prefix": True},
    "eagle1": {},
    "eagle3": {"draft_vocab_size": 40},
    "fspad": {},
    "falcon": {"block_len": 2},
    "chimera": {"num_heads": 4},
    "mlp-speculator": {"num_heads": 4, "inner_dim": 24, "scale_input": True},
    "redrafter": {"exit_dim": 32, "num_blocks": 2},
    "mtp": {"num_heads": 4},
    "mtp-parallel": {"num_heads": 4},
    "l-mtp": {"num_heads": 4, "stride": 2},
    "p-eagle": {"num_heads": 4, "num_layers": 2, "draft_vocab_size": 40, "mask_token_id": 3},
    "dflash": {"num_heads": 4, "num_layers": 2, "mask_token_id": 3},
    "dspark": {"num_heads": 4, "num_layers": 2, "mask_token_id": 3, "markov_rank": 8, "markov_head_type": "rnn"},
    "longspec": {"draft_window": 5},
    "msd": {"image_token_id": 7},
    "vispec": {"image_token_id": 7, "num_visual_queries": 3},
    "specvlm": {"image_token_id": 7, "visual_ratio": 2},
}


def random_head(kind: str, *, seed: int = 0, **more: Any) -> Head:
    """Heads of a kind; ``more`` overrides what ``CHANGES`` says."""
    torch.manual_seed(seed)
    config = new_config(kind, _RAW, **{**CHANGES[kind], **more})
    ends = EmbeddingAndOutput(torch.randn(VOCAB, 32), torch.ones(32), torch.randn(VOCAB, 32) / 6, tied=False)
    ids = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
    head = new_head(config, ends, ids=ids, seed=seed)
    with torch.no_grad():  # parts that start at zero would hide mistakes
        for parameter in head.parameters():
            if not parameter.any():
                parameter.normal_(std=0.2)
    return head


def random_heads(kind: str, folder: Path, **more: Any) -> str:
    """The same as a folder."""
    save_head(random_head(kind, **more), folder, dtype=torch.float32)
    return str(folder)
