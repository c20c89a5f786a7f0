"""GGUF, the file format of llama.cpp, read with NumPy and PyTorch alone.

    file = read_gguf("model.Q4_K_M.gguf")      header, metadata, table of tensors; nothing unpacked yet
    config = hf_config(file)                   as config.json
    for name, tensor in hf_tensors(file): ...  as a Hugging Face state dict, dequantised
    tokenizer = gguf_tokenizer(file)           a ``tokenizers.Tokenizer``

``reader`` reads the container, ``quants`` the storage types, ``convert`` undoes what llama.cpp's converter did to the model,
and ``tokenizer`` makes the tokenizer.
"""

from outrider.models.gguf.convert import hf_config, hf_tensors
from outrider.models.gguf.quants import STORAGE_TYPES, StorageType, dequantise
from outrider.models.gguf.reader import GGUFFile, TensorEntry, read_gguf
from outrider.models.gguf.tokenizer import chat_template, gguf_tokenizer, special_tokens, token_ids

__all__ = [
    "STORAGE_TYPES",
    "GGUFFile",
    "StorageType",
    "TensorEntry",
    "chat_template",
    "dequantise",
    "gguf_tokenizer",
    "hf_config",
    "hf_tensors",
    "read_gguf",
    "special_tokens",
    "token_ids",
]
