"""`pretrain cluster render` for Slurm, Ray's launcher and SkyPilot: what a file says, and what is refused.

Checked by programs that others wrote: shellcheck, Ray's own schema and defaults. KubeRay: test_render_kuberay;
on a real Slurm: test_slurm.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from launch.clusters import KINDS
from pretrain.config import load_config
from pretrain.errors import UserError
from tests.config.base import write
from tests.launch.rendered import CLUSTER, GCP, HOSTS, config_with, rendered
from tests.launch.runs import run_cli


def shellcheck(text: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("shellcheck")
    return subprocess.run([str(program), "-s", "bash", "-"], input=text, capture_output=True, text=True, timeout=60)


def embedded(text: str, folder: Path) -> Any:
    """The config that a script writes for itself, loaded from that text."""
    inside = re.search(r"<<'END_OF_CONFIG'\n(.*?)^ *END_OF_CONFIG$", text, re.DOTALL | re.MULTILINE)
    assert inside
    (folder / "embedded.yaml").write_text(inside[1])
    return load_config(folder / "embedded.yaml", check_files=False)


# ------------------------------------------------------------------------------------------------ all


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_command_prints_the_file_or_writes_it_and_the_config_needs_no_files_here(kind: str, tmp_path: Path) -> None:
    config = write(tmp_path / "run.yaml", yaml.safe_dump({"cluster": CLUSTER}))
    printed = run_cli(tmp_path, "cluster", "render", kind, str(config), "seed=5")
    assert printed.returncode == 0, printed.stderr
    assert "run tiny: 5 nodes of 8 ranks (H100 each), 1 of them spare" in printed.stdout
    if kind != "ray":  # there it is encoded
        assert "seed: 5" in printed.stdout
    out = tmp_path / "new" / "file"
    written = run_cli(tmp_path, "cluster", "render", kind, str(config), "seed=5", "--out", str(out))
    assert written.returncode == 0, written.stderr
    assert out.read_text() == printed.stdout
    assert written.stdout == ""


@pytest.mark.parametrize("kind", ["ray", "skypilot", "slurm"])
def test_the_dashboard_answers_on_the_head_alone_and_takes_no_port_of_skypilots_own(kind: str) -> None:
    text = rendered(kind)
    assert set(re.findall(r"--dashboard-host=(\S+)", text)) == (set() if kind == "ray" else {"127.0.0.1"})
    if kind == "skypilot":  # whose own Ray, where there is one, has these
        assert "8266" not in text
        assert "6380" not in text


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(
    ("missing", "told"), [("nodes", "Set cluster.nodes.ranks"), ("own", "is missing")], ids=["node", "own"]
)
def test_what_a_kind_needs_and_the_config_does_not_say_is_refused(kind: str, missing: str, told: str) -> None:
    section = {"slurm": "slurm", "kuberay": "kubernetes", "ray": "launcher", "skypilot": "skypilot"}[kind]
    with pytest.raises(UserError) as error:
        rendered(kind, **{section if missing == "own" else "nodes": None})
    assert f"cluster.{section if missing == 'own' else 'nodes'} is missing" in str(error.value)
    assert told in str(error.value)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_file_holds_a_token(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "planted-secret")
    monkeypatch.setenv("WANDB_API_KEY", "planted-secret")
    assert "planted-secret" not in rendered(kind)


def test_a_wrong_kind_ends_with_2_and_names_the_right_ones(tmp_path: Path) -> None:
    result = run_cli(tmp_path, "cluster", "render", "nomad", "x.yaml")
    assert result.returncode == 2
    assert all(kind in result.stderr for kind in KINDS)


@pytest.mark.parametrize(
    ("ranks", "per_node", "spares", "nodes"), [(1, 8, 0, 1), (8, 8, 0, 1), (9, 8, 0, 2), (64, 8, 2, 10)]
)
def test_nodes_are_the_ranks_rounded_up_and_the_spares(ranks: int, per_node: int, spares: int, nodes: int) -> None:
    text = rendered("slurm", num_ranks=ranks, min_ranks=None, nodes__ranks=per_node, nodes__spares=spares)
    assert f"#SBATCH --nodes={nodes}\n" in text
    assert ("#SBATCH --no-kill\n" in text) == (spares > 0)


# ---------------------------------------------------------------------------------------------- Slurm


def test_the_sbatch_script_has_the_options_of_the_config() -> None:
    text = rendered("slurm")
    options = re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE)
    assert set(options) >= {
        "--job-name=tiny",
        "--nodes=5",
        "--ntasks-per-node=1",
        "--cpus-per-task=96",
        "--gpus-per-node=8",
        "--mem=1024000M",
        "--time=1-01:00:00",
        "--signal=B:USR1@300",
        "--requeue",
        "--open-mode=append",
        "--exclusive",
        "--no-kill",
        "--partition=gpu",
        "--account=team",
        "--reservation=august",
    }
    assert not any(option.startswith("--qos") for option in options)


@pytest.mark.parametrize(
    "changes", [{}, {"device": "cpu"}, {"nodes__interface": None}, {"nodes__setup": ["module load x"]}]
)
@pytest.mark.parametrize("kind", ["slurm", "skypilot"])
def test_scripts_are_clean_for_shellcheck(kind: str, changes: dict[str, Any]) -> None:
    text = rendered(kind, **changes)
    script = yaml.safe_load(text)["run"] if kind == "skypilot" else text
    result = shellcheck(script)
    assert result.returncode == 0, result.stdout
    assert shellcheck(script.replace('"$work/run.yaml"', "$work/run.yaml")).returncode == 1  # it would find a mistake


def test_the_config_inside_is_the_config(tmp_path: Path) -> None:
    config = config_with()
    assert embedded(rendered("slurm"), tmp_path) == config
    assert embedded(yaml.safe_load(rendered("skypilot"))["run"], tmp_path) == config


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"slurm__time_limit_s": 5}, "cluster.slurm.time_limit_s=5"),
        ({"slurm__options": ["-p gpu"]}, "is not an option of sbatch"),
        ({"slurm__options": ["--comment=a\n#SBATCH --uid=0"]}, "is not an option of sbatch"),
        ({"nodes__setup": ["a\nb"]}, "is not one shell command"),
        ({"nodes__interface": "eth0; rm -rf /"}, "cluster.nodes.interface"),
        ({"kubernetes__tolerations": ["a=b:Never"]}, "is not a taint"),
        ({"kubernetes__volumes": {"x": {"claim": "x", "mount": "relative"}}}, "is not an absolute path"),
        ({"kubernetes__redis": {"address": "redis"}}, "cluster.kubernetes.redis.address"),
        ({"launcher": {**CLUSTER["launcher"], "machine_image": "ubuntu"}}, "cluster.launcher.machine_image"),
        ({"launcher": {"kind": "azure"}}, "azure"),
        ({"skypilot__bucket": "runs"}, "cluster.skypilot.bucket"),
        ({"nodes__memory": 5}, "cluster.nodes.memory=5"),
        ({"nodes__rank": 5}, "cluster.nodes.rank"),
    ],
)
def test_every_field_of_a_cluster_is_checked(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        config_with(**changes)
    assert text in str(error.value)


# ------------------------------------------------------------------------------------------- launcher


def ray_schema() -> Any:
    import ray.autoscaler

    return json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"launcher": {**CLUSTER["launcher"], "spot": True, "zones": "us-east-1a"}},
        {"launcher": GCP},
        {"launcher": HOSTS},
    ],
    ids=["aws", "aws-spot", "gcp", "hosts"],
)
@pytest.mark.parametrize("image", [None, CLUSTER["nodes"]["image"]], ids=["bare", "docker"])
def test_launcher_files_pass_rays_schema_and_its_own_preparation(changes: dict[str, Any], image: str | None) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    body = yaml.safe_load(rendered("ray", nodes__image=image, **changes))
    jsonschema.validate(body, ray_schema())
    prepared = prepare_config(body)
    validate_config(prepared)
    kinds = prepared["available_node_types"]
    assert prepared["head_node_type"] in kinds
    hosts = body["provider"]["type"] == "local"  # there the head trains too
    assert sum(kind.get("min_workers", 0) for kind in kinds.values()) == (4 if hosts else 5)
    assert ("docker" in body) == (image is not None)


def test_the_line_that_sends_the_run_to_a_launchers_head_stands_spaces_and_quotes() -> None:
    setup = ["module load 'cuda 12'", 'export SITE="north wing"']
    text = rendered("ray", launcher=HOSTS, nodes__home="/shared/my runs", nodes__setup=setup)
    (line,) = [line for line in text.splitlines() if line.startswith("# Send:")]
    shell = f'ray() {{ printf "%s\\n" "$#" "$3"; }}\n{line.removeprefix("# Send:")}'  # what `ray exec FILE …` is given
    count, command = subprocess.run(["bash", "-c", shell], capture_output=True, text=True).stdout.splitlines()
    assert count == "3"
    assert command.startswith(
        "module load 'cuda 12' && export SITE=\"north wing\" && export PRETRAIN_HOME='/shared/my runs'"
    )


def test_rays_schema_would_find_a_mistake() -> None:
    body = yaml.safe_load(rendered("ray"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**body, "max_wrokers": 3}, ray_schema())


@pytest.mark.parametrize("spot", [False, True])
def test_aws_would_take_the_machines_as_they_are_written(spot: bool) -> None:
    """Ray's schema leaves `node_config` free; Ray hands it to RunInstances, whose shape botocore knows."""
    import botocore.session
    from botocore.validate import ParamValidator

    shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    kinds = yaml.safe_load(rendered("ray", launcher={**CLUSTER["launcher"], "spot": spot}))["available_node_types"]
    for kind in kinds.values():
        request = {**kind["node_config"], "MinCount": 1, "MaxCount": 1}
        assert ParamValidator().validate(request, shape).generate_report() == ""
        for mistake in ({"InstanceTyp": "c5.large"}, {"BlockDeviceMappings": [{"Ebs": {"VolumeSize": "100"}}]}):
            assert ParamValidator().validate(request | mistake, shape).has_errors()


