"""``outrider imagine``: draw an image with an image model, and show how its tokens were accepted.

    outrider imagine --class 3 --method gsd --show                          a digit, by the bundled model
    python recipes/images.py --data mnist.npz --out build/images/mnist      makes a model of your own
    python recipes/images_continuous.py --data mnist.npz                    makes one of continuous tokens
    outrider imagine --model build/images/continuous --method joint-path --show

The file holds the image. With ``--show`` it holds four panels: the image, the origin of every token, the pass that wrote it
(dark to bright), and the passes that each row of tokens took. Origins are green (accepted), orange (recovered), blue (bonus).
A page of the same name stands beside it, on which the image grows pass by pass.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("imagine", description=__doc__)
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="an image model made by a recipe, or a pair for continuous tokens (default: the bundled one, which draws digits)",
    )
    parser.add_argument(
        "--draft",
        type=Path,
        metavar="DIR",
        help="a draft of the same tokens (default: the bundled model's, or the pair's)",
    )
    parser.add_argument("--class", dest="label", type=int, default=0, metavar="N", help="what to draw")
    parser.add_argument(
        "--method",
        help="a name of `outrider methods`, or a rule (gsd: sjd with it; default: sjd). With continuous tokens: joint-path "
        "(default), reflect, last-step, published (lossy) or plain",
    )
    parser.add_argument("--acceptance", metavar="RULE", help="acceptance rule (default: the method's own)")
    parser.add_argument("--option", "-O", action="append", default=[], metavar="NAME=VALUE", help="an option of the method")
    parser.add_argument("--window", type=int, help="guesses per pass (default: 16; 4 for continuous tokens)")
    parser.add_argument("--guidance", type=float, default=1.0, help="scale of classifier-free guidance; 1 is none")
    parser.add_argument("--temperature", "-t", type=float, default=1.0, help="sampling temperature; 0 takes the likeliest code")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the k likeliest codes; 0 uses all")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same image")
    parser.add_argument("--num", "-n", type=int, default=1, help="number of images, with seeds SEED, SEED + 1 and so on")
    parser.add_argument("--out", type=Path, default=Path("imagined.png"), metavar="FILE", help="the PNG file")
    parser.add_argument("--show", action="store_true", help="also draw the origin of every token, and write a page")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
