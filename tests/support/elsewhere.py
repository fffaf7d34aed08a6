"""Run a module's command as a driver that takes itself for one of another machine.

    python elsewhere.py rayapp.finetune --run.name=demo ...

It waits for a lease instead of looking up whether the holder's process still exists.
"""

from __future__ import annotations

import runpy
import sys

from rayapp.driver import lease

if __name__ == "__main__":
    del sys.argv[0]
    lease._machine = lambda: ["elsewhere", "", ""]
    runpy.run_module(sys.argv[0], run_name="__main__")
