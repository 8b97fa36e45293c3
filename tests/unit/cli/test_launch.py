"""Jobs of `telescope launch`: scripts that a shell reads, manifests with what the services require, accepted flags."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from telescope.cli import doctor as doctor_command
from telescope.cli import launch, main, train
from telescope.config.loader import parse_overrides
from telescope.errors import ConfigError
from telescope.record.files import RunFiles, WriterLock

EXAMPLES = Path(__file__).parents[3] / "configs" / "examples"
FLAGS = ["--checkpoint_every", "50", "--learning_rate=5e-7", "--wandb_run_name", "Fir$t run"]
KUBERAY = ["--image", "me/telescope:1", "--volume", "runs", "--spot", "example.org/spot=true"]


@pytest.fixture
def render(tmp_path):
    (tmp_path / "run.yaml").write_text("environments: [{name: countdown}]\ntrainer_num_workers: 14\n")

    def render(kind: str, *more: str) -> str:
        argv = [kind, "--config", f"{tmp_path}/run.yaml", "--run_dir", "/shared/a run", *FLAGS, *more]
        return launch.render(launch.build_parser().parse_args(argv))

    return render


def check_script(script: str) -> None:
    """Fails unless bash parses `script` and telescope accepts its commands."""
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    parser = doctor_command.build_parser()
    joined = script.replace("\\\n", " ")
    [line] = re.findall(r"telescope doctor --cluster(?: \"\$@\"')?(.*?)(?: &&)?\n", joined)
    assert parser.parse_args(["--cluster", *shlex.split(line)]).nodes > 1
    starts = re.findall(r"exec telescope train (.*) \"\$@\"", joined)
    [flags] = re.findall(r"^\s*(?:on_first 'start \"\$@\"'|start)( --.*)", joined, re.MULTILINE)
    assert len(starts) == 2
    for line in starts:
        own = train.build_parser().parse_args(shlex.split(line + flags))
        assert own.config or own.resume
        assert parse_overrides(own.fields)["wandb_run_name"] == "Fir$t run"


def test_a_slurm_job_starts_ray_on_all_nodes_and_runs_again_when_preempted(render):
    script = render("slurm", "--partition", "gpu", "--time", "1-0", "--cpu-nodes", "3")
    check_script(script)
    header, *_ = script.partition("set -u")
    options = [shlex.split(line) for line in re.findall(r"^#SBATCH (.*)", header, re.MULTILINE)]
    first, second = options[: options.index(["hetjob"])], options[options.index(["hetjob"]) + 1 :]
    assert ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=36", "--gpus-per-node=8"] in first
    assert {"--job-name=fir-t-run", "--requeue", "--signal=TERM@600"} < {option for line in first for option in line}
    assert second == [["--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=36"], ["--partition=gpu"], ["--time=1-0"]]
    assert "--nodes 5 --run-dir" in script


def test_a_ray_job_has_what_its_definition_requires(render):
    config, job = yaml.safe_load_all(render("kuberay", *KUBERAY))
    check_script(config["data"]["start.sh"])
    assert config["kind"] == "ConfigMap"
    assert yaml.safe_load(config["data"]["run.yaml"])["trainer_num_workers"] == 14
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("ray.io/v1", "RayJob", "fir-t-run")
    cluster = job["spec"]["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    assert (workers["groupName"], workers["replicas"]) == ("workers", 2)
    assert workers["minReplicas"] == workers["maxReplicas"] == 2
    for group, gpus in ((cluster["headGroupSpec"], None), (workers, 8)):
        assert group["rayStartParams"] is not None
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert container["image"] == "me/telescope:1"
        assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert pod.get("nodeSelector") == (gpus and {"example.org/spot": "true"})


def test_a_skypilot_job_is_one_task_for_all_nodes(render, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = yaml.safe_load(render("skypilot", "--spot", "yes", "--volume", "runs"))
    assert "train --config run.yaml " in task["run"]
    check_script(task["run"])
    assert task["num_nodes"] == 2
    assert task["resources"] | {"accelerators": {"H100": 8}, "use_spot": True} == task["resources"]
    assert task["volumes"] == {"/shared": "runs"}


@pytest.mark.parametrize(("files", "is_live", "command", "is_moved"), [
    ([], False, "--config", False),
    (["notes.txt"], False, "--config", False),
    (["run.json"], False, "--config", True),
    (["run.json", "tables/.writer.lock"], False, "--config", True),
    (["run.json"], True, "--config", False),
    (["run.json", "checkpoints/step_50/meta.json"], False, "--resume", False),
])  # fmt: skip
def test_a_job_resumes_a_run_with_a_checkpoint_and_moves_another_run_that_ended_aside(
    files, is_live, command, is_moved, tmp_path
):
    folder = tmp_path / "a run"
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    lock = WriterLock(RunFiles(folder))
    if is_live:
        lock.acquire()
    argv = ["slurm", "--config", f"{EXAMPLES}/example_wordle.yaml", "--run-dir", str(folder), *FLAGS[:2]]
    start, _ = launch.render(launch.build_parser().parse_args(argv)).split("# Slurm sends")
    telescope = tmp_path / "telescope"
    telescope.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    telescope.chmod(0o755)
    script = f"{start[start.index('run_dir=') :]}\nPATH={shlex.quote(str(tmp_path))}:$PATH\nstart --seed 1\n"
    lines = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[:2] == ["train", command]
    assert (str(folder) in lines, lines[-2:]) == (True, ["--seed", "1"])
    lock.release()
    assert len(list(tmp_path.glob("a run.*"))) == is_moved


@pytest.mark.parametrize(("flags", "gpus"), [
    (["--nodes", "4"], 4),  # 14 ranks and 2 servers
    (["--nodes", "3"], 6),
    (["--nodes", "8", "--inference_tensor_parallel_size", "2"], 2),
    (["--nodes", "16", "--inference_tensor_parallel_size", "2"], 2),
    (["--nodes", "4", "--ray_trainer_placement_strategy", "STRICT_PACK"], 14),
])  # fmt: skip
def test_more_nodes_have_no_more_gpus_than_the_run_needs(render, flags, gpus):
    assert f"--gpus-per-node={gpus}\n" in render("slurm", *flags)


def test_a_file_for_one_machine_joins_the_cluster_of_its_job(render, tmp_path):
    with (tmp_path / "run.yaml").open("a") as file:
        file.write("ray_address: local\n")
    for kind, more in (("slurm", []), ("kuberay", KUBERAY)):
        assert re.search(r"start(?: \S+)? --ray_address ", render(kind, *more))


@pytest.mark.parametrize(("kind", "more", "is_passed_on"), [("slurm", [], True), ("kuberay", KUBERAY, False)])
def test_a_job_looks_for_checkpoints_where_its_run_writes_them(render, monkeypatch, kind, more, is_passed_on):
    monkeypatch.setenv("TELESCOPE_CHECKPOINT_DIR", "/large/first")
    assert ("compgen -G /large/first" in render(kind, *more)) == is_passed_on


def test_what_a_job_could_not_run_with_is_refused(render):
    for argv, words in (
        (["kuberay"], "--image"),
        (["slurm", "--nodes", "1"], "1 x 8 GPUs are fewer than the 16"),
        (["slurm", "--nodes", "3", "--gpus-per-node", "5"], "3 x 5 GPUs are fewer than the 16"),
        (
            ["slurm", "--inference_tensor_parallel_size=4", "--nodes=9", "--gpus-per-node=2"],
            "each of 4 GPUs and 16 cores on one node",
        ),
        (["slurm", "--cpus-per-node", "31"], "--cpus-per-node is 31, and the run needs 32"),
        (["slurm", "--learning_rat", "1"], "learning_rate"),
        (["slurm", "--image", "me/telescope:1"], "a job of slurm has no --image, which is for kuberay and skypilot"),
        (["kuberay", *KUBERAY, "--cpu-nodes", "2"], "a job of kuberay has no --cpu-nodes"),
        (["skypilot", "--partition", "gpu"], "a job of skypilot has no --partition"),
        (["slurm", "--nodes", "0"], "--nodes: it is 0; set it to 1 or more"),
        (["slurm", "--gpus-per-node", "-8"], "--gpus-per-node: it is -8; set it to"),
        (["slurm", "--cpus-per-node", "0"], "--cpus-per-node: it is 0; set it to"),
        (["slurm", "--cpu-nodes", "-1"], "--cpu-nodes: it is -1; set it to"),
        (["kuberay", *KUBERAY, "--retries", "-1"], "--retries: it is -1; set it to"),
        (["slurm", "--ray_address", "auto"], "--ray_address is 'auto', but the job starts Ray and joins it"),
        (["skypilot"], "move it below this folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            render(*argv)
    parse = launch.build_parser().parse_args
    wordle = ["--config", f"{EXAMPLES}/example_wordle.yaml", "--run-dir"]
    with pytest.raises(ConfigError, match="mounted at the parent of run_dir"):
        launch.render(parse(["kuberay", *wordle, "/shared", "--checkpoint_every", "50", *KUBERAY]))
    with pytest.raises(ConfigError, match="checkpoint_every is 0"):
        launch.render(parse(["slurm", *wordle, "r"]))


@pytest.mark.parametrize(("flags", "expected"), [
    (["--inference_tensor_parallel_size=4"], "--nodes=3 --ntasks-per-node=1 --cpus-per-task=28 --gpus-per-node=8"),
    # A server of four GPUs has four times as many cores as a mean GPU of the run.
    (
        ["--inference_tensor_parallel_size=4", "--ray_inference_cpus_per_worker=12", "--trainer_num_workers=12"],
        "--nodes=2 --ntasks-per-node=1 --cpus-per-task=68 --gpus-per-node=8",
    ),
    (["--nodes=4", "--gpus-per-node=4"], "--nodes=4 --ntasks-per-node=1 --cpus-per-task=20 --gpus-per-node=4"),
])  # fmt: skip
def test_a_job_asks_for_nodes_on_which_the_run_fits(render, flags, expected):
    assert f"\n#SBATCH {expected}\n" in render("slurm", *flags)


def test_a_tilde_in_the_configuration_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "run.yaml"
    file.write_text("environments: [{name: countdown}]\ncheckpoint_every: 5\nrun_dir: ~/r\ncheckpoint_dir: ~/c\n")
    script = launch.render(launch.build_parser().parse_args(["slurm", "--config", str(file)]))
    assert f"run_dir={tmp_path}/r\n" in script
    assert f'compgen -G {tmp_path}/c"/step_*' in script


def test_submit_hands_the_job_to_the_scheduler(render, tmp_path, monkeypatch, capfd):
    scheduler = tmp_path / "sbatch"
    scheduler.write_text("#!/bin/sh\nhead -n 2 $1\nexit 3\n")
    scheduler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    argv = ["slurm", "--config", f"{tmp_path}/run.yaml", "--run-dir", "/shared/x", "--submit", *FLAGS]
    assert main.main(["launch", *argv]) == 3
    assert capfd.readouterr().out == "#!/bin/bash\n#SBATCH --job-name=fir-t-run\n"
