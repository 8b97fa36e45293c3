"""Implements `telescope launch`, which prints or submits a training job for Slurm, KubeRay or SkyPilot.

The templates in `recipes/` start Ray on every node, check the nodes with `telescope doctor --cluster`, and start the
run, or resume it after a preemption.
"""

import argparse
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jinja2

from telescope.cli.main import CommandParser, number
from telescope.config import load_config
from telescope.config.plan import assumed_cluster, gpus_needed, least_node
from telescope.errors import ConfigError, UserError
from telescope.utils.packages import installed_version
from telescope.utils.text import user_path

SUBMIT = {"slurm": ["sbatch"], "kuberay": ["kubectl", "create", "-f"], "skypilot": ["sky", "jobs", "launch", "-y"]}
MOUNTED_CONFIG = "/etc/telescope/run.yaml"  # in KubeRay's pods
DEFAULTS = {"cpu_nodes": 0, "memory": "64Gi", "accelerator": "H100", "retries": 3}
DRIVER_CPUS = 4  # in addition to servers and ranks: the driver, Ray's daemons and one or two rollout workers
OPTIONS_OF_KINDS = (
    ("cpu-nodes", ("slurm",), "further nodes without GPUs, for rollout workers"),
    ("partition", ("slurm",), "partition"),
    ("account", ("slurm",), "account"),
    ("time", ("slurm",), "time limit, such as 24:00:00; the run resumes after it"),
    ("image", ("kuberay", "skypilot"), "image with Telescope"),
    ("volume", ("kuberay", "skypilot"), "claim (kuberay) or name (skypilot) of the shared volume of run_dir"),
    ("memory", ("kuberay",), "memory of a pod (default: 64Gi)"),
    ("spot", ("kuberay", "skypilot"), "KEY=VALUE, label of spot nodes (kuberay), or any text (skypilot)"),
    ("accelerator", ("skypilot",), "kind of GPU (default: H100)"),
    ("retries", ("kuberay", "skypilot"), "new starts after a failure (default: 3)"),
)
"""Name, kinds of jobs that have it, description."""
DESCRIPTION = """Print a job that trains on several nodes: a batch script of Slurm, a RayJob of KubeRay or a managed
job of SkyPilot. It starts Ray, checks the nodes, and starts the run, or resumes it when the job was preempted.
Flags of fields (--learning_rate 5e-7) are passed on to the run."""


