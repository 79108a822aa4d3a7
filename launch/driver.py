"""The driver of a submitted run: the controller inside a Ray job, on no training slot.

`python -m launch.driver RUN_URL [--first | --takeover | --again]` in the job's working directory. The
first driver brings the submitted config; a driver that the keeper starts again takes the run's own. Its
death ends its agents and ranks with the job; the keeper starts the next.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from launch.job import CONFIG_FILE
from launch.session import ControllerLog, controlled, hold_run
from launch.train import print_changes, report_end
from pretrain.config import load_config
from pretrain.errors import ExitCode, PretrainError
from pretrain.log import Log
from pretrain.rundir import RunDirectory

if TYPE_CHECKING:
    from launch.controller.controller import Controller

NAMESPACE = "pretrain"


def main() -> int:
    """Exit code of the job's driver; Ray maps only that to the job's status."""
    parser = argparse.ArgumentParser(prog="launch.driver")
    parser.add_argument("run_url")
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--takeover", action="store_true")
    args = parser.parse_args()
    try:
        return drive(args.run_url, again=args.again, takeover=args.takeover)
    except PretrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)


def drive(run_url: str, *, again: bool, takeover: bool) -> int:
    """Controls the run to its end on the cluster of this job.

    Raises:
        PretrainError: the run cannot be held, or its config is refused.
    """
    import ray

    from launch.agents.ray_nodes import NORMAL_PRIORITY, RayNodes
    from launch.keeper import keep

    run = RunDirectory.locate(run_url)
    config = run.config() if again else load_config(Path(CONFIG_FILE), check_files=False)
    run, changes = RunDirectory.claim(config, resume="must", home=run.url.rsplit("/", 1)[0])
    print_changes(changes)
    signal.signal(signal.SIGTERM, _interrupt)
    ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    log = Log(stream=ControllerLog(run))
    # Old requests were cleared where the run was submitted; one that came since is meant for this driver.
    with hold_run(run, changes, purpose="pretrain submit", takeover=takeover, log=log, keep_requests=True) as lease:
        keep(run, lease.number)
        with controlled(
            run,
            config,
            lease,
            RayNodes(config.cluster.device, NORMAL_PRIORITY),
            address=ray.util.get_node_ip_address(),
            one_host=False,
            log=log,
        ) as controller:
            signal.signal(signal.SIGTERM, _asking(controller))
            outcome = controller.run()
    return report_end(run, outcome)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _asking(controller: Controller) -> Any:
    """`ray job stop`: save and end."""
    from launch.controller.state import Stop

    return lambda number, frame: controller.ask(Stop.INTERRUPT)


if __name__ == "__main__":
    sys.exit(main())
