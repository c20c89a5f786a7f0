"""Vision-language targets: prompts with images, read by transformers' vision towers and the lean decoder.

A tower and a projector turn an image into embeddings, one per place that the image takes in the prompt. The lean decoder reads
them at the placeholders, and continues with text. Only the prompt has images, so every method works unchanged.

    pixels.py    an image as its model's processor makes it     families.py   which checkpoints, how they write images
    hf_tower.py  pixels to embeddings                           positions.py  several axes of positions (Qwen2-VL)
    book.py      embeddings under token ids of their own        target.py     a decoder that reads such ids
    prompts.py   token ids and images to a prompt               messages.py   images of a conversation
    load.py      a folder to a target and what it sees with     info.py       what `outrider info` says of it
"""
