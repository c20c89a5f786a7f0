"""Restricts trained heads to fewer tokens, by leaving out the rows of the others (FR-Spec, arXiv 2502.14856).

Nothing is trained again. The dropped tokens were rarely guessed, and the output matrix is much of the heads' cost.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.models.heads.folder import module_of
from outrider.models.heads.head import Head
from outrider.models.heads.kinds import KINDS
from outrider.models.heads.reading import TARGET_FOLDER_KEYS


def trimmed(head: Head, ids: Tensor) -> Head:
    """Heads restricted to the target's tokens ``ids``, ascending. Tokens they already lacked stay out."""
    config, kind = head.config, KINDS[head.config.kind]
    kept = torch.isin(head.target_ids.cpu(), ids).nonzero()[:, 0]
    if not len(kept):
        raise OptionError(f"{config.kind} heads cannot produce any of these tokens; choose them from text of the heads' target")
    size = len(kept)
    ours = config.raw.get("outrider", {})
    own = {key: value for key, value in ours.items() if key not in TARGET_FOLDER_KEYS}  # the folder is complete
    raw = {**config.raw, "draft_vocab_size": size, **({"outrider": own} if own else {})}
    small = module_of(replace(config, draft_vocab_size=size, raw=raw))
    state = head.state_dict()
    if small.has_readout and "lm_head.weight" not in state and "lm_head.weight" in small.state_dict():
        state["lm_head.weight"] = state["embed_tokens.weight"]
    rows = {name: tensor[kept] if name.startswith(kind.spoken) else tensor for name, tensor in state.items()}
    small.load_state_dict({**rows, "d2t": head.target_ids.cpu()[kept] - torch.arange(size)})
    return small.requires_grad_(False)
