"""An sbatch script: Ray on the allocation, the run on Ray, and the way through time limits and preemption. PURE.

Takes a `Fleet` → text of a script that holds everything, the config included. USR1 (before the time limit, or when a
partition of higher priority wants the nodes) and TERM make the run save; after USR1 the job is put back into the
queue, and the same script goes on. Measured on Slurm 22.05: docs/clusters.md says what each signal does.
"""

from __future__ import annotations

import shlex

from launch.clusters.fleet import Fleet, entry_command, fill
from pretrain.config.cluster_targets import SlurmConfig
from pretrain.errors import UserError

_BODY = r"""set -uo pipefail
umask 077
say() { printf '%s %s\n' "$(date '+%F %T')" "$*"; }

# What every process of the run gets. The token is new in every allocation and only lives in the environment.
@SETUP@
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_DASHBOARD_STARTUP_TIMEOUT_S=300 # a busy node takes its time
@EXPORTS@

work=/tmp/pretrain-$SLURM_JOB_ID
rm -rf "$work" && mkdir "$work" || exit 1
cat > "$work/run.yaml" <<'END_OF_CONFIG'
@CONFIG@END_OF_CONFIG

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
@ADDRESS@
head_ip=$(address_of "${nodes[0]}")
answers() { (exec 3<> "/dev/tcp/$1/$2") 2> /dev/null; }

# Twenty ports of this job, above those of Ray's workers: the first twenty where nobody answers on the head's node.
taken() {
  local port
  for ((port = base; port < base + 20; port++)); do
    if answers "$head_ip" "$port" || answers 127.0.0.1 "$port"; then return 0; fi
  done
  return 1
}
base=$((20000 + SLURM_JOB_ID % 600 * 20)) first=$base
while taken; do
  base=$((20000 + (base - 20000 + 20) % 12000))
  [ "$base" -ne "$first" ] || { say "error: all ports from 20000 to 31999 are taken on ${nodes[0]}"; exit 3; }
done

# start NODE INDEX OPTION...: Ray on one node, as long as the step lives.
start() {
  local name=$1 index=$2
  shift 2
  srun --overlap --exact --nodes=1 --ntasks=1 --cpus-per-task=@CPUS@@GPUS@ --nodelist="$name" --export=ALL \
    ray start --block --node-ip-address="$(address_of "$name")" --num-cpus=@RAY_CPUS@ --num-gpus=@RAY_GPUS@ \
    --object-store-memory=@OBJECT_STORE@ --dashboard-agent-listen-port=$((base + 4 + index % 16)) \
    --disable-usage-stats "$@" > "$work/ray-$name.log" 2>&1 &
}

# USR1: time is nearly up, or the nodes are wanted. TERM: the job is cancelled, requeued or preempted.
run='' asked=''
trap 'asked=USR1; say "USR1: saving, then back into the queue"; [ -z "$run" ] || kill -TERM "$run" 2> /dev/null' USR1
trap 'asked=${asked:-TERM}; say "TERM: saving"; [ -z "$run" ] || kill -TERM "$run" 2> /dev/null' TERM

say "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, nodes ${nodes[*]}, head $head_ip:$base"
TMPDIR=$work start "${nodes[0]}" 0 --head --port="$base" --temp-dir="$work/ray" --dashboard-host=127.0.0.1 \
  --dashboard-port=$((base + 1)) --ray-client-server-port=$((base + 2)) --include-dashboard=true
head=$!
until answers "$head_ip" "$base" && answers 127.0.0.1 $((base + 1)); do
  if ! kill -0 "$head" 2> /dev/null; then
    say "error: Ray did not start on ${nodes[0]}:"
    tail -n 20 "$work/ray-${nodes[0]}.log"
    exit 3
  fi
  sleep 0.5
done
for ((index = 1; index < ${#nodes[@]}; index++)); do
  start "${nodes[index]}" "$index" --address="$head_ip:$base"
done

code=5
if [ -z "$asked" ]; then
  @ENTRY@ &
  run=$!
  [ -z "$asked" ] || kill -TERM "$run"
  # `wait` also returns when a signal was caught.
  while wait "$run"; code=$?; kill -0 "$run" 2> /dev/null; do :; done
  if [ "$code" -gt 128 ]; then
    wait "$run"
    last=$?
    [ "$last" -eq 127 ] || code=$last
  fi
fi
say "the run ended with code $code"
# Above 128: the command was still starting. What it has submitted goes on from its last checkpoint.
if [ "$asked" = USR1 ] && { [ "$code" -eq 5 ] || [ "$code" -gt 128 ]; }; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 60 # Slurm ends this script
fi
mapfile -t steps < <(jobs -p)
kill "${steps[@]}" 2> /dev/null
srun --overlap --nodes=${#nodes[@]} --ntasks-per-node=1 --kill-on-bad-exit=0 rm -rf "$work" 2> /dev/null
exit "$code"
"""

_ADDRESS = r"""address_of() {
  getent ahostsv4 "$(scontrol show node "$1" | grep -oP 'NodeAddr=\K\S+')" | awk 'NR == 1 { print $1 }'
}"""
_INTERFACE_ADDRESS = r"""address_of() {
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" ip -4 -o address show dev @INTERFACE@ |
    awk 'NR == 1 { sub("/.*", "", $4); print $4 }'
}"""


def render(fleet: Fleet) -> str:
    """The script. Raises UserError when the config has no `cluster.slurm`."""
    slurm = fleet.config.cluster.slurm
    if slurm is None:
        raise UserError(
            "cluster.slurm is missing. An allocation needs a time limit. "
            "Set cluster.slurm.time_limit_s, such as 24h; the job goes on in the next allocation."
        )
    gpus = f" --gpus-per-node={fleet.slots}" if fleet.on_gpus else ""
    interface = fleet.nodes.interface
    named = interface is not None and interface.isalnum()  # not one of NCCL's patterns
    body = fill(
        _BODY,
        fleet,
        entry_command('"$work/run.yaml"', '"http://127.0.0.1:$((base + 1))"'),
        ADDRESS=_INTERFACE_ADDRESS.replace("@INTERFACE@", str(interface)) if named else _ADDRESS,
        CPUS=str(fleet.nodes.cpus),
        GPUS=gpus,
    )
    return f"#!/bin/bash\n# {fleet.title()}. Submit it with: sbatch FILE\n" + _options(fleet, slurm) + body


def _options(fleet: Fleet, slurm: SlurmConfig) -> str:
    options = [
        f"--job-name={shlex.quote(fleet.config.name)}",
        f"--nodes={fleet.num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={fleet.nodes.cpus}",
        f"--mem={fleet.nodes.memory // 2**20}M",
        f"--time={_clock(slurm.time_limit_s)}",
        f"--signal=B:USR1@{int(slurm.grace_s)}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
    ]
    options += [f"--gpus-per-node={fleet.slots}"] if fleet.on_gpus else []
    options += ["--exclusive"] if slurm.exclusive else []
    options += ["--no-kill"] if fleet.elastic else []  # the run itself goes on without a lost node
    for name, value in (("partition", slurm.partition), ("account", slurm.account), ("qos", slurm.qos)):
        options += [f"--{name}={value}"] if value else []
    return "".join(f"#SBATCH {option}\n" for option in [*options, *slurm.options])


def _clock(seconds: float) -> str:
    """Seconds in Slurm's form, rounded up to minutes because Slurm counts those."""
    minutes = -(-int(seconds) // 60)
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"
