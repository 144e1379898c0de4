"""The paper's evaluation: many devices simulated in columns, three accounting policies, every figure.

- `world`: impressions, conversions and queries as columns; batches; the epochs of each window
- `microbenchmark`: the workload of Figures 4 and 7
- `patcg`: the workload of Figure 5
- `criteo`: the workload of Figure 6
- `files`: readers of the real data sets, and of one's own tables
- `policies`: Cookie Monster, ARA-like and IPA-like; many filters charged at once
- `on_devices`: Cookie Monster on real devices; policies and functions named on the command line
- `simulation`: the three systems over one world
- `seeds`: one experiment for many seeds at once, and the bands of their results
- `bias`: what a querier learns from the side query
- `experiments`: every experiment as a function from options to a result
- `through_mpc`: one point of Figure 4 with real devices and helpers
- `small_worlds`: devices with a handful of impressions, and what a querier can learn from them, exactly
- `attack`: what colluding sites can learn or destroy; every guarantee about sites as an exact game
- `malicious_helper`: what a malicious helper can learn or destroy
- `regression`: how good a publisher's model is, in simulation and through three helpers
- `plan`: the ε that a query needs, and its cost
- `results`: results as they are printed and written
- `figures`: every subfigure, drawn; the recorded numbers of the paper
- `own_workload`: `trefoil.simulate`, the systems on tables of one's own
- `commands`: `trefoil experiment` and `trefoil plan`
"""
