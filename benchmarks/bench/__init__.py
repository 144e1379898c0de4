"""What things cost on this machine: `trefoil bench`.

- `report_cost`: what a report costs to carry, seal and open
- `device_timing`: what the time of a call tells its caller
- `noise_cost`: what each noise mode costs and buys
- `throughput`: what the MPC costs over the clear, and where the time goes
- `plaintext`: the baselines in the clear
- `naive_mpyc`: the baseline that a newcomer to MPyC would write
- `processes`: what the helpers' processes have used
- `throughput_plots`: the throughput results, drawn
- `commands`: `trefoil bench`
"""
