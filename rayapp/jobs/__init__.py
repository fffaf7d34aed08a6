"""Submit runs as Ray jobs, and the handle of a run: watch it, stop it, find it again by name.

    job = rayapp.submit("configs/llama3_8b_sft.yaml", run={"name": "demo"})
    job.watch(); job.metrics().plot("step", "loss"); job.result().model_path
    job = rayapp.job("s3://bucket/runs/demo")       # another day, another machine, no cluster

package.py     build a Submission: entrypoint, runtime environment, zipped working directory
private.py     refuse working directories with secrets or with links out of the folder
secrets.py     pass secrets to a job as ARNs
client.py      submit, list, follow and stop jobs over Ray's Jobs API; addresses of clusters
handle.py      submit, Job
find.py        job, runs
remote.py      send a run to the user's cluster, and find its jobs there
results.py     read a run's config, steps and result from its folder
notebook.py    the live view as HTML, with buttons where ipywidgets is installed
terminal.py    the live view in a terminal
"""

from rayapp.jobs.client import JobError, JobsClient
from rayapp.jobs.package import Submission, SubmitOptions, prepare

__all__ = ["JobError", "JobsClient", "Submission", "SubmitOptions", "prepare"]
