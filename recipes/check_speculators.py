"""The bundled EAGLE-3 head in the speculators package: exported, loaded there, and held against our own logits.

The package lives in an environment of its own (it pins other versions), so its part is a worker that sees files only.

    python -m venv ENV && ENV/bin/pip install speculators
    python recipes/check_speculators.py --python ENV/bin/python
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.core.params import SamplingParams
from outrider.models.heads import load_head
from outrider.models.heads.export import export_head
from outrider.train.data import Document
from outrider.train.features import DocumentRows, compute

DEPTHS = 5
PROMPT = "Once upon a time, there was a little fox who"


def write_case(folder: Path) -> None:
    """The export, a text of the target's with its states, and our logits at every place and depth."""
    llm = LLM(method="plain", dtype="float32", device="cpu")
    prompt = llm.codec.encode(PROMPT)
    text = llm.generate([prompt], SamplingParams(max_tokens=100, ignore_eos=True))[0].token_ids
    head = load_head(bundled_path("heads/eagle3"), llm.target)
    export_head(head, folder / "exported", form="speculators", target_name=bundled_path("target"))
    document = Document((*prompt, *text))
    rows = DocumentRows(compute(llm.target, [document], head.config.taps), [document], row_len=8, last=llm.target.num_layers)
    batch = rows.packed(head.config.taps)
    with torch.no_grad():
        logits = [head.readout(depth, states) for depth, states in enumerate(head.depths(batch, DEPTHS))]
    case = {"features": batch.features, "tokens": batch.shifted(batch.tokens, 1), "logits": torch.stack(logits)}
    save_file({name: tensor.contiguous() for name, tensor in case.items()}, folder / "case.safetensors")


def main() -> None:
    """Write the case, let the package answer, print what it found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True, help="of the environment that has the speculators package")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_case(Path(name))
        worker = Path(__file__).with_name("check_speculators_worker.py")
        done = subprocess.run([arguments.python, str(worker), name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the package could not run the head:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"speculators {found['version']} loads {found['class']}; {found['places']} places, {DEPTHS} depths")
    for depth, (agree, distance) in enumerate(zip(found["agree"], found["distance"], strict=True)):
        print(f"  depth {depth}: likeliest tokens agree at {agree:.2%}, largest difference of logits {distance:.3g}")


if __name__ == "__main__":
    main()
