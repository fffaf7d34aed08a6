"""Take cluster/ and configs/ of the root into the wheel; all else is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

FILES = {"rayapp._files.cluster": "cluster", "rayapp._files.configs": "configs"}
setup(packages=[*find_namespace_packages(include=["rayapp*"]), *FILES], package_dir=FILES)
