"""Clusters from a config: the files in cluster/ filled in and checked, what they cost, the way in.

    files = render("ecs", config, Options(account="123456789012"))   # {path: text}
    write(files, Path("build/ecs"))

Sizes come from `rayapp.hardware` alone. The files in cluster/ are declarative, with `${name}` where
something is filled in; which names there are is in `render.py`.
"""

from rayapp.cluster.render import PLATFORMS, Options, cost, render, write

__all__ = ["PLATFORMS", "Options", "cost", "render", "write"]
