"""Memories that outlive requests: a cleared one is as good as new, and a drafter names all that it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_pair import tiny_model

from outrider.core.lasting_memory import LastingMemory
from outrider.drafters.copying.ngram_memory import NgramMemory
from outrider.drafters.copying.suffix_memory import SharedText, SuffixMemory
from outrider.drafters.itself.exit_statistics import ExitStatistics
from outrider.drafters.itself.skip_search import SkipSearch, SkipSpace
from outrider.drafters.itself.successors import SuccessorTable
from outrider.methods import compose

TEXT = [1, 2, 3, 1, 2, 4, 1, 2, 3] * 3


def learned_ngrams() -> tuple[NgramMemory, Any]:
    memory = NgramMemory(vocab_size=9)
    memory.learn(TEXT, 0)
    return memory, lambda m: (m.num_entries, m.followers([1, 2]))


def learned_texts() -> tuple[SuffixMemory, Any]:
    memory = SuffixMemory(vocab_size=9)
    memory.share(SharedText(0), TEXT)
    return memory, lambda m: (m.num_tokens, [automaton.match([1, 2])[1] for automaton in m.automata])


def learned_successors() -> tuple[SuccessorTable, Any]:
    table = SuccessorTable(9, 3)
    table.write(torch.tensor([1, 2]), torch.randn(2, 9))
    table.num_idle = 3
    return table, lambda t: (t.num_known, t.num_idle, t.ids.tolist(), t.logits.tolist())


def learned_exits() -> tuple[ExitStatistics, Any]:
    memory = ExitStatistics([1, 2], 4)
    memory.learn(1, torch.tensor([True, True, True]), torch.tensor([0.9, 0.8, 0.9]))
    memory.num_rounds = 5
    return memory, lambda m: (m.alpha(1), m.threshold(1), m.num_rounds, m.choose(4))


def learned_skips() -> tuple[SkipSearch, Any]:
    search = SkipSearch(SkipSpace(8, 0.45))
    for score in (0.2, 0.6):
        search.record(search.suggest(), score)
    return search, lambda s: (s.best, s.score, s.num_trials, s.num_stale, s.suggest())


@pytest.mark.parametrize("learned", [learned_ngrams, learned_texts, learned_successors, learned_exits, learned_skips])
def test_a_cleared_memory_is_as_good_as_new(learned: Any) -> None:
    memory, look = learned()
    fresh = {
        NgramMemory: lambda: NgramMemory(vocab_size=9),
        SuffixMemory: lambda: SuffixMemory(vocab_size=9),
        SuccessorTable: lambda: SuccessorTable(9, 3),
        ExitStatistics: lambda: ExitStatistics([1, 2], 4),
        SkipSearch: lambda: SkipSearch(SkipSpace(8, 0.45)),
    }[type(memory)]
    assert isinstance(memory, LastingMemory) and look(memory) != look(fresh()), "it had learned something"
    memory.clear()
    assert look(memory) == look(fresh())


def test_drafters_name_their_memories() -> None:
    target, draft = tiny_model(), tiny_model()

    def kinds(name: str, **options: Any) -> list[str]:
        return [type(memory).__name__ for memory in compose(name, target, draft=draft, options=options).drafter.memories]

    assert kinds("draft-model") == [] == kinds("prompt-lookup")
    assert kinds("suffix") == ["SuffixMemory"] and kinds("suffix", memory_tokens=0) == []
    assert kinds("ngram-cache") == ["NgramMemory"] and kinds("token-recycling") == ["SuccessorTable"]
    assert kinds("swift") == ["SkipSearch"] and kinds("del") == ["ExitStatistics"]
    assert kinds("hybrid", parts="suffix,ngram-cache") == ["SuffixMemory", "NgramMemory"]
    assert kinds("rasd", retriever="ngram-cache") == ["NgramMemory"]
    assert kinds("cascade", inner="suffix", memory_tokens=4096) == ["SuffixMemory"]
