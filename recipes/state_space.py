"""State-space models of the Python standard library's bytes: a target, and a small Mamba-2 that learned from it.

The target is a Mamba-2, or a hybrid of Mamba-2 and attention layers (``BambaForCausalLM``). The draft learns the target's
laws by KL divergence alone, as STree's does (arXiv 2505.14969). Tokens are bytes. A tenth of the files is held out, chosen by
a hash of the name. Heads learn from the same tokens:

    python recipes/state_space.py --family mamba2 --out build/states/mamba2        # one minute on a GPU
    outrider train eagle3 --target build/states/mamba2/target --data build/states/mamba2/train.npy --out build/states/mamba2
    python benchmarks/state_space_drafts.py --models build/states/mamba2
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NUM_BYTES = 256
ROW_LEN = 256


def mamba(width: int, num_layers: int) -> Any:
    """A Mamba-2 with heads of 64 and a state of 32."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": num_layers, "expand": 2, "num_heads": width // 32}
    scan: dict[str, Any] = {"head_dim": 64, "state_size": 32, "n_groups": 1, "chunk_size": 32}
    ends: dict[str, Any] = {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": True}
    return Mamba2ForCausalLM(Mamba2Config(vocab_size=NUM_BYTES, **sizes, **scan, **ends))


def hybrid(width: int, num_layers: int) -> Any:
    """A model with attention in every fourth layer, and an MLP in all."""
    from transformers import BambaConfig, BambaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": num_layers, "intermediate_size": 2 * width}
    scan: dict[str, Any] = {"mamba_n_heads": width // 32, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_chunk_size": 32}
    heads: dict[str, Any] = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
    ends: dict[str, Any] = {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": True}
    layers: dict[str, Any] = {"attn_layer_indices": list(range(2, num_layers, 4)), "max_position_embeddings": 4096}
    return BambaForCausalLM(BambaConfig(vocab_size=NUM_BYTES, **sizes, **scan, **heads, **ends, **layers))


FAMILIES = {"mamba2": mamba, "bamba": hybrid}


def rows_of_library(most_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """[N, ROW_LEN] bytes of the library's modules to learn from, and of those held out."""
    parts = {False: b"", True: b""}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        is_held_out = hashlib.sha256(path.name.encode()).digest()[0] < 26
        if not {"site-packages", "test"} & set(path.parts) and len(parts[is_held_out]) < most_bytes:
            parts[is_held_out] += path.read_bytes()
    learned, held_out = (np.frombuffer(parts[apart][:most_bytes], np.uint8) for apart in (False, True))
    return _rows(learned), _rows(held_out)


def _rows(tokens: np.ndarray) -> np.ndarray:
    return tokens[: len(tokens) // ROW_LEN * ROW_LEN].reshape(-1, ROW_LEN)


def loss_of(model: Any, ids: Tensor, teacher: Any = None) -> Tensor:
    """Nats per byte, or the divergence from the teacher's laws."""
    logits = model(input_ids=ids).logits[:, :-1].float()
    if teacher is None:
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    with torch.no_grad():
        taught = teacher(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1).flatten(0, 1), taught.flatten(0, 1), log_target=True, reduction="batchmean")


def train(model: Any, rows: np.ndarray, arguments: argparse.Namespace, name: str, teacher: Any = None) -> dict[str, Any]:
    """Adam with a warm-up and a cosine to zero, for at most so many seconds."""
    device, chance = arguments.device, torch.Generator().manual_seed(0)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate, betas=(0.9, 0.95), weight_decay=0.01)
    began, step, share = time.monotonic(), 0, 0.0
    while share < 1:
        ids = torch.from_numpy(rows[torch.randint(len(rows), (arguments.batch,), generator=chance).numpy()].astype(np.int64))
        loss = loss_of(model, ids.to(device), teacher)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = arguments.rate * min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * share))
        optimizer.step()
        if step % 100 == 0:
            print(f"{name}: step {step}, {loss.item():.3f} nats, {time.monotonic() - began:.0f} s", flush=True)
        step += 1
        share = max(step / arguments.steps, (time.monotonic() - began) / arguments.seconds)
    return {"steps": step, "seconds": round(time.monotonic() - began), "parameters": sum(p.numel() for p in model.parameters())}


@torch.no_grad()
def held_out_nats(model: Any, rows: np.ndarray, device: str) -> float:
    parts = torch.from_numpy(rows[:256].astype(np.int64)).split(32)
    return round(sum(float(loss_of(model, part.to(device))) for part in parts) / len(parts), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="mamba2", choices=list(FAMILIES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--draft-width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="ends each training earlier")
    parser.add_argument("--most-bytes", type=int, default=8_000_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    learned, held_out = rows_of_library(arguments.most_bytes)
    arguments.out.mkdir(parents=True, exist_ok=True)
    np.save(arguments.out / "train.npy", learned.astype(np.uint16))
    np.save(arguments.out / "test.npy", held_out.astype(np.uint16))
    target, draft = FAMILIES[arguments.family](arguments.width, arguments.layers), mamba(arguments.draft_width, 1)
    report: dict[str, Any] = {"family": arguments.family, "bytes": int(learned.size)}
    for name, model, teacher in (("target", target, None), ("draft", draft, target)):
        found = train(model, learned, arguments, name, teacher)
        report[name] = {**found, "held_out_nats": held_out_nats(model.eval(), held_out, arguments.device)}
        model.float().save_pretrained(arguments.out / name)
    (arguments.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
