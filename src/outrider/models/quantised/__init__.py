"""Quantised checkpoints of the Hugging Face hub: GPTQ, AWQ, compressed-tensors, FP8, MXFP4 and bitsandbytes.

    form = formats.format_of(config)      how the checkpoint is quantised; None where it is not
    tensors = folder.checkpoint(path, config)
    tensors.read(name)                    a matrix dequantised, the reference
    tensors.matrix(name)                  the same as codes and scales, for products that take them as they are

There is one module per format. Each reads its matrices into the form of ``matrix.py``. A new format is a module and a line in
``formats.py``.
"""
