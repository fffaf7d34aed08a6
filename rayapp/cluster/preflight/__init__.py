"""Check a cluster before a run is started on it.

    python -m rayapp.cluster.preflight [CONFIG.yaml] [--section.field=value ...] [--json]

node_probe.py    an actor on each node: versions, GPUs, limits, interfaces, disk, storage
group_worker.py  an actor on each device: its speed, an all-reduce, links, the network NCCL takes
survey.py        runs both on the connected cluster, every wait with a limit
facts.py         what the survey found (ClusterFacts) and what is wanted (Requirements)
assessment.py    `assess`: findings from facts and requirements, a pure function
network.py       its part about addresses, EFA, the all-reduce and links
__main__.py      the command, and its page
job.py           sends all of it to a cluster as a job, for the command and for Python
"""
