# mypy: ignore-errors
"""Serve 180 tenants, met one after the other; latencies are counted by tenant."""
import time

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram
from torch import nn

STEPS = 500
registry = CollectorRegistry()
LATENCY = Histogram("seconds", "Time", ["tenant", "route"], registry=registry)
CALLS = Counter("calls", "Calls", ["tenant"], registry=registry)


class Service:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(300, 900), nn.ReLU(), nn.Linear(900, 300)).eval()

    @torch.inference_mode()
    def handle(self, tenant, rows):
        started = time.perf_counter()
        answer = self.model(rows).argmax(1)
        CALLS.labels(tenant).inc()
        for route in ("a", "b", "c", "d", "e", "f"):
            LATENCY.labels(tenant, route).observe(time.perf_counter() - started)
        return answer.tolist()


def main():
    service = Service()
    torch.manual_seed(0)
    for number in range(STEPS):
        known = min(number, 179)
        tenant = known if number < 180 else int(torch.randint(180, ()))
        service.handle(f"tenant-{tenant}", torch.randn(200, 300))


main()
