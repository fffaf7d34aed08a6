"""Keep garbage collections of forked processes off what their server has imported.

A collection writes to every object that it looks at, and so copies each page of the server's
memory into the process: 0.3 CPU seconds of one that trains for half a second.
"""

import gc

gc.collect()
gc.freeze()
