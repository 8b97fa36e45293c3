"""Replays every case and writes the golden curves, after showing what changes.

    python -m tests.integration.trainer.golden.make_curves             all cases
    python -m tests.integration.trainer.golden.make_curves --check     write nothing; also replay in another packing

A changed curve is a changed result of training: commit it together with the reason. `--check` shows the effect of
rounding on each case, which determines the tolerance: shorter rows sum in another order.
"""

import argparse
import json

import torch
from tests.integration.trainer.golden.replay import CASES, CURVES, VALUES, departures, load_curves, replay


def largest_gap(one: list[dict[str, float]], other: list[dict[str, float]]) -> str:
    """The largest relative difference between two curves, and where it is."""
    gaps = [
        (abs(a[name] - b[name]) / (abs(b[name]) + 1e-4), f"{name} of step {step}")
        for step, (a, b) in enumerate(zip(one, other, strict=True))
        for name in VALUES
    ]
    return "{:.1e} ({})".format(*max(gaps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with another packing, and write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    committed = load_curves() if CURVES.exists() else {}
    curves = {}
    for case in CASES:
        curves[case] = replay(case)
        changes = departures(case, curves[case], committed[case]) if case in committed else [f"{case}: new"]
        print(f"{case}: {'unchanged' if not changes else ''}")
        for sentence in changes:
            print(f"  {sentence}")
        if arguments.check:
            otherwise = replay(case, seq_len=64, entropy_chunk_size=7)
            print(f"  another packing moves it by {largest_gap(curves[case], otherwise)}")
    if not arguments.check:
        lines = ",\n".join(
            f"  {json.dumps(case)}: [\n"
            + ",\n".join(f"   {json.dumps({name: float(f'{row[name]:.9g}') for name in VALUES})}" for row in curve)
            + "\n  ]"
            for case, curve in curves.items()
        )
        CURVES.write_text(f'{{"torch": "{torch.__version__}", "curves": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
