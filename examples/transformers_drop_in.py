"""A model held by transformers: plain ``generate``, the same call with Outrider's loop, and ``attach`` for every later call."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider.transformers
from outrider.bundled import bundled_path

model: Any = AutoModelForCausalLM.from_pretrained(bundled_path("target"), dtype=torch.float32)
draft = AutoModelForCausalLM.from_pretrained(bundled_path("draft"), dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(bundled_path("target"), padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
prompts = tokenizer(["Once upon a time", "The little dog"], return_tensors="pt", padding=True)
options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}

plain = model.generate(**prompts, **options)
loop = outrider.transformers.generate(method="draft-model", draft=draft, num_draft_tokens=4)
fast = model.generate(**prompts, **options, custom_generate=loop)
for text, stats in zip(tokenizer.batch_decode(fast, skip_special_tokens=True), loop.stats, strict=True):
    print(f"{stats.tokens_per_pass:.2f} tokens per pass   {text[:60]!r}")
assert torch.equal(plain, fast)

outrider.transformers.attach(model, method="suffix")  # no draft model: guesses are copied from the text so far
assert torch.equal(model.generate(**prompts, **options), plain)
outrider.transformers.detach(model)
