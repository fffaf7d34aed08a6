"""Submit runs as Ray jobs, and the handle of a run: watch it, stop it, find it again by name.

job = rayapp.submit("configs/llama3_8b_sft.yaml", run={"name": "demo"})
job.watch(); job.metrics().plot("step", "loss"); job.result().model_path
job = rayapp.job("s3://bucket/runs/demo")       # another day, another machine, no cluster
"""

from rayapp.jobs.client import JobError, JobsClient
from rayapp.jobs.package import Submission, SubmitOptions, prepare

__all__ = ["JobError", "JobsClient", "Submission", "SubmitOptions", "prepare"]
