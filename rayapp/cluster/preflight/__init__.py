"""Check a cluster before money is spent on it.

    python -m rayapp.cluster.preflight [CONFIG.yaml] [--section.field=value ...] [--json]

node_probe.py   what a node has: versions, GPUs, limits, disk, storage
speed.py        what a device does alone
collectives.py  what workers reach together, as nccl-tests prints it; links between nodes
nccl.py         which network NCCL really sends through, by its log
worker.py       an actor that measures the last three
survey.py       all of it on the connected cluster, nothing waited for without a limit
facts.py        what was found out, as values
findings.py     what a cluster is held to, and what is wrong with it
assessment.py   decides that from the facts: pure
network.py      the part of it about links and collectives
page.py         one page of it
"""
