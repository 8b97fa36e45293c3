"""Checks that look at the machine: ports, the run directory, and all problems at once."""

import functools
import json
import re
import resource
import socket
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.model_folder import write_model_folder

from telescope.config import TelescopeConfig, machine, model_checks
from telescope.config.loader import build_config, choose_run_dir
from telescope.config.model_files import ModelReport, inspect_model
from telescope.config.model_shape import ModelShape, known_shape
from telescope.config.plan import assumed_cluster
from telescope.config.remarks import GPU_FIELDS, remarks_on_place
from telescope.errors import ConfigError
from telescope.inference.vllm import support
from telescope.orchestrator import preflight


def config(**values: object) -> TelescopeConfig:
    return TelescopeConfig(**{"environments": [{"name": "countdown"}], "ray_address": "local", **values})


def message_of(check, config: TelescopeConfig) -> str:
    with pytest.raises(ConfigError) as raised:
        check(config)
    return str(raised.value)


def test_the_port_of_a_later_server_in_use_is_named_unless_it_is_a_default_that_the_run_changes(monkeypatch):
    monkeypatch.setattr(machine, "listen_problem", lambda host, port: machine.IN_USE if port == 8101 else None)
    message = message_of(preflight.check_ports, config(inference_base_port=8100))
    assert message.startswith("inference_base_port is 8100, but port 8101, which server 1 would listen on, is in use.")
    assert preflight.check_ports(config()) == "a port from 8100 to 8101 is in use; a run takes 8200"


def test_ports_on_another_cluster_are_not_judged_from_here():
    ports = [check for check in preflight.CHECKS if check.run == preflight.check_ports]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        run = config(inference_base_port=listener.getsockname()[1], ray_address="10.0.0.1:6379")
        assert preflight.find_problems(ports, run) == []
        assert preflight.find_problems(ports, run.replace(ray_address="local")) != []


