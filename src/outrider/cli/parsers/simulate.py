"""``outrider simulate``: what speculation would gain on other hardware, from acceptance and a model of costs.

outrider simulate --hardware h200 --params 8e9 --layers 32 --draft-params 1e9 --draft-layers 16 --acceptance 0.8
outrider simulate --hardware h100 --devices 4 --params 70e9 --layers 80 --acceptance 0.85,0.8,0.7 --batch-sizes 1,8,64
outrider simulate --hardware h100 --devices 2 --link-latency 20 --link-bandwidth 25 --draft-params 1e9 --pearl
outrider simulate --hardware h100 --devices 4 --params 70e9 --layers 80 --draft-params 8e9 --draft-layers 32 --easyspec 4
outrider simulate --validate          predicted against measured, with synthetic drafters on the bundled model, here
"""

from __future__ import annotations

import argparse

from outrider.bench.simulate import HARDWARE
from outrider.cli.parsers.shared import add_load_options


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("simulate", description=__doc__)
    group = parser.add_argument_group("prediction for other hardware")
    group.add_argument("--hardware", default="h200", help=f"one of {', '.join(HARDWARE)} (default: %(default)s)")
    group.add_argument("--devices", type=int, default=1, help="devices that share the target's weights")
    group.add_argument("--params", type=float, default=8e9, help="parameters of the target")
    group.add_argument("--layers", type=int, default=32, help="layers of the target")
    group.add_argument(
        "--kv-bytes", type=float, default=131072, help="bytes of keys and values per token (default: an 8B model)"
    )
    group.add_argument(
        "--draft-params", type=float, default=0.0, help="parameters of the draft; 0 for guesses that cost nothing"
    )
    group.add_argument("--draft-layers", type=int, default=1, help="layers of the draft")
    group.add_argument(
        "--acceptance",
        default="0.8",
        metavar="A,A",
        help="acceptance rate by position; the last repeats (default: %(default)s)",
    )
    group.add_argument("--batch-sizes", default="1,8,32,128", metavar="B,B", help="batch size")
    group.add_argument("--context", type=int, default=1024, help="context length in tokens")
    group.add_argument("--link-latency", type=float, metavar="US", help="microseconds between devices (default: one node's)")
    group.add_argument("--link-bandwidth", type=float, default=100.0, metavar="GB", help="GB/s between them (default: 100)")
    group.add_argument("--pearl", action="store_true", help="compare with drafting in parallel, on one more device")
    text = "compare with a draft whose layers run at once on N devices"
    group.add_argument("--easyspec", type=int, metavar="N", help=text)
    text = "acceptance rate of such a draft by position (default: that of --acceptance)"
    group.add_argument("--easyspec-acceptance", metavar="A,A", help=text)
    group.add_argument("--load", type=float, metavar="R", help="requests per second, for the number of replicas")
    group.add_argument("--request-tokens", type=float, default=256, help="tokens per answer (default: 256)")
    group.add_argument("--prompt-tokens", type=float, default=0, help="prompt tokens per answer (default: 0)")
    group.add_argument("--utilisation", type=float, default=0.7, help="share of a replica's speed to plan for (default: 0.7)")
    group.add_argument("--price", type=float, default=0.0, help="price of a replica per hour, for the cost of a million tokens")
    group.add_argument("--longest", type=int, default=12, help="longest draft that is considered")
    group = parser.add_argument_group("check on this machine")
    group.add_argument("--validate", action="store_true", help="predict synthetic drafters on this machine, then measure them")
    group.add_argument(
        "--cpu-time", action="store_true", help="count CPU seconds, for a machine that is shared; needs --threads 1"
    )
    group.add_argument("--rounds", type=int, default=5, help="repetitions of every measurement")
    group.add_argument("--prompts", type=int, default=3, help="prompts of each of two suites")
    group.add_argument("--max-tokens", "-n", type=int, default=64, help="tokens of a text")
    add_load_options(parser)
