"""Quantised matrices as each library lays them out, written number by number from its published definition.

``FORMS[kind]`` has a writer that rounds a matrix. It gives the tensors of the checkpoint and what they stand for, computed in
Python's own floats. Nothing here is shared with what it tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Written = tuple[Tensors, Tensor]


@dataclass(frozen=True)
class Rounded:
    """A matrix in whole numbers: w[o][i] = scale[o][g] * (code[o][i] - zero[o][g])."""

    codes: list[list[int]]
    scales: Tensor
    zeros: list[list[int]]
    group_of: list[int]

    def numbers(self) -> Tensor:
        scales = self.scales.double().tolist()
        rows = [
            [scales[o][g] * (code - self.zeros[o][g]) for code, g in zip(row, self.group_of, strict=True)]
            for o, row in enumerate(self.codes)
        ]
        return torch.tensor(rows, dtype=torch.float64)


def rounded(
    weight: Tensor, bits: int, *, group_len: int, symmetric: bool, dtype: torch.dtype, shuffled: bool = False
) -> Rounded:
    """Codes 0 .. 2^bits - 1. Shuffled: the groups of inputs are not neighbours."""
    num_inputs, most = weight.shape[1], (1 << bits) - 1
    group_of = [i // group_len for i in range(num_inputs)]
    if shuffled:
        group_of = [group_of[i] for i in torch.randperm(num_inputs, generator=torch.Generator().manual_seed(1)).tolist()]
    codes = [[0] * num_inputs for _ in weight]
    scales, zeros = torch.zeros(len(weight), num_inputs // group_len, dtype=dtype), list[list[int]]()
    for o, row in enumerate(weight.tolist()):
        zeros.append([])
        for g in range(num_inputs // group_len):
            inside = [row[i] for i in range(num_inputs) if group_of[i] == g]
            low, high = min(*inside, 0.0), max(*inside, 0.0)
            largest = max(map(abs, inside))
            scales[o, g] = 2 * largest / most if symmetric else (high - low) / most
            scale = float(scales[o, g])
            zero = (most + 1) // 2 if symmetric else min(most, max(0, round(-low / scale)))
            zeros[-1].append(zero)
            for i in range(num_inputs):
                if group_of[i] == g:
                    codes[o][i] = min(most, max(0, round(row[i] / scale) + zero))
    return Rounded(codes, scales, zeros, group_of)


def word(codes: list[int], bits: int) -> int:
    """Codes in one word of 32 bits, the first in the lowest, as a signed number."""
    whole = sum(code << (bits * place) for place, code in enumerate(codes))
    return whole - (1 << 32) if whole >= 1 << 31 else whole


def words(lines: list[list[int]], bits: int) -> Tensor:
    """[lines, length / (32 / bits)]"""
    many = 32 // bits
    return torch.tensor(
        [[word(line[k : k + many], bits) for k in range(0, len(line), many)] for line in lines], dtype=torch.int32
    )


def turned(lines: list[list[int]]) -> list[list[int]]:
    return [list(line) for line in zip(*lines, strict=True)]


def gptq(
    bits: int = 4, group_len: int = 32, *, symmetric: bool = False, version: int = 1, shuffled: bool = False
) -> tuple[dict[str, Any], Callable[[str, Tensor], Written]]:
    def write(stem: str, weight: Tensor) -> Written:
        size = group_len if group_len > 0 else weight.shape[1]
        of = rounded(weight, bits, group_len=size, symmetric=symmetric, dtype=torch.float16, shuffled=shuffled)
        less = [[(zero - (2 - version)) % (1 << bits) for zero in row] for row in of.zeros]
        found = {
            f"{stem}.qweight": words(of.codes, bits).T.contiguous(),
            f"{stem}.qzeros": words(turned(less), bits),
            f"{stem}.scales": of.scales.T.contiguous(),
            f"{stem}.g_idx": torch.tensor(of.group_of, dtype=torch.int32),
        }
        return found, of.numbers()

    settings = {"quant_method": "gptq", "bits": bits, "group_size": group_len, "desc_act": shuffled, "sym": symmetric}
    return {**settings, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}, write


def awq(group_len: int = 32) -> tuple[dict[str, Any], Callable[[str, Tensor], Written]]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def ordered(line: list[int]) -> list[int]:
        return [line[k + place] for k in range(0, len(line), 8) for place in order]

    def write(stem: str, weight: Tensor) -> Written:
        of = rounded(weight, 4, group_len=group_len, symmetric=False, dtype=torch.float16)
        found = {
            f"{stem}.qweight": words([ordered(line) for line in turned(of.codes)], 4),
            f"{stem}.qzeros": words([ordered(line) for line in turned(of.zeros)], 4),
            f"{stem}.scales": of.scales.T.contiguous(),
        }
        return found, of.numbers()

    return {"quant_method": "awq", "bits": 4, "group_size": group_len, "version": "gemm", "zero_point": True}, write


def compressed(
    layout: str, bits: int, strategy: str, *, group_len: int = 32, symmetric: bool = True, kind: str = "int"
) -> tuple[dict[str, Any], Callable[[str, Tensor], Written]]:
    def write(stem: str, weight: Tensor) -> Written:
        if kind == "float":
            return floats(stem, weight, strategy, "weight_scale", (16, 32))
        num_outputs, num_inputs = weight.shape
        size = group_len if strategy == "group" else num_inputs
        of = rounded(weight, bits, group_len=size, symmetric=symmetric, dtype=torch.bfloat16)
        middle = 1 << (bits - 1)
        found = {f"{stem}.weight_scale": of.scales}
        if layout == "pack-quantized":
            found[f"{stem}.weight_packed"] = words(of.codes, bits)
            found[f"{stem}.weight_shape"] = torch.tensor([num_outputs, num_inputs])
            if not symmetric:
                found[f"{stem}.weight_zero_point"] = words(turned(of.zeros), bits).T.contiguous()
        else:
            found[f"{stem}.weight"] = torch.tensor([[code - middle for code in row] for row in of.codes], dtype=torch.int8)
            if not symmetric:
                zeros = [[zero - middle for zero in row] for row in of.zeros]
                found[f"{stem}.weight_zero_point"] = torch.tensor(zeros, dtype=torch.int8)
        return found, of.numbers()

    scheme: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy}
    scheme |= {"group_size": group_len} if strategy == "group" else {}
    scheme |= {"block_structure": [16, 32]} if strategy == "block" else {}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}, write


def floats(stem: str, weight: Tensor, strategy: str, scale_name: str, block: tuple[int, int]) -> Written:
    """e4m3 floats: a scale for the matrix, for each output, or for blocks."""
    num_outputs, num_inputs = weight.shape
    high, wide = {"tensor": (num_outputs, num_inputs), "channel": (1, num_inputs), "block": block}[strategy]
    scales = torch.zeros(-(-num_outputs // high), -(-num_inputs // wide))
    codes, numbers = torch.zeros(weight.shape), torch.zeros(weight.shape, dtype=torch.float64)
    for b in range(scales.shape[0]):
        for g in range(scales.shape[1]):
            rows, columns = slice(b * high, (b + 1) * high), slice(g * wide, (g + 1) * wide)
            scales[b, g] = weight[rows, columns].abs().max() / 448
            codes[rows, columns] = weight[rows, columns] / scales[b, g]
            kept = [
                [e4m3(byte) for byte in row] for row in codes[rows, columns].to(torch.float8_e4m3fn).view(torch.uint8).tolist()
            ]
            numbers[rows, columns] = torch.tensor(kept, dtype=torch.float64) * float(scales[b, g])
    stored = scales.reshape(1) if strategy == "tensor" else scales
    return {f"{stem}.weight": codes.to(torch.float8_e4m3fn), f"{stem}.{scale_name}": stored}, numbers


def e4m3(byte: int) -> float:
    """One sign, four exponent and three mantissa bits, an exponent of 7 for 1."""
    sign, exponent, mantissa = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def fp8(block: tuple[int, int] | None) -> tuple[dict[str, Any], Callable[[str, Tensor], Written]]:
    settings: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if block is None:
        return settings, lambda stem, weight: floats(stem, weight, "tensor", "weight_scale", (0, 0))
    settings["weight_block_size"] = list(block)
    return settings, lambda stem, weight: floats(stem, weight, "block", "weight_scale_inv", block)


def fbgemm() -> tuple[dict[str, Any], Callable[[str, Tensor], Written]]:
    return {"quant_method": "fbgemm_fp8"}, lambda stem, weight: floats(stem, weight, "channel", "weight_scale", (0, 0))


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def nf4(*, nested: bool) -> tuple[dict[str, Any], Callable[[str, Tensor], Written]]:
    def write(stem: str, weight: Tensor) -> Written:
        flat, at = weight.flatten().tolist(), f"{stem}.weight"
        table = torch.tensor(NF4)
        scales = [max(map(abs, flat[k : k + 64])) for k in range(0, len(flat), 64)]
        found = {f"{at}.quant_map": table, f"{at}.absmax": torch.tensor(scales)}
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape), "dtype": "float16"}
        if nested:
            offset = sum(scales) / len(scales)
            codebook, outer = torch.linspace(-1, 1, 256), list[float]()
            for k in range(0, len(scales), 256):
                outer.append(max(abs(scale - offset) for scale in scales[k : k + 256]))
            codes = [
                min(range(256), key=lambda c, k=k, scale=scale: abs(float(codebook[c]) * outer[k // 256] + offset - scale))
                for k, scale in enumerate(scales)
            ]
            kept = [float(codebook[code]) * outer[k // 256] + offset for k, code in enumerate(codes)]
            scales = [float(torch.tensor(each, dtype=torch.float32)) for each in kept]
            found |= {f"{at}.absmax": torch.tensor(codes, dtype=torch.uint8), f"{at}.nested_quant_map": codebook}
            found[f"{at}.nested_absmax"] = torch.tensor(outer)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        near = [min(range(16), key=lambda c, k=k: abs(NF4[c] * scales[k // 64] - flat[k])) for k in range(len(flat))]
        pairs = [near[k] << 4 | near[k + 1] for k in range(0, len(near), 2)]
        found[at] = torch.tensor(pairs, dtype=torch.uint8).view(-1, 1)
        found[f"{at}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        numbers = [float(table[code]) * scales[k // 64] for k, code in enumerate(near)]
        return found, torch.tensor(numbers, dtype=torch.float64).view(weight.shape)

    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, write


def int8() -> tuple[dict[str, Any], Callable[[str, Tensor], Written]]:
    def write(stem: str, weight: Tensor) -> Written:
        largest = [max(map(abs, row)) for row in weight.tolist()]
        codes = [[round(w * 127 / most) for w in row] for row, most in zip(weight.tolist(), largest, strict=True)]
        kept = torch.tensor(largest).double().tolist()
        numbers = [[code * most / 127 for code in row] for row, most in zip(codes, kept, strict=True)]
        found = {f"{stem}.weight": torch.tensor(codes, dtype=torch.int8), f"{stem}.SCB": torch.tensor(largest)}
        return found, torch.tensor(numbers, dtype=torch.float64)

    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, write


FORMS: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], Written]]] = {
    "gptq": gptq(),
    "gptq-symmetric": gptq(symmetric=True),
    "gptq-v2": gptq(version=2, group_len=64),
    "gptq-8bit": gptq(bits=8),
    "gptq-8bit-symmetric": gptq(bits=8, symmetric=True),
    "gptq-channel": gptq(group_len=-1),
    "gptq-act-order": gptq(shuffled=True),
    "awq": awq(),
    "int4-group": compressed("pack-quantized", 4, "group"),
    "int4-asymmetric": compressed("pack-quantized", 4, "group", symmetric=False),
    "int4-channel": compressed("pack-quantized", 4, "channel"),
    "int8-packed": compressed("pack-quantized", 8, "group", group_len=64),
    "int8-channel": compressed("int-quantized", 8, "channel"),
    "int8-asymmetric": compressed("int-quantized", 8, "channel", symmetric=False),
    "fp8-channel": compressed("float-quantized", 8, "channel", kind="float"),
    "fp8-tensor": compressed("float-quantized", 8, "tensor", kind="float"),
    "fp8-blocks": compressed("float-quantized", 8, "block", kind="float"),
    "fp8-deepseek": fp8((32, 32)),
    "fp8-one-scale": fp8(None),
    "fbgemm": fbgemm(),
    "nf4": nf4(nested=False),
    "nf4-double": nf4(nested=True),
    "bnb-int8": int8(),
}
"""``quantization_config`` and writer of every form, by name."""


_QUANTISED = ("proj.weight", "_mqa.weight", "w1.weight", "w2.weight", "w3.weight", "c_fc.weight")


def quantise_folder(folder: Path, kind: str) -> Tensors:
    """Quantise the layers' matrices of the checkpoint in ``folder``, as libraries do; what the whole checkpoint stands for."""
    settings, write = FORMS[kind]
    tensors, meant = load_file(folder / "model.safetensors"), Tensors()
    stored = Tensors()
    for name, tensor in tensors.items():
        if not name.endswith(_QUANTISED):
            stored[name] = meant[name] = tensor
            continue
        found, numbers = write(name.removesuffix(".weight"), tensor.float())
        stored |= found
        meant[name] = numbers.float()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": settings}))
    return meant
