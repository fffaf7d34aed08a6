"""What a cluster costs in USD per hour: with all its workers, and idle."""

from __future__ import annotations

from rayapp.cluster.sizes import Fleet
from rayapp.hardware import PRICE_DATE, Instance, usd_per_hour

# us-east-1 and us-west-2. Not included: data through a NAT gateway (0.045 USD per GB) or an
# interface endpoint (0.01 USD per GB), and stored logs. S3 through its endpoint is free.
# Sources, 2026-11-22: NAT, zeonedge.com "Eliminating AWS NAT Gateway Costs" (2026-04-10);
# endpoints, by zone, usage.ai "AWS network costs" (2026-05) and cloudcostkit.com's calculator; EKS,
# AWS's blog "Amazon EKS extended support for Kubernetes versions pricing", by which a version past
# its 14 months costs 0.60.
NAT_USD_PER_HOUR = 0.045
ENDPOINT_USD_PER_HOUR = 0.01
EKS_USD_PER_HOUR = 0.10
ENDPOINTS = {"ecs": 11, "kuberay": 12}  # the lists in infra/ecs/main.tf and infra/eks/main.tf


def cost_line(platform: str, fleet: Fleet, head: Instance, region: str, market: str) -> str:
    """Return a line with the cost in USD per hour: with all workers, and idle (head only)."""
    worker, price = fleet.worker.instance, usd_per_hour(fleet.worker.instance, region)
    head_usd = usd_per_hour(head, region)
    fixed = NAT_USD_PER_HOUR + ENDPOINTS[platform] * ENDPOINT_USD_PER_HOUR
    fixed += EKS_USD_PER_HOUR if platform == "kuberay" else 0.0
    nodes = f"{fleet.max_nodes} x {worker.name}"
    if market != "on-demand":
        return (
            f"cost: {nodes} ({market}: price not known here), {_idle(head, head_usd, fixed)}, "
            f"{region}, {PRICE_DATE}"
        )
    if price is None:
        return (
            f"cost: {nodes}: no on-demand price known in {region}, {_idle(head, head_usd, fixed)}"
        )
    busy = "unknown" if head_usd is None else f"{fleet.max_nodes * price + head_usd + fixed:.2f}"
    return (
        f"cost: {busy} USD/h with {nodes} ({price:g} each, on demand), "
        f"{_idle(head, head_usd, fixed)}, {region}, {PRICE_DATE}"
    )


def _idle(head: Instance, head_usd: float | None, fixed: float) -> str:
    if head_usd is None:
        return f"idle {fixed:.2f} USD/h and the head {head.name} of unknown price"
    return f"idle {head_usd + fixed:.2f} USD/h with the head {head.name}"
