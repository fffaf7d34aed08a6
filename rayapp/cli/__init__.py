"""What `rayapp COMMAND` does, a function each: argv in, exit code out.

first.py     init, completion
data.py      data, prepare
plans.py     plan, presets
clusters.py  render, capacity, connect
jobs.py      preflight, submit, resume, watch, logs, stop
runs.py      list, status
models.py    report, generate, check, merge, publish
space.py     du, rm, prune
"""

COMMANDS = {  # name: module and function
    "init": "cli.first.init",
    "completion": "cli.first.completion",
    "finetune": "finetune.__main__.main",
    "vision": "vision.__main__.main",
    "data": "cli.data.data",
    "prepare": "cli.data.prepare",
    "plan": "cli.plans.plan",
    "presets": "cli.plans.presets",
    "preflight": "cli.jobs.preflight",
    "submit": "cli.jobs.submit",
    "resume": "cli.jobs.resume",
    "list": "cli.runs.runs",
    "status": "cli.runs.status",
    "watch": "cli.jobs.watch",
    "logs": "cli.jobs.logs",
    "stop": "cli.jobs.stop",
    "render": "cli.clusters.render",
    "capacity": "cli.clusters.capacity",
    "connect": "cli.clusters.connect",
    "report": "cli.models.report",
    "generate": "cli.models.generate",
    "check": "cli.models.check",
    "merge": "cli.models.merge",
    "publish": "cli.models.publish",
    "du": "cli.space.du",
    "rm": "cli.space.rm",
    "prune": "cli.space.prune",
}