def test_a_client_address_in_the_environment_is_refused_where_auto_would_follow_it(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    message = message_of(preflight.check_ray_address, config(ray_address="auto"))
    assert message.startswith("RAY_ADDRESS is 'ray://10.0.0.1:10001'")
    assert "Unset RAY_ADDRESS" in message
    preflight.check_ray_address(config(ray_address="10.0.0.1:6379"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    preflight.check_ray_address(config(ray_address="auto"))


CHECKPOINTS = {"run_dir": "{}/run", "checkpoint_every": 2}


@pytest.mark.parametrize(("check", "values", "pattern"), [
    (preflight.check_ports, {"inference_host": "192.0.2.1", "inference_base_port": 18100},
     "^inference_host is '192.0.2.1'"),
    (preflight.check_prometheus_address, {"prometheus_address": "192.0.2.1:9400"}, "where the driver cannot listen: "),
    (preflight.check_run_dir, {"run_dir": "{}/file/run"}, "is a file.*TELESCOPE_RUN_DIR"),
    (preflight.check_run_dir, {"run_dir": "/proc/telescope/run"}, "not writable"),
    (preflight.check_run_dir, {"run_dir": "{}"}, "already holds a run"),
    (preflight.check_run_dir, CHECKPOINTS | {"checkpoint_dir": "{}/file/x"}, "^checkpoint_dir is.*is a file"),
    (preflight.check_run_dir, CHECKPOINTS | {"checkpoint_dir": "/proc/x"}, "^checkpoint_dir is.*not writable"),
])  # fmt: skip
def test_a_place_that_the_run_cannot_use_is_refused(tmp_path, check, values, pattern):
    (tmp_path / "file").write_text("")
    (tmp_path / "run.json").write_text("{}")
    message = message_of(
        check, config(**{n: v.format(tmp_path) if isinstance(v, str) else v for n, v in values.items()})
    )
    assert re.search(pattern, message, re.DOTALL)
    if "checkpoint_dir" in values:
        check(config(run_dir=str(tmp_path / "run"), checkpoint_dir="/proc/x", checkpoint_every=0))


def test_the_run_directory_is_named_after_the_run_and_the_time_and_checking_does_not_make_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert choose_run_dir(config(wandb_run_name="a b/c"), now) == tmp_path / "runs" / "a-b-c-20260102-030405"
    assert choose_run_dir(config(run_dir="here"), now) == tmp_path / "here"
    assert choose_run_dir(config(run_dir="~/x"), now) == Path.home() / "x"
    preflight.check_run_dir(config(run_dir=str(tmp_path / "new" / "run")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", ["run_dir", "checkpoint_dir", "environments_path"])
@pytest.mark.parametrize(("path", "words"), [
    ("~unknown-user/run", "there is no user 'unknown-user'"),
    ("/tmp/" + "a" * 300, "each name in it 255"),
    ("é" * 130, "each name in it 255"),
    ("a/" * 2500, "a path has at most 4096 bytes"),
    ("a\0b", "must not contain the character NUL"),
])  # fmt: skip
def test_what_cannot_be_a_path_is_refused(field, path, words):
    with pytest.raises(ConfigError, match=rf"{field}(\[0\])? is .*{words}"):
        build_config({"environments": [{"name": "countdown"}], field: path})


def test_the_packages_of_chosen_trackers_must_be_installed(monkeypatch):
    monkeypatch.setattr(preflight, "is_installed", lambda name: False)
    chosen = config(trackers=["tensorboard", "trackio"])
    message = message_of(preflight.check_trackers, chosen)
    assert message.startswith("trackers needs tensorboard and trackio, which are not installed.")
    assert "pip install tensorboard trackio" in message
    assert "pip install wandb" in message_of(preflight.check_trackers, config(use_wandb=True))
    preflight.check_trackers(config())


def test_every_check_is_among_those_that_a_run_makes():
    made = [check.run for check in preflight.CHECKS]
    for module in (preflight, model_checks):
        own = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        functions = {getattr(module, name) for name in own if name.startswith("check_")}
        assert functions - {preflight.check_writable} <= set(made)
    assert len(set(made)) == len(made)


def test_shared_memory_below_what_the_servers_need_is_refused(monkeypatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    divided = {"inference_num_workers": 4, "inference_tensor_parallel_size": 2}
    message = message_of(preflight.check_shared_memory, config(**divided))
    assert message.startswith("/dev/shm has 64 MiB free, and 2 servers of vLLM need 320 MiB. Start the container with")
    for device in ("cpu", "cuda"):  # a worker in the process of its engine has no queue
        preflight.check_shared_memory(config(device=device))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    preflight.check_shared_memory(config(**divided))


@pytest.mark.parametrize(("entry_points", "words"), [
    ([], "its entry point is not installed. Install Telescope"),
    ([SimpleNamespace(module="telescope.no_such_module")], "entry point telescope.no_such_module does not exist"),
])  # fmt: skip
def test_sources_that_are_not_installed_are_refused(monkeypatch, entry_points, words):
    monkeypatch.setattr(preflight.importlib.metadata, "entry_points", lambda **_: entry_points)
    assert words in message_of(preflight.check_plugin, config())


def test_a_disk_without_space_for_the_trained_model_is_refused(monkeypatch, tmp_path):
    run = config(model=str(write_model_folder(tmp_path / "model")), run_dir=str(tmp_path / "run"))
    report = inspect_model(run)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000, total=2000))
    message = message_of(lambda config: model_checks.check_disk(config, report), run)
    assert "and the trained model takes about 1 MiB. Free" in message
    assert "save_final_model to false" in message
    model_checks.check_disk(run.replace(save_final_model=False), report)


def test_a_checkpoint_that_fits_neither_disk_nor_shared_memory_is_refused_with_its_size(monkeypatch, tmp_path):
    model = str(write_model_folder(tmp_path / "model"))
    run = config(model=model, run_dir=str(tmp_path / "run"), checkpoint_every=5, ray_address="local")
    report = inspect_model(run)
    size = report.shape.num_parameters * 4

    def leave(free: int) -> None:
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=1))

    leave(size * 4)
    model_checks.check_disk(run, report)
    model_checks.check_checkpoint_memory(run, report)
    assert model_checks.checkpoint_sentence(run, report).startswith("A checkpoint takes about 1 MiB of the 2 MiB")
    leave(size * 3)
    message = message_of(lambda config: model_checks.check_disk(config, report), run)
    assert "one checkpoint takes about 1 MiB, beside 1 MiB for the trained" in message
    model_checks.check_disk(run.replace(checkpoint_save_training_state=False), report)
    leave(size)
    message = message_of(lambda config: model_checks.check_checkpoint_memory(config, report), run)
    assert "the ranks copy about 1 MiB there for a checkpoint" in message
    model_checks.check_checkpoint_memory(run.replace(checkpoint_every=0), report)


@pytest.mark.parametrize(("template", "words"), [
    ("", "renders to nothing"), ("{# nothing #}", "renders to nothing"),
    ("{{ raise_exception('no users') }}", "raises an error: TemplateError: no users"),
    ("{{ messages[7].content }}", "raises an error: UndefinedError"),
    ("{% for m in mesages %}{{ m.content }}{% endfor %}assistant:", "leaves out what the user asks: it renders to"),
    ("{{ bos_token }}{% for m in messages %}{{ m['role'] + m.content }}{% endfor %}{{ strftime_now('%Y') }}", None),
    ("{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}{{ messages | tojson }}",
     None),
    ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ tools }}", None),
])  # fmt: skip
def test_a_chat_template_is_refused_if_it_makes_no_prompt(tmp_path, template, words):
    folder = write_model_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    run = config(model=str(folder))
    if words is None:
        assert inspect_model(run).unchecked is None
    else:
        assert f"The chat template of '{folder}' {words}" in message_of(inspect_model, run)