def build_parser() -> CommandParser:
    parser = CommandParser(prog="telescope launch", takes_fields=True, description=DESCRIPTION)
    parser.add_argument("kind", choices=list(SUBMIT))
    parser.add_argument("--config", "-c", type=user_path, required=True, help="configuration of the run")
    parser.add_argument("--run-dir", type=user_path, help="folder of the run, on a file system that all nodes share")
    parser.add_argument("--submit", action="store_true", help="submit the job instead of printing it")
    parser.add_argument("--nodes", type=number(int, 1), help="default: as few as fit the run")
    parser.add_argument("--gpus-per-node", type=number(int, 0), help="default: what the run needs, at most 8")
    parser.add_argument("--cpus-per-node", type=number(int, 1), help="default: what the run needs")
    for name, kinds, description in OPTIONS_OF_KINDS:
        form = number(int, 0) if name in ("cpu-nodes", "retries") else str
        parser.add_argument(f"--{name}", type=form, help=f"{', '.join(kinds)}: {description}")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Prints or submits the job. Returns the exit code. Raises `UserError` if the job could not run."""
    recipe = render(arguments)
    if not arguments.submit:
        print(recipe)
        return 0
    command = SUBMIT[arguments.kind]
    if shutil.which(command[0]) is None:
        raise UserError(f"--submit needs `{command[0]}`, which is not on the PATH. Leave it out to print the job")
    with tempfile.NamedTemporaryFile("w", suffix=f".{arguments.kind}") as file:
        file.write(recipe)
        file.flush()
        return subprocess.run([*command, file.name], check=False).returncode


def render(arguments: argparse.Namespace) -> str:
    """Returns the job for a command line. Raises `UserError`."""
    # Slurm passes the variables of this shell on to the job.
    loaded = load_config(arguments.config, arguments.fields, None if arguments.kind == "slurm" else {})
    config = loaded.config
    kind, folder = arguments.kind, arguments.run_dir or config.run_dir
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    for name, kinds, _ in OPTIONS_OF_KINDS:
        if name.replace("-", "_") in given and kind not in kinds:
            raise ConfigError(f"a job of {kind} has no --{name}, which is for {' and '.join(kinds)}. Leave it out")
    if loaded.sources.get("ray_address") == "command line":
        raise ConfigError(f"--ray_address is {config.ray_address!r}, but the job starts Ray and joins it. Leave it out")
    if folder is None:
        raise ConfigError("launch needs a new folder that all nodes share. Add --run-dir /shared/NAME")
    if not config.checkpoint_every:
        raise ConfigError(
            "checkpoint_every is 0, but a preempted job resumes from a checkpoint. Add --checkpoint_every N"
        )
    if kind == "kuberay" and not (arguments.image and arguments.volume):
        raise ConfigError(
            "kuberay needs --image IMAGE, with Telescope, and --volume CLAIM, which is mounted for run_dir"
        )
    run_dir = Path(folder).expanduser().absolute()
    if arguments.volume and run_dir.parent == Path("/"):
        raise ConfigError(f"--volume is mounted at the parent of run_dir, {str(run_dir)!r}. Add --run-dir /shared/NAME")
    config_path = MOUNTED_CONFIG if kind == "kuberay" else str(arguments.config.absolute())
    if kind == "skypilot":  # copies the current folder
        config_path = os.path.relpath(arguments.config)
        if config_path.startswith(".."):
            raise ConfigError(
                f"--config is {str(arguments.config)!r}; move it below this folder, which SkyPilot copies"
            )
    cluster, gpus = assumed_cluster(config), arguments.gpus_per_node
    nodes, needed = arguments.nodes or len(cluster.nodes), gpus_needed(config)
    most = cluster.nodes[0].gpus if gpus is None else gpus
    if nodes * most < needed and config.device != "cpu":
        raise ConfigError(f"{nodes} x {most} GPUs are fewer than the {needed} of the run. Set --nodes higher")
    least = min(most, -(-needed // nodes)) if arguments.nodes and gpus is None else most
    gpus, cpus = least_node(config, nodes, range(least, most + 1))
    given_cpus = arguments.cpus_per_node
    if given_cpus is not None and given_cpus < cpus:
        raise ConfigError(f"--cpus-per-node is {given_cpus}, and the run needs {cpus}. Raise it, or leave it out")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("recipes")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["q"] = shlex.quote
    start = environment.get_template("start.sh.jinja").render(
        run_dir=str(run_dir),
        checkpoints=os.path.expanduser(config.checkpoint_dir or f"{run_dir}/checkpoints"),
        config=config_path,
    )
    spot_key, _, spot_value = (arguments.spot or "").partition("=")
    values = {**dict.fromkeys(vars(arguments)), **DEFAULTS, **given, "spot_key": spot_key, "spot_value": spot_value}
    values |= {
        "start": start,
        "flags": "".join(f" {shlex.quote(flag)}" for flag in arguments.fields),
        "name": re.sub(r"[^a-z0-9]+", "-", config.wandb_run_name.lower()).strip("-")[:40] or "telescope",
        "nodes": nodes,
        "gpus": gpus,
        "cpus": given_cpus or cpus + DRIVER_CPUS,
        "shared": str(run_dir.parent),
        "grace_seconds": math.ceil(config.checkpoint_on_exit_timeout_s),
        "config_text": arguments.config.read_text(encoding="utf-8"),
        "ray_version": installed_version("ray") or "2.50.0",
        "activate": "" if sys.prefix == sys.base_prefix else f"source {shlex.quote(sys.prefix)}/bin/activate",
    }
    return environment.get_template(f"{kind}.jinja").render(values)
