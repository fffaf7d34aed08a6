"""What `python -m rayapp COMMAND` does, a function each: argv in, exit code out.

planning.py  plan
clusters.py  render, connect
jobs.py      preflight, submit, list, status, logs, watch, stop, resume
results.py   report, generate
"""
