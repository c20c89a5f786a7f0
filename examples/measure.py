"""Measure methods against plain decoding from Python: the same runner, intervals and table as `outrider bench`."""

from outrider import LLM
from outrider.bench.runner import RunConfig
from outrider.bench.session import Bench, run_bench
from outrider.bench.settings import Grid
from outrider.bench.suites import Item, Suite
from outrider.bench.table import table
from outrider.bundled import bundled_path

llm = LLM(method="draft-model", draft=bundled_path("draft"))
suite = Suite("mine", (Item(text="Once upon a time, there was a"), Item(text="One day, a little dog")))
grid = Grid(methods=["draft-model", "prompt-lookup"], lengths=[3])
outcome = run_bench(llm, Bench(grid, [suite], run=RunConfig(num_rounds=2, max_tokens=24), curves=False))
print(table(outcome.lines, outcome.skipped))
print("fastest:", outcome.fastest.label)
