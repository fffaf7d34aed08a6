"""Read NCCL's own log (NCCL_DEBUG=INFO): which network it really sends through.

    network_of(["ip-10-0-0-1:79:79 [0] NCCL INFO Using network Socket"])     # "socket"

NCCL tries plug-ins and transports in turn and uses the first that works, so that a broken EFA is
slow and no error. The plug-in's line names libfabric's provider, which may be tcp on a machine with
EFA; NCCL's own line says whether it uses the plug-in at all, and takes precedence.
Source: logs of NCCL 2.4 to 2.28 and aws-ofi-nccl 1.0 to 1.17 in their projects' issues.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

ENVIRONMENT = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
FABRICS = ("aws libfabric", "libfabric", "ofi")  # names of aws-ofi-nccl in NCCL's log, by version

_PROVIDER = re.compile(r"NET/OFI Selected provider is ([\w;-]+)", re.IGNORECASE)
_NETWORK = re.compile(r"(?:Using network|Assigned NET plugin) (.+?)(?: to comm)?\s*$")
_TRANSPORT = re.compile(r"NET/(Socket|IB) ?: Using ")
_VIA = re.compile(r" via NET/(.+?)/\d+")


def network_of(lines: Iterable[str]) -> str | None:
    """Return efa (or another provider of libfabric), ib, socket, or a plug-in's own name.

    None: the log does not say, for example before NCCL has made a communicator.
    """
    provider = network = transport = via = None
    for line in lines:
        if found := _PROVIDER.search(line):
            provider = found[1].split(";")[0].casefold()
        if found := _NETWORK.search(line):
            network = found[1].casefold()
        if found := _TRANSPORT.search(line):
            transport = found[1].casefold()
        if found := _VIA.search(line):
            via = found[1].casefold()
    name = via or network or transport  # a channel's, else the chosen, else the found network
    if name in FABRICS:
        return provider or "libfabric"
    return name
