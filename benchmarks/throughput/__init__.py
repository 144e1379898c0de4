"""What aggregation under MPC costs over aggregation in the clear: `trefoil bench throughput`.

- `baselines`: plain sums, a trusted server, bare HPKE opens and the naive program
- `naive_mpyc`: the program that a newcomer to MPyC would write
- `grid`: the cells to measure, and their time and disk
- `point`: the record of one cell: ratios, and where seconds and processor time go
- `measurement`: helpers, batches, yardsticks and queries, in order
- `view`: tables, sentences, plots and CSV; the body of the command
"""
