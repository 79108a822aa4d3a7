"""Kinds of clusters: the local one, and those that `pretrain cluster render` writes files for."""

KINDS = {
    "slurm": "sbatch script: Ray on the allocation, requeued at its end, on which the run goes on",
    "kuberay": "RayJob (or, with --cluster, RayCluster) for the KubeRay operator, with all it needs",
    "ray": "file for Ray's cluster launcher: AWS, GCP or own hosts",
    "skypilot": "task for SkyPilot",
}
