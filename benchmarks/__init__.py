"""What the system costs and how well it does: workloads, baselines, the paper's experiments, the demonstration."""
