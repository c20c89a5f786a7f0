"""A follower's process: read the share of the model, then do what the leader says until the leader is gone.

python -m outrider.models.parallel.follower        started by ``team.py``; messages come through standard input
"""

from __future__ import annotations

import sys

import torch

from outrider.models.companion import READY, answering, read_message, write_message
from outrider.models.parallel.link import find_store
from outrider.models.parallel.rank import Opening, Rank


def main() -> None:
    answers = answering()
    opening, number, port = read_message(sys.stdin.buffer)
    assert isinstance(opening, Opening)
    if opening.device_of(number).type == "cuda":
        torch.cuda.set_device(opening.device_of(number))  # kernels are launched there
    rank = Rank(opening, number)
    write_message(answers, READY)
    with torch.inference_mode():
        obey(rank, port)


def obey(rank: Rank, port: int) -> None:
    """Do what every message says, in order, until there are no more."""
    while (message := read_message(sys.stdin.buffer)) is not None:
        try:
            for verb, arguments in message:
                if verb == "connect":
                    rank.link.connect(find_store(port), rank.device)
                else:
                    vars(Rank)[verb](rank, *arguments)
        finally:
            rank.give_back()


if __name__ == "__main__":
    main()