def test_a_gpu_whose_kv_cache_cannot_hold_one_sequence_is_refused():
    run = config(model="Qwen/Qwen2.5-7B", max_model_len=32768, weight_transfer="in_place")
    report = ModelReport("a table", known_shape(run.model))
    machine = assumed_cluster(run, gpu_memory_bytes=17 << 30)
    message = message_of(lambda run: model_checks.check_memory(run, report, machine), run)
    assert message.startswith("max_model_len is 32768, but the KV cache of a server holds 0 tokens")
    model_checks.check_memory(run, report, assumed_cluster(run, gpu_memory_bytes=24 << 30))


@pytest.mark.parametrize(
    ("device", "capabilities", "problem"),
    [("cuda", [9.0, 8.0], "a GPU here has 8"), ("cuda", [8.9, 9.0], None), ("cpu", [], "no GPU was found")],
)
def test_quantized_servers_need_gpus_with_fp8(monkeypatch, device, capabilities, problem):
    monkeypatch.setattr(preflight, "local_resources", lambda: assumed_cluster(config(device=device)))
    monkeypatch.setattr(preflight, "visible_gpu_capabilities", lambda: capabilities)
    run = config(inference_quantization="fp8_per_block", inference_dtype="bfloat16")
    if problem is None:
        preflight.check_quantization(run)
    else:
        assert problem in message_of(preflight.check_quantization, run)
    preflight.check_quantization(config())


def test_what_a_known_shape_excludes_is_refused_without_its_files():
    report = ModelReport("a table", known_shape("Qwen/Qwen3-4B"), unchecked="the hub cannot be reached")
    check = functools.partial(model_checks.check_shape, report=report)
    assert message_of(check, config(router_replay=True)).startswith("router_replay is true, but ")
    model_checks.check_shape(config(router_replay=True), ModelReport("a table", SPARSE))
    assert "'q_porj'" in message_of(check, config(lora_rank=8, lora_target_modules=["q_porj"]))
    assert "the hub cannot be reached" in message_of(lambda run: model_checks.check_report(run, report), config())


