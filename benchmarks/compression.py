"""True compression of SmolLM2's cache in 16 bits, with minimum, step, window, sinks and positions, by the formula.

python -m benchmarks.compression [--tokens 8192]
"""

import argparse

from cskv_cli.config import QuantizeConfig
from cskv_cli.layout import unquantized
from cskv_cli.memory import Shape, base_bytes, cache_bytes
from cskv_cli.stages.quantize import quantized_layout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    tokens = parser.parse_args().tokens
    shape = Shape(channels=192, dtype_bytes=2)
    print("| rank | bits | nominal | true |\n|---|---|---|---|")
    for rank in (192, 96, 38):
        for bits in (None, 4, 3, 2):
            layout = unquantized(32, 4, (rank,) * 30, (rank,) * 30)
            if bits:
                layout = quantized_layout(layout, QuantizeConfig(bits_k=bits, bits_v=bits))
            nominal = 1 - rank / 192 * (bits or 16) / 16
            true = 1 - cache_bytes(shape, layout, tokens) / base_bytes(shape, layout, tokens)
            print(f"| {rank} | {bits or 16} | {nominal:.2%} | {true:.2%} |")


if __name__ == "__main__":
    main()
