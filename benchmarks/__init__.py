"""Measurements, the paper's experiments, and the demonstrations.

- `workloads`: simulated people and their reports
- `throughput`: what aggregation under MPC costs over aggregation in the clear
- `costs`: what a report, a device, noise and validity cost on this machine; `trefoil bench`
- `experiments`: the paper's evaluation, every figure with one command
- `results`: result files, and the tables that documents quote from them
- `demos`: `trefoil demo` and `trefoil live`
"""
