"""Runs as Ray jobs, and the handle of a run: submit it, watch it, stop it, find it again by name.

    job = rayapp.submit("configs/llama3_8b_sft.yaml", run={"name": "demo"})
    job.watch(); job.metrics().plot("step", "loss"); job.result().model_path
    job = rayapp.job("s3://bucket/runs/demo")       # another day, another machine, no cluster

package.py     what is sent: entrypoint, environment, the folder that is uploaded
client.py      submit, list, follow, stop, over Ray's Jobs API
submission.py  how a run is sent, and what is noted of it
handle.py      submit, job, Job
remote.py      the jobs of a run on the user's cluster
results.py     what a run's folder says it was asked, and what came out: config, Result
page.py        the live view as HTML, for notebooks
terminal.py    the live view in a terminal
figures.py     the figures that both show
"""

from rayapp.jobs.client import JobError, JobsClient
from rayapp.jobs.package import Submission, SubmitOptions, prepare

__all__ = ["JobError", "JobsClient", "Submission", "SubmitOptions", "prepare"]