def test_spare_capacity_is_for_training_nodes_and_never_for_the_head() -> None:
    aws = yaml.safe_load(rendered("ray", launcher={**CLUSTER["launcher"], "spot": True}))["available_node_types"]
    assert aws["ranks"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in aws["head"]["node_config"]
    gcp = yaml.safe_load(rendered("ray", launcher=GCP))["available_node_types"]
    assert gcp["ranks"]["node_config"]["scheduling"][0]["preemptible"] is True
    assert "preemptible" not in gcp["head"]["node_config"]["scheduling"][0]
    assert aws["head"]["resources"] == {"CPU": 0}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"launcher": {**HOSTS, "workers": ["10.0.0.2"]}}, "2 hosts and the run needs 5"),
        ({"launcher": {**HOSTS, "workers": ["10.0.0.1"] * 4}}, "names a host twice"),
        ({"nodes__home": "/runs"}, "ends with the machines of aws"),
    ],
)
def test_a_launcher_that_cannot_hold_the_run_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        rendered("ray", **changes)


# ------------------------------------------------------------------------------------------- SkyPilot


def test_the_skypilot_task_asks_for_the_machines_of_the_config() -> None:
    task = yaml.safe_load(rendered("skypilot"))
    assert task["num_nodes"] == 5
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["infra"] == "aws/us-east-1"
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}
    assert "file_mounts" not in task
    bucket = yaml.safe_load(rendered("skypilot", nodes__home="/runs", skypilot__bucket="s3://mine"))
    assert bucket["file_mounts"] == {"/runs": {"source": "s3://mine", "mode": "MOUNT"}}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"nodes__accelerator": None}, "cluster.nodes.accelerator is missing"),
        ({"nodes__home": None}, "cluster.nodes.home is missing"),
        ({"nodes__home": "/home/me"}, "ends with the machine"),
        ({"nodes__home": "/home/me", "skypilot__bucket": "s3://mine"}, "is not in the bucket"),
    ],
)
def test_a_task_whose_run_would_end_with_its_machine_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        rendered("skypilot", **changes)
