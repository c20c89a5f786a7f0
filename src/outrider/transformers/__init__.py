"""Speculative decoding inside Hugging Face ``generate``, for a model that is already in memory.

    import outrider.transformers
    model.generate(**inputs, custom_generate=outrider.transformers.generate(method="suffix"))
    outrider.transformers.attach(model, method="suffix")        # every later model.generate, pipelines included

transformers prepares the call as always: lengths, padding, logits processors, stopping criteria. Outrider replaces its loop.
The text is the same in float32, greedy and sampled with the same seed of torch. In 16 bits rounding decides near ties, and
``RoundingWarning`` says so. What cannot be honoured is refused by name.
"""

from outrider.transformers.attached import attach, detach
from outrider.transformers.drop_in import DropIn, generate
from outrider.transformers.hf_held import RoundingWarning
from outrider.transformers.hub_folder import write_folder

__all__ = ["DropIn", "RoundingWarning", "attach", "detach", "generate", "write_folder"]
