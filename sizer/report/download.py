"""Size of a model's weights as hubs state it, in GB, next to the GiB of devices: the units differ by 7 %."""

from __future__ import annotations

from sizer.base.units import format_both
from sizer.report.estimate import Estimate
from sizer.report.report import Report


def describe_download(report: Report, estimate: Estimate) -> str:
    """Return the size of an estimate's weights in both units; empty for shards and adapters.

    The estimate of a shard has a part of the weights, that of an adapter more than the weights.
    """
    request = report.request
    if request.get("parallel") not in (None, "none") or request.get("train") == "adapter" or not estimate.weights_bytes:
        return ""
    return f"{format_both(estimate.weights_bytes)} to download"
