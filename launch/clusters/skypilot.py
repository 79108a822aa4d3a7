"""A task for SkyPilot: machines from whichever cloud has them, Ray on them, the run on Ray. PURE.

Takes a `Fleet` → YAML. `sky jobs launch FILE` watches the machines and runs the same task again elsewhere when they
are taken away; the run goes on from its directory, which lies in a bucket. Ray's port differs from the one of
SkyPilot's own Ray (6380). The token reaches the nodes by SkyPilot's secrets, not by this file.
"""

from __future__ import annotations

from typing import Any

from launch.clusters.fleet import Fleet, dump, entry_command, fill
from pretrain.errors import UserError

MOUNT = "/runs"
_RUN = r"""set -uo pipefail
@SETUP@
@EXPORTS@
export RAY_AUTH_MODE=token
work=$HOME/.pretrain && mkdir -p "$work" && chmod 700 "$work"
head_ip=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")
my_ip=$(sed -n "$((SKYPILOT_NODE_RANK + 1))p" <<< "$SKYPILOT_NODE_IPS")
options="--disable-usage-stats --node-ip-address=$my_ip --num-cpus=@RAY_CPUS@ --num-gpus=@RAY_GPUS@"
options="$options --object-store-memory=@OBJECT_STORE@"
if [ "$SKYPILOT_NODE_RANK" -gt 0 ]; then
  until (exec 3<> "/dev/tcp/$head_ip/6379") 2> /dev/null; do sleep 1; done
  # As long as there is a head, also after a fault here. Its end ends the run, and it alone says whether well.
  while (exec 3<> "/dev/tcp/$head_ip/6379") 2> /dev/null; do
    # shellcheck disable=SC2086
    ray start --block --address="$head_ip:6379" $options
    sleep 1
  done
  exit 0
fi
cat > "$work/run.yaml" <<'END_OF_CONFIG'
@CONFIG@END_OF_CONFIG
# shellcheck disable=SC2086
ray start --head --block --port=6379 --dashboard-host=127.0.0.1 --dashboard-port=8265 $options &
ray=$!
until (exec 3<> "/dev/tcp/127.0.0.1/8265") 2> /dev/null; do kill -0 "$ray" || exit 3; sleep 1; done
@ENTRY@ &
run=$!
trap 'kill -TERM "$run" 2> /dev/null' TERM USR1
while wait "$run"; code=$?; kill -0 "$run" 2> /dev/null; do :; done
kill "$ray"
[ "$code" -eq 4 ] && exit 0 # stopped on request: nothing to recover from
exit "$code"
"""


def render(fleet: Fleet) -> str:
    """The task. Raises UserError when the config does not say what SkyPilot needs."""
    skypilot = fleet.config.cluster.skypilot
    if skypilot is None:
        raise UserError(
            "cluster.skypilot is missing. SkyPilot needs to know where it may look for machines. "
            "Set cluster.skypilot.infrastructure, such as aws/us-east-1, or cluster.skypilot.spot."
        )
    nodes = fleet.nodes
    if fleet.on_gpus and nodes.accelerator is None:
        raise UserError(
            "cluster.nodes.accelerator is missing. SkyPilot looks for machines by their GPU. "
            "Set it to a name such as H100 or A100-80GB."
        )
    if "://" not in fleet.home and skypilot.bucket is None:
        raise UserError(
            f"cluster.nodes.home={fleet.home} ends with the machine. A run that goes on elsewhere needs a bucket. "
            "Set cluster.nodes.home to a URL, or cluster.skypilot.bucket, which is mounted at /runs."
        )
    if "://" not in fleet.home and fleet.home != MOUNT and not fleet.home.startswith(f"{MOUNT}/"):
        raise UserError(
            f"cluster.nodes.home={fleet.home} is not in the bucket. cluster.skypilot.bucket is mounted at {MOUNT}. "
            f"Set cluster.nodes.home={MOUNT}."
        )
    resources: dict[str, Any] = {"cpus": f"{nodes.cpus}+", "memory": f"{-(-nodes.memory // 10**9)}+"}
    resources |= {"accelerators": f"{nodes.accelerator}:{fleet.slots}"} if fleet.on_gpus else {}
    resources |= {"infra": skypilot.infrastructure} if skypilot.infrastructure else {}
    resources |= {"image_id": f"docker:{nodes.image}"} if nodes.image else {}
    resources |= {"use_spot": skypilot.spot, "disk_size": skypilot.disk_gb}
    task: dict[str, Any] = {
        "name": "".join(letter if letter.isalnum() else "-" for letter in fleet.config.name.lower()),
        "num_nodes": fleet.num_nodes,
        "resources": resources,
        "secrets": {"RAY_AUTH_TOKEN": None},
    }
    if skypilot.bucket:
        task["file_mounts"] = {MOUNT: {"source": skypilot.bucket, "mode": "MOUNT"}}
    task["run"] = _run(fleet)
    head = (
        f"# {fleet.title()}.\n"
        "# export RAY_AUTH_TOKEN=$(openssl rand -hex 32); sky jobs launch FILE --secret RAY_AUTH_TOKEN\n"
    )
    return head + dump(task)


def _run(fleet: Fleet) -> str:
    return fill(_RUN, fleet, entry_command('"$work/run.yaml"', '"http://127.0.0.1:8265"'))