def test_router_replay_is_refused_where_vllm_returns_no_routes(monkeypatch):
    monkeypatch.setattr(support, "installed_version", lambda: "0.32.0")
    assert "router_replay" in message_of(preflight.check_router_replay, config(router_replay=True, device="cpu"))
    monkeypatch.setattr(support, "installed_version", lambda: "0.30.0")
    preflight.check_router_replay(config(router_replay=True, device="cpu"))


BALANCED = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 512, "model_type": "qwen3_moe", "num_experts": 4, "router_aux_loss_coef": 0.001,
}  # fmt: skip
DENSE, SPARSE = (known_shape(f"Qwen/Qwen3-{size}") for size in ("4B", "30B-A3B"))
REPLAY = {"router_replay": True}
MEGATRON = {"train_backend": "megatron", **REPLAY}


@pytest.mark.parametrize(("values", "device", "shape", "words"), [
    ({}, "cuda", SPARSE, "Set router_replay to true"),
    (REPLAY, "cuda", SPARSE, None),
    ({}, "cuda", DENSE, None),
    (MEGATRON, "cuda", SPARSE, "one after another. Set megatron_use_transformer_engine to true"),
    (MEGATRON | {"megatron_use_transformer_engine": True}, "cuda", SPARSE, None),
    (MEGATRON, "cpu", SPARSE, None),
    *((REPLAY | {"train_backend": backend}, "cpu", ModelShape.from_config(BALANCED | {"output_router_logits": is_set}),
       "router_aux_loss_coef 0.001" if is_set else None)
      for is_set in (True, False) for backend in ("fsdp", "megatron")),
])  # fmt: skip
def test_what_helps_a_model_with_experts_is_suggested(values, device, shape, words):
    found = remarks_on_place(config(**values), device, shape)
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_router_replay_is_not_suggested_for_a_model_for_which_it_is_refused(tmp_path):
    sizes = {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 512, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    report = ModelReport("a folder", ModelShape.from_config(sizes))
    refused = config(model=str(tmp_path), router_replay=True)
    assert "it works for Qwen3-MoE" in message_of(lambda run: model_checks.check_shape(run, report), refused)
    assert remarks_on_place(config(model=str(tmp_path)), "cuda", report.shape) == []


ON_GPUS = {
    "gpu_memory_utilization": 0.5, "weight_broadcast_cpu_staging": True, "weight_broadcast_pin_memory": True,
    "share_gpus": True,
}  # fmt: skip


@pytest.mark.parametrize(("device", "why"), [("cpu", 'device is "cpu"'), ("auto", "no GPU was found")])
@pytest.mark.parametrize("field", ON_GPUS)
def test_a_field_of_gpus_that_was_set_is_named_where_everything_runs_on_the_cpu(field, device, why):
    assert ON_GPUS.keys() == GPU_FIELDS | {"share_gpus"}
    chosen = config(device=device, inference_num_workers=1, trainer_num_workers=1, **{field: ON_GPUS[field]})
    (remark,) = remarks_on_place(chosen, "cpu", None)
    assert field in remark and f"no effect, because {why}" in remark
    assert remarks_on_place(chosen, "cuda", None) == remarks_on_place(config(device=device), "cpu", None) == []


@pytest.mark.parametrize(("limit", "num_prompts", "words"), [
    (4096, 100, None),
    (4096, 128, r"per_server is 128.* 4,096 .*ulimit -Hn.* at most 112"),
    (resource.RLIM_INFINITY, 4096, None),
    (256, 1, r"Raise that limit to 544 \([^)]*\)$"),
])  # fmt: skip
def test_more_request_slots_than_open_files_are_refused_with_the_fix(monkeypatch, limit, num_prompts, words):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, limit))
    sizes = {"inference_num_workers": 2, "group_size": 16, "max_concurrent_prompts_per_server": num_prompts}
    if words is None:
        preflight.check_open_files(config(**sizes))
    else:
        assert re.search(words, message_of(preflight.check_open_files, config(**sizes)))
