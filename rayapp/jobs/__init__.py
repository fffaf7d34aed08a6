"""Runs as Ray jobs: what is sent to a cluster, and what is asked of it.

    cluster = Cluster.at("http://127.0.0.1:8265")
    order = prepare(config, SubmitOptions(working_dir="."))      # everything wrong is said here
    submission_id = cluster.submit(order)
    for text in cluster.follow(submission_id): print(text, end="")

package.py  the order: entrypoint, environment, the folder that is uploaded
client.py   the cluster: submit, list, follow, stop, over Ray's Jobs API
"""

from rayapp.jobs.client import JobError, JobsClient
from rayapp.jobs.package import Submission, SubmitOptions, prepare

__all__ = ["JobError", "JobsClient", "Submission", "SubmitOptions", "prepare"]
