"""Implements `telescope convert`, from checkpoints to Hugging Face folders. `orchestrator.conversion` converts."""

import argparse
import time
from pathlib import Path

from telescope.cli.main import CommandParser
from telescope.errors import UserError
from telescope.orchestrator import conversion
from telescope.orchestrator.checkpoints import read_meta
from telescope.tui.live import progress
from telescope.utils.text import user_path

GB = 10**9
EPILOG = """examples:
  telescope convert runs/first                            the newest checkpoint, to runs/first/hf/step_N
  telescope convert runs/first --step all
  telescope convert --checkpoint-dir runs/first/checkpoints/step_50 --output-dir models/first-50
  telescope convert --checkpoint-root runs/first/checkpoints --output-root models/first-bf16 --dtype bfloat16
  telescope convert runs/first --adapter                  of a LoRA run: the adapter, to runs/first/adapters_hf/step_N
  telescope convert runs/first --push-to-hub me/first     needs `hf auth login`

The result loads in transformers, in vLLM, and as `model` of another run. Models that are complete are skipped."""


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="telescope convert",
        description="Turn checkpoints of a run into folders with safetensors files, config, tokenizer, chat template "
        "and generation config.",
        epilog=EPILOG,
    )
    source, target = parser.add_mutually_exclusive_group(required=True), parser.add_mutually_exclusive_group()
    source.add_argument("run", nargs="?", type=user_path, metavar="RUN_DIR", help="run directory")
    source.add_argument("--checkpoint-dir", type=user_path, metavar="D", help="one checkpoint: its step_N folder")
    source.add_argument("--checkpoint-root", type=user_path, metavar="R", help="folder with step_N folders, for all")
    target.add_argument("--output-dir", type=user_path, metavar="O", help="folder of one model")
    target.add_argument("--output-root", type=user_path, metavar="O", help="folder for step_N folders of models")
    parser.add_argument("--step", metavar="N|all", help="checkpoint of RUN_DIR (default: the newest)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a weight file (default: 5GB)")
    parser.add_argument("--dtype", choices=conversion.DTYPES, help="cast the weights (default: as they were saved)")
    parser.add_argument("--adapter", action="store_true", help="of a LoRA run: write the adapter alone, as peft does")
    parser.add_argument("--push-to-hub", metavar="NAME", help="upload the model as NAME, with a model card")
    parser.add_argument("--private", action="store_true", help="with --push-to-hub: make a private repository")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Converts the given checkpoints. Returns the exit code. Raises `UserError` before anything is written."""
    if arguments.private and not arguments.push_to_hub:
        raise UserError("--private is for --push-to-hub NAME, which uploads the model. Add it, or leave --private out")
    from telescope.trainer.hf_folder import parse_size

    max_shard_bytes = parse_size(arguments.max_shard_size)
    jobs = choose_jobs(arguments)
    if arguments.push_to_hub and len(jobs) > 1:
        raise UserError(f"--push-to-hub uploads one model, and these are {len(jobs)}. Choose one with --step N")
    if arguments.adapter and (arguments.dtype or arguments.push_to_hub):
        raise UserError(
            "--adapter writes the adapter as it was saved, to a folder: leave out --dtype and --push-to-hub"
        )
    kind = conversion.ADAPTER if arguments.adapter else arguments.dtype
    done = {checkpoint: conversion.is_converted(checkpoint, target, kind) for checkpoint, target in jobs}
    for checkpoint, target in jobs:
        if done[checkpoint]:
            print(f"{target} is complete: skipped")
            continue
        started = time.monotonic()
        if arguments.adapter:
            conversion.convert_adapter(checkpoint, target)
        else:
            with progress(checkpoint.name, " GB", GB) as on_bytes:
                conversion.convert(
                    checkpoint, target, dtype=arguments.dtype, max_shard_bytes=max_shard_bytes, on_bytes=on_bytes
                )
        size = sum(path.stat().st_size for path in target.iterdir())
        seconds = time.monotonic() - started
        print(f"{target} ({size / GB:.3g} GB in {seconds:.1f} s, {size / GB / seconds:.2g} GB/s)")
    if arguments.push_to_hub:
        from telescope.orchestrator.model_card import push_to_hub

        checkpoint, target = jobs[0]
        print(push_to_hub(target, arguments.push_to_hub, checkpoint, private=arguments.private))
    return 0


def choose_jobs(arguments: argparse.Namespace) -> list[tuple[Path, Path]]:
    """Returns checkpoints with the folders of their models. Raises `UserError` for arguments that do not fit."""
    if arguments.step is not None and arguments.run is None:
        raise UserError("--step chooses a checkpoint of RUN_DIR. With --checkpoint-dir, give the folder of that step")
    if arguments.step is not None and arguments.step != "all" and not arguments.step.isdigit():
        raise UserError(f"--step is {arguments.step!r}. Give the number of a step, or all")
    output, root = arguments.output_dir, arguments.output_root
    if arguments.checkpoint_dir is not None:
        if output is None:
            raise UserError("--checkpoint-dir needs --output-dir, the folder of the model")
        read_meta(arguments.checkpoint_dir)
        return [(arguments.checkpoint_dir, output)]
    if arguments.checkpoint_root is not None:
        if root is None:
            raise UserError("--checkpoint-root needs --output-root, the folder for the models")
        found = conversion.find_checkpoints(arguments.checkpoint_root, "all")
    else:
        found = conversion.find_checkpoints(arguments.run, arguments.step)
        if output is not None:
            if len(found) > 1:
                raise UserError(f"--output-dir is one folder for {len(found)} checkpoints. Give --output-root")
            return [(next(iter(found.values())), output)]
        root = root or arguments.run / (conversion.CONVERTED_ADAPTERS if arguments.adapter else conversion.CONVERTED)
    return [(checkpoint, root / checkpoint.name) for checkpoint in found.values()]
