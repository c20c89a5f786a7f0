"""Every bug of the gallery planted in a copy of the package, and `outrider audit` run on the copy: does it say so?

    python benchmarks/audit_gallery.py [--only WORD] [--tokens 400]

Each line changes a few characters of one file of a fresh copy. The audit must exit with 1 on it, and with 0 on the unchanged
copy with the same arguments. Prints which part of the audit noticed; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "outrider"
REJECTION = ("draft-model", "--acceptance", "rejection")
BLOCK = ("draft-model", "--acceptance", "block")
RECURSIVE = ("draft-tree", "--acceptance", "recursive", "-O", "num_draft_tokens=3", "-O", "num_tree_nodes=8")
TRAVERSAL = ("draft-tree", "--acceptance", "traversal", "-O", "num_draft_tokens=3", "-O", "num_tree_nodes=8")
KSEQ = ("spectr", "-O", "num_draft_tokens=3")


@dataclass(frozen=True)
class Plant:
    """A bug: what it is, where it goes, and which method shows it."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    """(file, old text, new text)"""
    method: tuple[str, ...]


def plant(name: str, file: str, old: str, new: str, method: tuple[str, ...]) -> Plant:
    return Plant(name, ((file, old, new),), method)


GALLERY = (
    plant(
        "greedy draft token, softmax q in ratio and residual", "drafters/trees/chain.py",
        "    return law.draw(torch", "    return law.probs.argmax(-1)\n    return law.draw(torch", REJECTION,
    ),
    plant(
        "top-k children verified as if drawn without replacement", "drafters/trees/candidates.py",
        "return sampled_scores(law, context, lanes=lanes)", "return plain_scores(law, context)", RECURSIVE,
    ),
    plant(
        "a target sample per candidate, longest match wins", "acceptance/coupled.py",
        "        tree, choices = draft.tree, law.choices\n",
        "        tree, choices = draft.tree, law.choices\n"
        "        nodes = __import__('torch').arange(tree.num_nodes).expand(tree.batch_size, -1)\n"
        "        choices = choices if law._sampler.all_greedy else law.draw(nodes)\n", ("draft-tree",),
    ),
    Plant(
        "children without replacement, q not renormalised after each",
        (("acceptance/recursive.py", "return weights / weights.sum() if weights.sum() > 0 else torch.zeros_like(weights)",
          "return weights"),
         ("acceptance/recursive.py", "return torch.where(total > 0, weights / total, 0.0)", "return weights")), RECURSIVE,
    ),
    plant(
        "independent children, duplicates removed, verified as independent", "drafters/model/spectr.py",
        "return (draft, numbers) if self.draws is Draws.IID else merged(draft, numbers)",
        "less, numbers = merged(draft, numbers); return Draft(less.tree, Draws.IID, less.q), numbers", KSEQ,
    ),
    plant(
        "sampled siblings verified in order of q, not as drawn", "drafters/trees/candidates.py",
        "        return best.indices, best.values > -torch.inf",
        "        order = law.probs.gather(2, best.indices).argsort(-1, descending=True)\n"
        "        return best.indices.gather(2, order), (best.values > -torch.inf).gather(2, order)", RECURSIVE,
    ),
    plant(
        "guesses sampled at another temperature than the q reported", "core/sampling.py",
        "        return (self.logits + gumbel).argmax(-1)", "        return (self.logits / 2 + gumbel).argmax(-1)", REJECTION,
    ),
    plant(
        "residual from unprocessed p", "acceptance/rejection.py",
        "        owed = torch.where(complete, p_end, surplus(p_end, row_at(q, ends)))",
        "        raw = row_at(law.adjusted.softmax(-1), ends)\n"
        "        owed = torch.where(complete, p_end, surplus(raw, row_at(q, ends)))", REJECTION,
    ),
    plant(
        "bonus token from unprocessed p", "acceptance/rejection.py",
        "        owed = torch.where(complete, p_end, surplus(p_end, row_at(q, ends)))",
        "        raw = row_at(law.adjusted.softmax(-1), ends)\n"
        "        owed = torch.where(complete, raw, surplus(p_end, row_at(q, ends)))", REJECTION,
    ),
    plant(
        "p sampled after a rejection, no residual", "acceptance/residual.py",
        "    return (p - q).clamp(min=0)", "    return p.clone()", REJECTION,
    ),
    plant(
        "residual with p and q exchanged", "acceptance/residual.py",
        "    return (p - q).clamp(min=0)", "    return (q - p).clamp(min=0)", REJECTION,
    ),
    Plant(
        "ratio with p and q exchanged",
        (("acceptance/residual.py", "return p / q if p < q else float(p > 0)", "return q / p if q < p else float(q > 0)"),
         ("acceptance/rejection.py", "coins * q_guess < p_guess", "coins * p_guess < q_guess")), REJECTION,
    ),
    plant(
        "u q <= p with q = 0", "acceptance/rejection.py", "coins * q_guess < p_guess", "coins * q_guess <= p_guess", REJECTION,
    ),
    Plant(
        "block: h of the last position as of the others",
        (("acceptance/block.py", "            if node == last:", "            if node == last and node == 0:"),
         ("acceptance/block.py", "torch.where(nodes < last, keep, supply)", "keep")), BLOCK,
    ),
    Plant(
        "block: pi not clamped at 1",
        (("acceptance/block.py",
          "        supply.append(ratio(supply[-1] * float(row.p[node, guess]), float(row.q[node, guess])))",
          "        supply.append(supply[-1] * float(row.p[node, guess]) / max(float(row.q[node, guess]), 1e-30))"),
         ("acceptance/block.py",
          "        supply.append(torch.where(scaled < q_next, scaled / q_next, (scaled > 0).to(scaled.dtype)))",
          "        supply.append(scaled / q_next.clamp(min=1e-30))")), BLOCK,
    ),
    Plant(
        "block: residual without pi",
        (("acceptance/block.py", "return RowVerdict(path_of(row, node), draw_row(owed, p, source), rejected=node < last)",
          "return RowVerdict(path_of(row, node), draw_row(p if node == last else surplus(p, row.q[node]), p, source), "
          "rejected=node < last)"),
         ("acceptance/block.py", "        owed = surplus(supply.gather(1, ends[:, None]) * p_end, row_at(q, ends))",
          "        owed = surplus(p_end, row_at(q, ends))")), BLOCK,
    ),
    Plant(
        "block: one coin for all positions",
        (("acceptance/block.py", "source.bernoulli(keep, node)", "source.bernoulli(keep, 1)"),
         ("acceptance/block.py", "noise.uniform(Purpose.ACCEPT, nodes)", "noise.uniform(Purpose.ACCEPT, nodes * 0)")), BLOCK,
    ),
    plant(
        "coins and guesses by output position, met again in the next round", "core/rng.py",
        "        return make_key(self.seeds[:, None], self.positions[:, None], purpose, lanes)",
        "        return make_key(self.seeds[:, None], self.positions[:, None] + lanes, purpose, 0)", BLOCK,
    ),
    plant(
        "delta: one coin for all siblings", "acceptance/delta.py",
        "        coins = noise.uniform(Purpose.ACCEPT, guess_lanes(tree))",
        "        coins = noise.uniform(Purpose.ACCEPT, guess_lanes(tree) * 0 + 1)", ("prompt-lookup", "--acceptance", "delta"),
    ),
    plant(
        "coupled: target noise redrawn after a drafter has seen it", "core/rng.py",
        "make_key(self.seeds[:, None], self.positions[:, None] + depths, Purpose.TARGET)",
        "make_key(self.seeds[:, None], self.positions[:, None], Purpose.TARGET, depths)", ("draft-model",),
    ),
    plant(
        "independent siblings, residual not updated on a duplicate", "acceptance/recursive.py",
        "                rest = owed / owed.sum() if owed.sum() > NOTHING else rest",
        "                rest = owed / owed.sum() if owed.sum() > NOTHING and guess not in elders else rest", RECURSIVE,
    ),
    plant(
        "siblings without replacement verified by k-SEQ", "drafters/model/spectr.py",
        "drawing=Drawing(Draws.IID))",
        "drawing=Drawing(Draws.WITHOUT_REPLACEMENT)); draft = Draft(draft.tree, Draws.IID, draft.q)", KSEQ,
    ),
    Plant(
        "k-SEQ with rho = 1",
        (("acceptance/kseq.py", "    low, high = 1.0, float(max(count, 1))\n", "    low, high = 1.0, 1.0\n"),
         ("acceptance/kseq.py", "    low, high = torch.ones_like(count), count.clamp(min=1)",
          "    low, high = torch.ones_like(count), torch.ones_like(count)")), KSEQ,
    ),
    Plant(
        "traversal: supply not updated after a dropped child",
        (("acceptance/traversal.py", "        supply = total / (total + 1 - supply) if total + 1 - supply > 0 else 1.0\n", ""),
         ("acceptance/traversal.py", "        self.supply = self.supply.scatter(1, above, less)\n", "")), TRAVERSAL,
    ),
    Plant(
        "traversal: law not updated after a dropped child",
        (("acceptance/traversal.py", "        p = owed / total if total > NOTHING else p\n", ""),
         ("acceptance/traversal.py",
          "        self._replace(self.p, above, torch.where(dropped & (total > NOTHING), owed / total, p))\n", "")), TRAVERSAL,
    ),
    plant(
        "a sampled guess dropped for its low confidence", "drafters/trees/chain.py",
        "    return Draft(", "    if draws is Draws.IID and laws:\n"
        "        sure = [law.probs[:, 0].gather(1, chain[:, i + 1 : i + 2])[:, 0] >= 0.3 for i, law in enumerate(laws)]\n"
        "        depths = [next((i for i in range(depth) if not sure[i][b]), depth) for b, depth in enumerate(depths)]\n"
        "        tree = TokenTree.chain(chain, [depth + 1 for depth in depths])\n"
        "    return Draft(", REJECTION,
    ),
    plant(
        "engine: the position after an accepted run is off by one", "engine/step.py",
        "positions = torch.tensor([row.num_output for row in batch.rows], device=device)",
        "positions = torch.tensor([row.num_output + row.stats.num_accepted for row in batch.rows], device=device)",
        ("draft-model",),
    ),
)  # fmt: skip


def copy_of(folder: Path) -> Path:
    """A copy of the package; the bundled weights are linked."""
    package = folder / "outrider"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__", "bundled"))
    (package / "bundled").symlink_to(SOURCE / "bundled")
    return package


def sow(package: Path, bug: Plant) -> None:
    for file, old, new in bug.edits:
        path = package / file
        text = path.read_text()
        if text.count(old) < 1:
            raise SystemExit(f"{bug.name}: {file} no longer holds {old!r}; bring the plant up to date")
        path.write_text(text.replace(old, new))


def run_audit(folder: Path, method: tuple[str, ...], tokens: int) -> tuple[int, list[str], str]:
    """Exit code, the parts that failed, and what went wrong if the audit itself did."""
    command = [sys.executable, "-m", "outrider", "audit", "bundled", *method, "--dtype", "float32", "--json"]
    command += ["--tokens", str(tokens), "--prompts", "3", "-n", "32"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        return done.returncode, [], done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, [finding["part"] for finding in findings if finding["outcome"] == "FAIL"], ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="bugs whose name holds this")
    parser.add_argument("--tokens", type=int, default=400)
    arguments = parser.parse_args()
    bugs = [bug for bug in GALLERY if arguments.only in bug.name]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        clean = copy_of(Path(name) / "clean").parent
        for method in dict.fromkeys(bug.method for bug in bugs):
            code, parts, trouble = run_audit(clean, method, arguments.tokens)
            said = f"without a bug: {' '.join(method[:3])}"
            print(f"{'ok' if code == 0 else 'FALSE ALARM':<12}{said:<70}{parts or trouble or ''}", flush=True)
            rows.append({"bug": None, "method": method, "code": code, "parts": parts})
    for bug in bugs:
        with tempfile.TemporaryDirectory() as name:
            package = copy_of(Path(name) / "sown")
            sow(package, bug)
            code, parts, trouble = run_audit(package.parent, bug.method, arguments.tokens)
        said = "caught" if code == 1 and parts else "crashed" if code not in (0, 1) or trouble else "MISSED"
        print(f"{said:<12}{bug.name:<70}{', '.join(parts) or trouble}", flush=True)
        rows.append({"bug": bug.name, "method": bug.method, "code": code, "parts": parts})
    missed = [row["bug"] for row in rows if row["bug"] and row["code"] != 1]
    print(json.dumps({"planted": len(bugs), "missed": missed, "rows": rows}))


if __name__ == "__main__":
    main()
