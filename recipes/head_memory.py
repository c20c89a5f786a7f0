"""What a training step of n heads needs: the most memory of a process while it computes losses and gradients.

Medusa heads that share the target's output matrix, on a random target of width 256. A further head adds its states, [places, H]
a few times. Logits, [places, V], exist for 2^24 / V places of one head at a time and again in the backward pass. Mode `keep`
keeps all of them instead, as a plain implementation does. Every measurement is a process of its own (Linux).

    python recipes/head_memory.py            # n = 1, 4, 8 heads, vocabularies of 4096 and 32768 tokens, both ways
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import torch

from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.folder import new_config, new_head
from outrider.models.random_decoder import tiny_config, tiny_decoder
from outrider.train.data import Document
from outrider.train.features import DocumentRows, compute
from outrider.train.objective import HeadObjective, HeadSettings

WINDOW = 512
RAW = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
}


def peak_mib() -> float:
    """The most this process has held since the mark was last cleared."""
    status = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in status if line.startswith("VmHWM"))) / 1024


def step_mib(num_heads: int, vocab_size: int, num_windows: int, *, keep: bool) -> float:
    """Added by one forward and backward pass, gradients included."""
    raw = {**RAW, "vocab_size": vocab_size}
    target = tiny_decoder(tiny_config(**raw))
    norm, readout = torch.ones(256), torch.randn(vocab_size, 256) / 16
    head = new_head(
        new_config("medusa", raw, num_heads=num_heads, own_readouts=False),
        EmbeddingAndOutput(readout, norm, readout, tied=False),
    )
    head.freeze()
    settings = HeadSettings(num_depths=num_heads, loss="mixed")
    objective = HeadObjective(head, target, settings, chunk=1 << 40 if keep else 1 << 24, recompute=not keep)
    tokens = torch.randint(vocab_size, (num_windows, WINDOW), generator=torch.Generator().manual_seed(0)).tolist()
    documents = [Document(tuple(row)) for row in tokens]
    rows = DocumentRows(compute(target, documents, head.config.taps), documents, row_len=WINDOW, last=target.num_layers)
    batch = rows.packed(head.config.taps)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_mib()
    objective(batch).loss.backward()
    return peak_mib() - before


def main() -> None:
    """Each measurement in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", type=int, help="of one measurement, in this process")
    parser.add_argument("--vocab", type=int, default=4096, help="of it")
    parser.add_argument("--keep", action="store_true", help="keep all logits in it")
    parser.add_argument("--windows", type=int, default=4, help="of 512 tokens")
    arguments = parser.parse_args()
    if arguments.heads is not None:
        print(step_mib(arguments.heads, arguments.vocab, arguments.windows, keep=arguments.keep))
        return
    for vocab, keep in product((4096, 32768), (False, True)):
        found = dict[int, int]()
        for count in (1, 4, 8):
            asked = ["--heads", str(count), "--vocab", str(vocab), "--windows", str(arguments.windows)]
            command = [sys.executable, __file__, *asked, *(["--keep"] if keep else [])]
            found[count] = round(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        row = {"vocabulary": vocab, "keep": keep, "MiB": found, "MiB_per_further_head": round((found[8] - found[1]) / 7, 1)}
        print(json.dumps({**row, "MiB_of_logits": arguments.windows * WINDOW * vocab * 4 / 2**20}), flush=True)


if __name__ == "__main__":
    main()
