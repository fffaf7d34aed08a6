"""Render cluster files from a config, check them, tell their cost, connect to the cluster.

    files = render("ecs", config, Options(account="123456789012"))   # {path: text}
    write(files, Path("build/ecs"))

Machine sizes come from `rayapp.hardware` alone. The files in cluster/ are declarative, with
`${name}` placeholders; `cluster_files.py` has their names.
"""

from rayapp.cluster.cluster_files import cost, paths_of_this_machine, render, write
from rayapp.cluster.options import PLATFORMS, Options

__all__ = ["PLATFORMS", "Options", "cost", "paths_of_this_machine", "render", "write"]
