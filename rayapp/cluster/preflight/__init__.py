"""Check a cluster before a run is started on it.

    python -m rayapp.cluster.preflight [CONFIG.yaml] [--section.field=value ...] [--json]

node_probe.py   an actor on each node: versions, GPUs, limits, disk, storage
speed.py        measures one device: FLOP/s and memory bandwidth
collectives.py  measures collectives, as nccl-tests prints them, and links between nodes
nccl.py         reads NCCL's log: which network it really sends through
worker.py       an actor that runs the last three
survey.py       runs all of it on the connected cluster, every wait with a limit
facts.py        what the survey found, as plain values: ClusterFacts
findings.py     Requirements of a cluster, and Finding, something that fails them
assessment.py   `assess`: findings from facts and requirements, a pure function
network.py      its part about EFA, collectives and links
job.py          sends all of it to a cluster as a job, for the command and for Python
page.py         prints facts and findings, or gives them as plain values
"""
