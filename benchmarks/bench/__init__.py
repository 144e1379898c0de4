"""What things cost on this machine: `trefoil bench`.

- `report_cost`: what a report costs to carry, seal and open
- `device_timing`: what a call to a device costs, in time
- `device_watching`: what a caller who watches the time can tell
- `device_page`: what the pages say about that
- `lanes`: the same work in several processes
- `area`: how well two samples can be told apart
- `noise_cost`: what each noise mode costs and buys
- `throughput`: what the MPC costs over the clear, and where the time goes
- `plaintext`: the baselines in the clear
- `naive_mpyc`: the baseline that a newcomer to MPyC would write
- `spu_sum`: SecretFlow SPU on the same histograms
- `validity`: what lying devices cost the helpers
- `commands`: `trefoil bench`
"""
