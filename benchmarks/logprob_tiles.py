"""Finds the fastest tile sizes of the output layer on a Hopper GPU.

    python benchmarks/logprob_tiles.py --json tiles.json
    python benchmarks/logprob_tiles.py --quick            one shape, few configurations

For each configuration (`telescope.trainer.logprob_kernels.Tiles`): the sums of the softmax over the whole vocabulary,
and the gradient of an eighth of it, for 8,192 tokens. Each result is first compared with the one of the configuration
in use. A configuration that does not compile, or is wrong, is reported and left out. TFLOP/s count the product alone.
Most of the time goes into compiling: three minutes in all on 16 cores, half a minute with --quick.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from command_line import parser_of, show, write_json
from measure import provenance

from telescope.trainer.logprob import LogprobHead, _Softmax

if TYPE_CHECKING:  # without a GPU there is no Triton to import
    from telescope.trainer.logprob_kernels import Tiles

ROWS, VOCABULARY, BLOCK = 8192, 151_936, 19_072
WIDTHS = (1024, 2560)
"""Hidden sizes of Qwen3-0.6B and 4B."""
TEMPERATURE = 0.9
TOLERANCE = 1e-2
"""Relative to the largest number: gradients are rounded to bfloat16."""
REPEATS, CALLS = 5, 10
"""Readings, of which the median counts, and calls in each."""
SHOWN = 6


def configurations(in_use: Tiles, quick: bool) -> Iterator[Tiles]:
    """Yields tile configurations, the one in use first."""
    yield in_use
    shapes = [(128, 256, None), (128, 128, None), (128, 128, 128), (256, 128, None), (64, 256, None)]
    others = [
        replace(in_use, rows=rows, columns=columns, max_registers=registers, stages=stages, span=span, group=group)
        for (rows, columns, registers), stages, span, group in product(shapes, (3, 4), (2, 4), (1, 2, 8))
    ]
    yield from (tiles for tiles in (others[::10] if quick else others) if tiles != in_use)


class Case:
    """One hidden size: inputs, and the results of the configuration in use."""

    def __init__(self, width: int, device: torch.device) -> None:
        from telescope.trainer import logprob_kernels

        num_rows, vocab, block = ROWS, VOCABULARY, BLOCK
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator)

        self.flops = {"sums": 2.0 * num_rows * vocab * width, "gradient": 2.0 * num_rows * block * width}
        hidden, weight = draw(num_rows, width).bfloat16(), (draw(vocab, width) * 3 * width**-0.5).bfloat16()
        targets = torch.randint(0, vocab, (num_rows,), device=device, generator=generator)
        logprob, entropy = LogprobHead(torch.nn.Parameter(weight), None, 1024)(hidden, targets, TEMPERATURE)
        log_total = (hidden * weight[targets]).sum(dim=1, dtype=torch.float32) / TEMPERATURE - logprob.detach()
        known = (log_total, entropy.detach(), draw(num_rows), draw(num_rows))

        def sums(tiles: Tiles) -> tuple[torch.Tensor, torch.Tensor]:
            return logprob_kernels.softmax_sums(hidden, weight, None, targets, TEMPERATURE, tiles)

        def gradient(tiles: Tiles) -> torch.Tensor:
            return logprob_kernels.gradient(hidden, weight[:block], None, targets, *known, TEMPERATURE, tiles)

        self.calls: dict[str, Callable[[Tiles], object]] = {"sums": sums, "gradient": gradient}
        self.results: dict[str, Callable[[Tiles], torch.Tensor]] = {
            "sums": lambda tiles: _Softmax.merged(*sums(tiles)).result()[0],
            "gradient": gradient,
        }
        self.wanted = {"sums": logprob.detach(), "gradient": gradient(logprob_kernels.GRADIENT)}

    def measure(self, kind: str, tiles: Tiles) -> dict[str, Any]:
        """Returns median milliseconds of a call, or why it failed."""
        row: dict[str, Any] = {"kind": kind, "tiles": asdict(tiles)}
        try:
            found = self.results[kind](tiles)
        except Exception as error:  # a compiler error: the next configuration may work
            if "illegal memory access" in str(error):
                raise  # corrupts the GPU context for everything after it
            return row | {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        off = float((found.float() - self.wanted[kind].float()).abs().max() / self.wanted[kind].float().abs().max())
        if not off < TOLERANCE:
            return row | {"failed": f"wrong by {off:.1e}"}
        milliseconds = statistics.median(clock(lambda: self.calls[kind](tiles)) for _ in range(REPEATS))
        return row | {"ms": milliseconds, "tflops": self.flops[kind] / milliseconds / 1e9}


def clock(call: Callable[[], object]) -> float:
    """Returns the GPU's milliseconds for one of several consecutive calls."""
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    for _ in range(CALLS):
        call()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) / CALLS


def name_of(tiles: dict[str, Any]) -> str:
    words = f"{tiles['rows']} x {tiles['columns']} x {tiles['depth']}, stages {tiles['stages']}, span {tiles['span']}"
    registers = f", {tiles['max_registers']} registers" if tiles["max_registers"] else ""
    return f"{words}, group {tiles['group']}{registers}"


def main() -> int:
    parser = parser_of(__doc__, "one shape, few configurations")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("these kernels need a Hopper GPU (H100, H200), and none was found")
    from telescope.trainer import logprob_kernels

    device = torch.device("cuda", 0)
    rows: list[dict[str, Any]] = []
    for width in WIDTHS[:1] if arguments.quick else WIDTHS:
        case = Case(width, device)
        for kind, in_use in (("sums", logprob_kernels.SUMS), ("gradient", logprob_kernels.GRADIENT)):
            for tiles in configurations(in_use, arguments.quick):
                rows.append({"hidden": width} | case.measure(kind, tiles))
            print_table([row for row in rows if row["hidden"] == width and row["kind"] == kind])
    write_json(arguments.json, {"where": provenance(["torch", "triton"]), "rows": rows})
    return 0


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints the configuration in use and the fastest ones, for one product."""
    done = sorted((row for row in rows if "ms" in row), key=lambda row: float(row["ms"]))
    shown = [("in use: ", row) for row in rows[:1] if "ms" in row] + [("", row) for row in done[:SHOWN]]
    show(
        ("", "ms", "TFLOP/s"),
        [(label + name_of(row["tiles"]), f"{row['ms']:.3f}", f"{row['tflops']:.0f}") for label, row in shown],
        f"{rows[0]['kind']}, hidden size {rows[0]['hidden']:,}",
    )
    failed = [row for row in rows if "failed" in row]
    if failed:
        print(f"left out {len(failed)} of {len(rows)}: {failed[0]['failed']}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
